"""A communication hook for torch's DistributedDataParallel that exchanges its buckets on a lane.

Python's garbage collector does not see the reference that torch has to a hook. An object here must therefore
not refer to the wrapper, or neither would ever be freed.

`TorchPowerSgd` is torch's PowerSGD, with which ours is compared (Vogels et al. 2019, arXiv:1905.13727).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.devices import device_of
from strategies.exchange.buckets import Bucket, BucketRange, own_stride, pieces_of
from strategies.exchange.lane import open_lane
from strategies.gradient_exchange import GradientExchange


class Hook:
    """Averages buckets during the backward pass, one at a time, in the order in which they are full.

    An average may take several collectives, and all ranks must call them in one order.
    """

    def __init__(self, average: SharedAverage | TorchPowerSgd, link: Link, device: torch.device) -> None:
        self._average = average
        self._link = link
        self._lane = open_lane(device)
        self._device = device
        self._failure: Exception | None = None

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to average; the future gets the bucket's values when they are the mean."""
        self._link.announce_bucket()
        # On CUDA the result is ready when the stream of the lane reaches it.
        done: Future[Tensor] = device_of(self._device).future()

        def job() -> None:
            failure: str | None = None
            try:
                self._average.average(bucket)
            except Exception as error:
                # The border of the lane: torch waits for the future, and must not wait for ever. The future
                # gets only the words of the error, as the error holds all frames that it passed through;
                # `raise_failure` raises the error itself.
                self._failure, failure = error, str(error)
            if failure is None:
                done.set_result(bucket.buffer())
            else:
                done.set_exception(RuntimeError(failure))  # type: ignore[arg-type]

        self._lane.run(job)
        return done

    def raise_failure(self) -> None:
        """Raise the error of an average, if one failed: torch reports only that it got no tensor."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class BucketLayout:
    """The places of parameters, by name, in torch's buckets, which torch forms anew after the first step.

    Gradients have the memory format of their parameters there (such as channels last), which
    `GradBucket.gradients` loses.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._strides = {name: own_stride(parameter) for name, parameter in named.items()}
        self._in_rows = {name for name, parameter in named.items() if parameter.is_contiguous()}
        self._known: dict[tuple[str, ...], tuple[BucketRange, ...]] = {}

    def pieces(self, bucket: GradBucket) -> tuple[BucketRange, ...]:
        parameters = bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        if names not in self._known:
            shapes = (parameter.shape for parameter in parameters)
            self._known[names] = pieces_of(zip(names, shapes, strict=True))
        return self._known[names]

    def in_rows(self, pieces: tuple[BucketRange, ...]) -> bool:
        """Return whether all pieces lie row by row."""
        return all(piece.name in self._in_rows for piece in pieces)

    def part(self, piece: BucketRange, values: Tensor) -> Tensor:
        """Return a parameter's part of the values, or of a vector of the same layout: a view in its shape."""
        return piece.of(values).view(-1).as_strided(piece.shape, self._strides[piece.name])


class SharedAverage:
    """The average by a `GradientExchange`."""

    def __init__(self, exchange: GradientExchange, layout: BucketLayout) -> None:
        self._exchange = exchange
        self._layout = layout

    def average(self, bucket: GradBucket) -> None:
        """Replace the values of torch's bucket, this rank's gradients, by their mean over the ranks."""
        values, pieces = bucket.buffer().mul_(1 / self._exchange.size), self._layout.pieces(bucket)
        if bucket.parameters()[0].is_complex() and not values.is_complex():
            # torch gives the hook complex gradients as pairs of real numbers.
            values = torch.view_as_complex(values.view(-1, 2))
        if self._layout.in_rows(pieces):
            self._sum(bucket.index(), values, pieces)
            return
        # Compressors see matrices, and residuals have their places, row by row.
        parts = [self._layout.part(piece, values) for piece in pieces]
        rows = torch.cat([part.flatten() for part in parts])
        self._sum(bucket.index(), rows, pieces)
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece.of(rows))

    def _sum(self, index: int, values: Tensor, pieces: tuple[BucketRange, ...]) -> None:
        self._exchange.sum_shares(Bucket(index=index, values=values, pieces=pieces))


