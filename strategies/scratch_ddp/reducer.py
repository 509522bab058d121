"""Copy gradients into buckets, and average the buckets over the ranks, during the backward pass.

After Li et al. 2020 (PyTorch Distributed, arXiv:2006.15704, section 3.2): a hook on each parameter copies its
gradient into a bucket, and the exchange of a bucket begins as soon as it is full and the exchanges of all
buckets before it have begun. Buckets follow the order in which gradients become ready: for the first step the
reverse of the parameters' registration, for all others the order that was observed in the first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from results.errors import UsageError
from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.exchange.buckets import Bucket, own_stride, pieces_of
from strategies.exchange.lane import Pending
from strategies.gradient_exchange import GradientExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """The rules by which gradients are put into buckets."""

    first_bytes: int
    """The size of the first bucket of each data type; a small one lets the exchange begin early."""
    bytes: int
    """The size of all other buckets. The gradient with which a bucket reaches its size is its last."""
    find_unused: bool
    """Whether a parameter may have no gradient, which then counts as zero."""
    as_parameters: bool
    """Whether gradients have the memory format of their parameters (such as channels last), not row by
    row."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """The place of a parameter's gradient in the buckets."""

    parameter: nn.Parameter
    view: Tensor
    """Its part of the bucket's values, in its shape."""
    bucket: int


