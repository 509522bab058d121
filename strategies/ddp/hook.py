"""A communication hook for torch's DistributedDataParallel that exchanges its buckets on a lane.

Python's garbage collector does not see the reference that torch has to a hook. An object here must therefore
not refer to the wrapper, or neither would ever be freed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from strategies.collectives.link import Link
from strategies.devices import device_of
from strategies.exchange.buckets import Bucket, BucketRange, own_stride, pieces_of
from strategies.exchange.lane import open_lane
from strategies.gradient_exchange import GradientExchange


class BucketAverage(Protocol):
    """The average of one bucket."""

    def average(self, bucket: GradBucket) -> None:
        """Replace the values of torch's bucket, this rank's gradients, by their mean over the ranks."""


class Hook:
    """Averages buckets during the backward pass, one at a time, in the order in which they are full.

    An average may take several collectives, and all ranks must call them in one order.
    """

    def __init__(self, average: BucketAverage, link: Link, device: torch.device) -> None:
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
