"""The exchange of gradients: any compressor over any collective, during the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from results.cell import DEFAULT_COLLECTIVE, UNCOMPRESSED
from strategies.collectives.catalog import build_route
from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.compression.catalog import build_compressor
from strategies.compression.memory import BucketMemory
from strategies.exchange.buckets import Bucket, BucketRange, buckets_of
from strategies.exchange.lane import Pending, open_lane


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """The settings of the exchange of gradients, for any strategy."""

    group: ProcessGroup | None = None
    """None: the default group."""
    compression: str = UNCOMPRESSED
    collective: str = DEFAULT_COLLECTIVE
    node_size: int | None = None
    """Consecutive ranks that form a node (None: all of them), for `hierarchical` and `hsdp`."""
    seed: int = 0
    """Seed of the random numbers of compressors, the same on all ranks."""

    @property
    def is_plain(self) -> bool:
        """Whether it is the backend's all-reduce of uncompressed gradients."""
        return (self.compression, self.collective) == (UNCOMPRESSED, DEFAULT_COLLECTIVE)


PLAIN = ExchangeSettings()


class AuditableExchange(Protocol):
    """The exchange of gradients, as the proof (`carried`, `residual`) and snapshots (`state_dict`) use it."""

    audited: bool
    """Whether residuals are kept even where no feedback needs them, for a check of the conservation law."""

    def carried(self) -> Iterator[tuple[str, Tensor]]:
        """Yield for each parameter the residual that the next exchange adds to this rank's share."""

    def residual(self) -> Iterator[tuple[str, Tensor]]:
        """Yield for each parameter the residual of the last exchange: this rank's share less what was
        sent."""

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by `factor`, by which a loss scaler multiplies the gradients from now on."""

    def state_dict(self) -> State:
        """Return copies of all state that this rank keeps from step to step."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a `state_dict` of the same rank of an exchange of the same kind."""


class GradientExchange:
    """Sums buckets of gradients over the ranks of a group, compressed or not.

    Example, for a loop of your own, after `loss.backward()`::

        exchange = GradientExchange(ExchangeSettings(compression="topk:0.01"), device=device)
        exchange.average(model.parameters())

    All state that it keeps from step to step (residuals, factors, counters) is in its `state_dict`, which is
    each rank's own: save and load it on every rank.
    """

    def __init__(self, settings: ExchangeSettings = PLAIN, *, device: torch.device) -> None:
        """Collective, because it may create process groups for the nodes.

        Raises SpecError for an unknown compressor or collective.
        """
        self._link = link = Link(settings.group)
        self.compressor = build_compressor(settings.compression, seed=settings.seed, rank=link.rank)
        """The compressor of all buckets; the proof replaces it by a witness for some steps."""
        self._route = build_route(settings.collective, link, node_size=settings.node_size or link.size)
        # The backend overlaps its own all-reduce with the computation: that needs no lane.
        self._direct = settings.is_plain
        self._lane = open_lane(device)
        self._residuals = BucketMemory()
        self._own: tuple[Bucket, ...] | None = None
        self._audited = False
        self._complex: set[str] = set()
        """Parameters whose gradients go through a compressor as real numbers, two for each value."""

    @property
    def audited(self) -> bool:
        """Whether residuals are kept without feedback too, for the proof's check of the conservation law."""
        return self._audited

    @audited.setter
    def audited(self, value: bool) -> None:
        self._audited = value
        if not value and not self.compressor.feedback:
            self._residuals = BucketMemory()

    @property
    def ramp_steps(self) -> int:
        """Number of first steps that are compressed differently from all later steps."""
        return self.compressor.ramp_steps

    @property
    def size(self) -> int:
        """Number of ranks that exchange."""
        return self._link.size

    def start(self, bucket: Bucket) -> Pending:
        """Begin to replace the bucket's values, this rank's share, by the sum over the ranks.

        All ranks start the same buckets in the same order. The values must not be used before the wait. A
        plain exchange is the backend's own all-reduce; it uses neither `sum_shares` nor the lane.
        """
        self._link.announce_bucket()
        if self._direct:
            return self._link.start_all_reduce(bucket.values)
        return self._lane.run(lambda: self.sum_shares(bucket))

    def sum_shares(self, bucket: Bucket) -> None:
        """Do the exchange of `start`, on the calling thread."""
        if bucket.values.is_complex():
            self._complex.update(piece.name for piece in bucket.pieces)
            bucket = bucket.as_real()
        residual = self._residuals.of(bucket) if self.compressor.feedback or self.audited else None
        if residual is not None and self.compressor.feedback:
            self.compressor.compensate(bucket, residual)
        self._route.sum_shares(bucket, residual, self.compressor)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of those `parameters` that are trained by their mean over the ranks.

        Every call needs the same parameters; one without a gradient counts as zero on this rank, and gets the
        mean too. This is for a user's own loop, and does not overlap with the backward pass.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        named = {str(index): parameter for index, parameter in enumerate(trained)}
        if self._own is None:
            self._own = tuple(buckets_of({name: value.detach() for name, value in named.items()}))
        pending = []
        for bucket in self._own:
            for piece in bucket.pieces:
                _take_share(named[piece.name].grad, piece.of(bucket.values), self.size)
            pending.append(self.start(bucket))
        for bucket, under_way in zip(self._own, pending, strict=True):
            under_way.wait()
            for piece in bucket.pieces:
                named[piece.name].grad = piece.of(bucket.values)

    def carried(self) -> Iterator[tuple[str, Tensor]]:
        """Yield for each parameter the residual that the next exchange adds to this rank's share; nothing
        without feedback."""
        if self.compressor.feedback:
            for index, pieces, residual in self._residuals.vectors():
                yield from self._named(pieces, self.compressor.carried(index, residual))

    def residual(self) -> Iterator[tuple[str, Tensor]]:
        """Yield for each parameter the residual of the last exchange; without feedback only if `audited`."""
        for _, pieces, residual in self._residuals.vectors():
            yield from self._named(pieces, residual)

    def _named(self, pieces: Iterable[BucketRange], vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        for piece in pieces:
            own = piece.of(vector)
            yield piece.name, torch.view_as_complex(own) if piece.name in self._complex else own

    def rescale(self, factor: float) -> None:
        self._residuals.scale(factor)
        self.compressor.rescale(factor)

    def state_dict(self) -> State:
        return {"kept": self._residuals.state_dict(), "compressor": self.compressor.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from copies of a `state_dict` of the same rank of an exchange of the same kind."""
        with self._lane.memory():
            # Memory that a compressor frees in the lane returns to the stream that allocated it. Allocated on
            # the stream of the backward pass, it would be written to there while the lane still reads it.
            copied = copy.deepcopy(dict(state))
            self._residuals.load_state_dict(cast(State, copied["kept"]))
            self.compressor.load_state_dict(cast(State, copied["compressor"]))


def _take_share(gradient: Tensor | None, view: Tensor, size: int) -> None:
    """Write one rank's share of a mean over `size` ranks to `view`; a missing gradient is zero."""
    if gradient is None:
        view.zero_()
    else:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        torch.div(dense, size, out=view)