class GradientReducer:
    """Replaces the gradients of one model by their mean over the ranks.

    The gradients become views of the buckets: each is copied once, times 1 / ranks, and the optimizer reads
    from the bucket. Parameters have only weak references to the reducer, so that it is freed with its owner.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        exchange: GradientExchange,
        link: Link,
        bucketing: Bucketing,
    ) -> None:
        """`parameters` by name, in the order of registration; all of them require gradients."""
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._exchange = exchange
        self._link = link
        self._bucketing = bucketing
        # A tensor, as torch would convert a number to a tensor for every gradient.
        self._scale = torch.tensor(1 / link.size, dtype=torch.float64)
        self._order = list(reversed(range(len(self._parameters))))
        """The indices of parameters in the order in which gradients are expected."""
        self._observed: list[int] | None = []
        """The order in which gradients came; None once all ranks have agreed on an order."""
        self._buckets: list[Bucket] = []
        self._places: list[_Place] = []
        self._stale = True
        """Whether the buckets no longer follow the order."""
        self._active = False
        this = weakref.ref(self)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_hook, this, index)
            )

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Exchange the gradients of the one backward pass in this context; at its end they are averaged.

        Gradients accumulated before the context are exchanged with it. Raises UsageError at the end if a
        parameter has no gradient and `find_unused` is off; the other ranks then wait for this one.
        """
        self._begin()
        try:
            yield
            self._finish()
        except BaseException:
            # Also on Ctrl-C: pending exchanges would pair with collectives of a rank that continues.
            for pending in self._pending:
                with suppress(Exception):
                    pending.wait()
            if self._observed is not None:
                self._observed = []
            raise
        finally:
            self._active = False

    def _begin(self) -> None:
        if self._stale:
            self._form_buckets()
        self._awaited_parameters = set(range(len(self._parameters)))
        self._pieces_awaited = [len(bucket.pieces) for bucket in self._buckets]
        self._pending: list[Pending] = []
        self._active = True

    def ready(self, index: int) -> None:
        """Called by a parameter's hook in the backward pass: its gradient is complete."""
        if not self._active:
            return
        if index not in self._awaited_parameters:
            raise UsageError(
                f"the gradient of {self._names[index]} came twice in one exchange, which allows one backward "
                f"pass; if you use activation checkpointing, pass use_reentrant=False"
            )
        if self._observed is not None:
            self._observed.append(index)
        self._fill_and_start(index)

    def _fill_and_start(self, index: int) -> None:
        """Copy this rank's share of a gradient into its bucket, and start the exchange of full buckets."""
        place = self._places[index]
        gradient = place.parameter.grad
        if gradient is place.view:
            gradient.mul_(self._scale)
        elif gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            torch.mul(dense, self._scale, out=place.view)
            place.parameter.grad = place.view
        else:
            place.view.zero_()
        self._awaited_parameters.remove(index)
        self._pieces_awaited[place.bucket] -= 1
        # In the order of buckets, which is the same on all ranks; the order of gradients may differ.
        next_bucket = len(self._pending)
        while next_bucket < len(self._buckets) and not self._pieces_awaited[next_bucket]:
            self._pending.append(self._exchange.start(self._buckets[next_bucket]))
            next_bucket += 1

    @torch.no_grad()
    def _finish(self) -> None:
        without = [
            index for index in sorted(self._awaited_parameters) if self._parameters[index].grad is None
        ]
        if without and not self._bucketing.find_unused:
            names = ", ".join(self._names[index] for index in without[:3])
            raise UsageError(
                f"no gradient came for {names} ({len(without)} of {len(self._names)} parameters): if a "
                f"forward pass need not use them all, give the strategy find_unused=true"
            )
        for index in sorted(self._awaited_parameters):
            self._fill_and_start(index)
        for pending in self._pending:
            pending.wait()
        if self._bucketing.find_unused:
            self._share_unused()
        if self._observed is not None:
            self._agree_on_order(self._observed)

    def _share_unused(self) -> None:
        """Give a parameter without a gradient on this rank the mean, if another rank has a gradient for it.

        The host then waits for the device: the optimizer must know whether there is a gradient. A rank that
        has all gradients only informs the others, and does not wait (as torch's reducer).
        """
        used = [parameter.grad is not None for parameter in self._parameters]
        device = self._parameters[0].device
        if all(used):
            self._link.largest(torch.ones(len(used), dtype=torch.uint8, device=device))
            return
        anywhere = torch.tensor(used, dtype=torch.uint8, device=device)
        self._link.largest(anywhere)
        for place, is_used in zip(self._places, anywhere.tolist(), strict=True):
            if is_used:
                place.parameter.grad = place.view

    def _agree_on_order(self, observed: list[int]) -> None:
        """Make all ranks expect gradients in the order in which rank 0 saw them, from the next exchange on.

        The order of rank 0 is summed with zeros of the other ranks, together with a one of each rank: if the
        group is switched off for a measurement, the sum of ones shows it, and the ranks try again.
        """
        seen = set(observed)
        order = [*observed, *(index for index in self._order if index not in seen)]
        sent = torch.tensor([*order, 1], device=self._parameters[0].device)
        if self._link.rank != 0:
            sent[:-1] = 0
        self._link.all_reduce(sent)
        *agreed, reached = sent.tolist()
        self._observed = [] if reached < self._link.size else None
        if self._observed is None:
            self._order, self._stale = agreed, True

    def state_dict(self) -> State:
        """Return the order in which gradients are expected, by name; empty before ranks have agreed on
        one."""
        return {} if self._observed is not None else {"order": [self._names[index] for index in self._order]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Form the buckets of a `state_dict` for the next exchange; without an order it leaves them as they
        are."""
        if "order" in state:
            order = [self._names.index(name) for name in cast("list[str]", state["order"])]
            self._stale |= order != self._order
            self._order, self._observed = order, None

    def _form_buckets(self) -> None:
        """Form the buckets of the order; present gradients stay in the old buckets until they are copied."""
        # Free the old ones first.
        self._buckets, self._places = [], []
        places = {}
        ordered = [self._parameters[index] for index in self._order]
        for number, positions in enumerate(fill_buckets(ordered, self._bucketing)):
            members = [self._order[position] for position in positions]
            pieces = pieces_of((self._names[index], self._parameters[index].shape) for index in members)
            size = sum(piece.numel for piece in pieces)
            values = self._parameters[members[0]].detach().new_zeros(size)
            self._buckets.append(Bucket(index=number, values=values, pieces=pieces))
            for index, piece in zip(members, pieces, strict=True):
                parameter, view = self._parameters[index], piece.of(values)
                if self._bucketing.as_parameters:
                    view = view.view(-1).as_strided(parameter.shape, own_stride(parameter))
                places[index] = _Place(parameter=parameter, view=view, bucket=number)
        self._places = [places[index] for index in range(len(places))]
        self._stale = False


def fill_buckets(parameters: Sequence[Tensor], bucketing: Bucketing) -> list[list[int]]:
    """Return positions in `parameters`, bucket by bucket, in the order in which the buckets will be full.

    The parameters are in the order in which their gradients come; a bucket has one data type and device.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, parameter in enumerate(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(position)
    buckets = []
    for positions in kinds.values():
        bucket, held, limit = [], 0, bucketing.first_bytes
        for position in positions:
            bucket.append(position)
            held += parameters[position].nbytes
            if held >= limit:
                buckets.append(bucket)
                bucket, held, limit = [], 0, bucketing.bytes
        if bucket:
            buckets.append(bucket)
    return sorted(buckets, key=lambda bucket: bucket[-1])


def _hook(reducer: weakref.ref[GradientReducer], index: int, parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.ready(index)