RAMP_STEPS = 2
"""Uncompressed first steps: the fewest that torch allows, as it forms buckets anew after the first step."""
_PER_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class TorchPowerSgd:
    """Averages torch's buckets by torch's hook, and gives the residuals as a `GradientExchange` does.

    torch keeps residuals (its errors) by bucket, in units of gradients; here they are by parameter, in units
    of shares. The residual of a parameter that is not compressed is its gradient less the mean of all ranks:
    the sum of these over the ranks is 0.
    """

    ramp_steps = RAMP_STEPS

    def __init__(self, rank: int, layout: BucketLayout, *, group: ProcessGroup | None, seed: int) -> None:
        """`rank` is the rank of the approximation; a group of None is the default group."""
        self.audited = False
        """Residuals are kept in any case."""
        self._size = torch.distributed.get_world_size(group)
        self._state = PowerSGDState(
            process_group=group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=RAMP_STEPS,
            # Without an epsilon, a gradient of zeros becomes NaN.
            orthogonalization_epsilon=1e-8,
            random_seed=seed,
        )
        self._layout = layout
        self._pieces: dict[int, tuple[BucketRange, ...]] = {}
        """The pieces of each bucket when it was last averaged."""
        self._loose: dict[str, Tensor] = {}
        """Residuals of parameters that have left their bucket."""

    def average(self, bucket: GradBucket) -> None:
        self._follow(bucket)
        powerSGD_hook(self._state, bucket).wait()

    def carried(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the residual of the last exchange, which is added to the next share as it is."""
        return self.residual()

    def residual(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the residual of each parameter; no residual in the uncompressed first steps."""
        for name, residual in self._residuals().items():
            yield name, residual / self._size

    def rescale(self, factor: float) -> None:
        for residual in (*self._state.error_dict.values(), *self._loose.values()):
            residual.mul_(factor)

    def state_dict(self) -> State:
        buckets = {
            name: {index: values.clone() for index, values in getattr(self._state, name).items()}
            for name in _PER_BUCKET
        }
        drawn = self._state.rng.get_state(legacy=False)["state"]
        return {
            **buckets,
            "pieces": {
                index: [[piece.name, list(piece.shape)] for piece in pieces]
                for index, pieces in self._pieces.items()
            },
            "loose": {name: residual.clone() for name, residual in self._loose.items()},
            "iter": self._state.iter,
            "rng": {"key": [int(word) for word in drawn["key"]], "pos": int(drawn["pos"])},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a `state_dict` of the same rank.

        If the buckets have been formed anew by then, as in the first step of a new wrapper, residuals go with
        their parameters, and the factors start anew.
        """
        for name in _PER_BUCKET:
            saved = cast("dict[int, Tensor]", state[name])
            setattr(self._state, name, {index: values.clone() for index, values in saved.items()})
        named = cast("dict[int, list[tuple[str, list[int]]]]", state["pieces"])
        self._pieces = {
            index: pieces_of((name, torch.Size(shape)) for name, shape in pieces)
            for index, pieces in named.items()
        }
        loose = cast("dict[str, Tensor]", state["loose"])
        self._loose = {name: residual.clone() for name, residual in loose.items()}
        self._state.iter = cast(int, state["iter"])
        drawn = cast("dict[str, Any]", state["rng"])
        words = {"key": np.array(drawn["key"], dtype=np.uint32), "pos": drawn["pos"]}
        # torch draws only integers from this generator, so it has no spare Gaussian value to restore.
        self._state.rng.set_state({"bit_generator": "MT19937", "state": words, "has_gauss": 0, "gauss": 0.0})

    def _residuals(self) -> dict[str, Tensor]:
        residuals = dict(self._loose)
        for index, values in self._state.error_dict.items():
            residuals |= {piece.name: self._layout.part(piece, values) for piece in self._pieces[index]}
        return residuals

    def _follow(self, bucket: GradBucket) -> None:
        """If the buckets have been formed anew, move the residuals with their parameters."""
        index, pieces = bucket.index(), self._layout.pieces(bucket)
        if self._pieces.get(index, pieces) != pieces:
            self._loose = self._residuals()
            for name in _PER_BUCKET:
                getattr(self._state, name).clear()
            self._pieces.clear()
        self._pieces[index] = pieces
        if self._loose:
            residual = self._state.error_dict[index] = torch.zeros_like(bucket.buffer())
            for piece in pieces:
                if piece.name in self._loose:
                    self._layout.part(piece, residual).copy_(self._loose.pop(piece.name))
