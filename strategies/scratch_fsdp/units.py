"""The schedule of a sharded model: when units are gathered, freed and averaged, by hooks on both passes.

The stages of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5) differ in what stays gathered
between the uses of a unit: at stage 1 parameters, and gradients until the last micro-batch; at stage 2
parameters; at stage 3 neither, except that the unit around the blocks stays from its forward to the end of
backward.

All ranks call the modules in the same order, and issue the same collectives in the same order, whether a rank
has a gradient or not: blocks are averaged in the order of the backward pass, and the unit around them last.
Modules and parameters have only weak references to the schedule, so that it is freed with its owner.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from results.errors import UsageError
from strategies.exchange.lane import Pending
from strategies.scratch_fsdp.facts import MOST_UNDER_WAY
from strategies.scratch_fsdp.flat import FlatParameters, Scattering, Sharding
from strategies.training.missing_gradients import MissingGradients, UnlikeGradients, UnlikeStepError


class Unit:
    """Parameters that are gathered together: of one block, or around the blocks."""

    def __init__(self, module: nn.Module, flats: Sequence[FlatParameters]) -> None:
        """`module` uses the parameters."""
        self.module = module
        self.flats = flats
        self.trained = [flat for flat in flats if flat.trained]
        self._gathering: list[Pending] = []
        self.is_whole = False
        """Whether this rank has the gathered parameters, so that their next use exchanges nothing."""
        self.begin()

    def begin(self) -> None:
        """Reset the counts before a forward pass and its backward pass."""
        self.awaited = sum(len(flat.parameters) for flat in self.trained)
        """Number of parameters whose gradients have not come."""
        self.averaged = False
        """Whether the averages of its gradients have begun."""
        self.uses = 0
        """Number of calls of the module whose backward pass has not begun."""

    def start_gather(self) -> None:
        """Begin to gather, unless that has begun; collective."""
        if not self.is_whole and not self._gathering:
            self._gathering = [flat.start_gather() for flat in self.flats]

    def gather(self) -> None:
        """Gather the parameters; collective."""
        self.start_gather()
        self.settle()
        self.is_whole = True

    def settle(self) -> None:
        """Wait for a gathering that is under way."""
        if self._gathering:
            for work in self._gathering:
                work.wait()
            self._gathering, self.is_whole = [], True

    def outdate(self) -> None:
        """Note that the shards have changed, so that parameters must be gathered again."""
        self.is_whole = False

    def give_up(self) -> None:
        """Free the memory of the gathered parameters."""
        self.settle()
        self.is_whole = False
        for flat in self.flats:
            flat.give_up()

    def abandon(self) -> None:
        """After a failure: end all gatherings, and free the parameters and gradients of the unfinished
        step."""
        for work in self._gathering:
            with suppress(Exception):
                work.wait()
        self._gathering = []
        self.give_up()
        for flat in self.flats:
            flat.forget_gradients()


class UnitSchedule:
    """Gathers the units of one model, and averages their gradients, while the model computes."""

    def __init__(
        self, around: Unit, blocks: Sequence[Unit], sharding: Sharding, *, stage: int, prefetch: int
    ) -> None:
        """`blocks` in the order of the forward pass; `prefetch` of them are gathered ahead."""
        self._around = around
        self._units = [around, *blocks]
        self._sharding = sharding
        self._prefetch = prefetch
        self._adds_up_whole = stage == 1
        self._gives_up = stage == 3
        self._pending: deque[tuple[FlatParameters, Scattering]] = deque()
        """The vectors whose gradients are being averaged."""
        self._averages = False
        """Whether gradients that come now are averaged."""
        self._backward: Unit | None = None
        """The unit whose backward pass began last; None outside of backward."""
        self._lacking: set[str] = set()
        """Parameters without a gradient in this micro-batch."""
        self._missing: set[str] | None = None
        """Parameters without a gradient in every micro-batch of this step; None before the first."""
        self._refusal = MissingGradients(
            sharding.link, sharding.device, reason="shards are updated as a whole"
        )
        self._first_uses: UnlikeGradients | None = UnlikeGradients(sharding.link, sharding.device, ())
        """Compares the gatherings of units over the ranks in the first step; None after it."""
        self._stepping = False
        for place, unit in enumerate(self._units):
            self._hook(place, unit)

    def _hook(self, place: int, unit: Unit) -> None:
        unit.module.register_forward_pre_hook(_weak_hook(self.before_forward, place))
        unit.module.register_forward_hook(_weak_hook(self.after_forward, place))
        for flat in unit.trained:
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _weak_hook(self.gradient_came, place)
                )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Average the gradients of the micro-batches in this context into the shards, until its end.

        Raises UsageError if a parameter had no gradient, as `MissingGradients` does: a flat vector is updated
        as one, and a parameter without a gradient cannot be left out.
        """
        self._missing, self._stepping = None, True
        if self._first_uses is not None:
            self._first_uses.begin()
        try:
            yield
            self._meet(-1)
            while self._pending:
                self._finish_first()
            self._refusal.refuse(sorted(self._missing or ()))
            self._sharding.settle()
            self._first_uses = None
        except BaseException:
            # Also on Ctrl-C: pending exchanges would pair with collectives of a rank that continues.
            self._abandon()
            raise
        finally:
            self._stepping = False
            if self._first_uses is not None:
                self._first_uses.end()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Gather and average for one forward pass and its backward pass, in a `step`. Raises UsageError
        outside of one."""
        if not self._stepping:
            raise UsageError(
                "scratch-fsdp gathers and averages outside of the backward passes: train with a Trainer, or "
                "call the model's compute_gradients"
            )
        self._averages = last or not self._adds_up_whole
        for unit in self._units:
            unit.begin()
        yield
        if self._gives_up:
            if self._backward not in (None, self._around):
                # As `before_backward` does: a rank that had all gradients has averaged them by now.
                self._average(self._backward)
            self._meet(-1)
        for unit in reversed(self._units):
            self._average(unit)
            unit.settle()
            if self._gives_up:
                unit.give_up()
        if self._averages:
            self._missing = self._lacking if self._missing is None else self._missing & self._lacking
        self._end()

    def outdate(self) -> None:
        """Note that the shards have changed, so that parameters are gathered again before they are used."""
        for unit in self._units:
            unit.outdate()

    def _end(self) -> None:
        self._averages, self._backward, self._lacking = False, None, set()

    def _abandon(self) -> None:
        for _, averaging in self._pending:
            with suppress(Exception):
                averaging.wait()
        self._pending.clear()
        for unit in self._units:
            unit.abandon()
        self._end()

    def _meet(self, place: int) -> None:
        """Raise UsageError on all ranks if they gather units in unlike orders in the first step."""
        if self._first_uses is not None:
            self._first_uses.meet(
                place, sum(len(flat.shard) for flat in self._units[place % len(self._units)].flats)
            )

    def before_forward(self, place: int, module: nn.Module, inputs: object) -> None:
        if not self._units[place].is_whole:
            self._meet(place)
        self._units[place].gather()
        if self._backward is not None:
            # The model's own checkpointing repeats its forward pass: later units have already been freed.
            return
        for ahead in self._units[place + 1 : place + 1 + self._prefetch]:
            ahead.start_gather()

    def after_forward(self, place: int, module: nn.Module, inputs: object, output: object) -> None:
        if self._backward is not None:
            return
        unit = self._units[place]
        waiting = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if waiting:
            unit.uses += 1
            register_multi_grad_hook(waiting, _weak_hook(self.before_backward, place), mode="any")
        if self._gives_up and (unit is not self._around or not waiting):
            unit.give_up()

    def before_backward(self, place: int, gradient: Tensor) -> None:
        unit, left = self._units[place], self._backward
        unit.uses -= 1
        # The unit around the blocks is used before and after them.
        if place or left is None:
            self._backward = unit
        if place and left is not None and left not in (unit, self._around):
            # The backward pass of a unit ends where the pass of another begins: the layers that computed last
            # come first. A gradient that has not come by now will not: a rank that lacks one averages here,
            # between the same two gatherings as a rank that had it.
            if not left.uses:
                self._average(left)
            if self._gives_up:
                left.give_up()
        if self._gives_up:
            # Averages have begun on all ranks or on none, whether or not this rank had the gradients.
            self._meet(len(self._units) + place)
        unit.gather()
        # The unit around the blocks comes first in backward too, and is still gathered.
        end = place or len(self._units)
        for behind in self._units[max(1, end - self._prefetch) : end][::-1]:
            behind.start_gather()

    def gradient_came(self, place: int, parameter: nn.Parameter) -> None:
        unit = self._units[place]
        if self._averages and unit.averaged:
            raise UnlikeStepError(
                "a gradient came after its unit had been averaged: scratch-fsdp allows one backward pass for "
                "each micro-batch; if you use activation checkpointing, pass use_reentrant=False"
            )
        unit.awaited -= 1
        # The unit around the blocks is averaged at the end, as a gradient of the first block may still come.
        if place and not unit.awaited:
            self._average(unit)

    def _average(self, unit: Unit) -> None:
        """Begin to average the gradients of a unit, if that is due and has not begun; collective."""
        if unit.averaged or not self._averages:
            return
        unit.averaged = True
        for flat in unit.trained:
            self._lacking.update(flat.without_gradient())
            if len(self._pending) == MOST_UNDER_WAY:
                self._finish_first()
            self._pending.append((flat, flat.start_average()))

    def _finish_first(self) -> None:
        """Wait for the average that was begun first, and add it to its shard's gradient."""
        flat, averaging = self._pending.popleft()
        flat.add_gradient(averaging.wait())


def _weak_hook(method: Callable[..., None], place: int) -> Callable[..., None]:
    """Return a hook that calls a method of a schedule with the place of a unit, and does not keep the
    schedule alive."""
    weak = weakref.WeakMethod(method)

    def hook(*arguments: object) -> None:
        if (alive := weak()) is not None:
            alive(place, *arguments)

    return hook


def _tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors in the result of a module."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))
