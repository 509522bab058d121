"""Timed blocks: warm-up until the step time is steady, measuring to a target or a budget, on-off quads.

After them come blocks that are not timed against each other: one with the recorder on, and on CUDA one under
the profiler. Their steps are real ones, and training continues from them.

A block is some steps between a barrier and the last rank's finished work; nothing inside a block waits for
the device or talks to other ranks beyond what training itself does. Decisions fall between blocks, from
figures that all ranks share, so that all decide alike.

The clock that times the steps times the blocks too. On a device with streams it is the device's: a block
begins when the queues of all devices have met, and ends when this one has done all that the block queued,
on every stream. Blocks are long there, by the step time that the warm-up has seen.

Every block holds complete periods of the strategy: each has its share of what is done only in every H-th
step. A block may begin anywhere in a period, as the steps before it (a proof's, say) leave it, for any H
steps in a row hold exactly one such step.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from harness.worker.exchange.buckets import BucketCounter
from harness.worker.exchange.group import ExchangeGroup
from harness.worker.exchange.recorder import Recorder, steps_to_record
from harness.worker.exchange.stand_ins import StandIns
from harness.worker.measure.clock import StepClock, joined_steps
from harness.worker.measure.profiler import PROFILED_STEPS, kernel_times, profiled_kernels
from harness.worker.rank.control import Control
from harness.worker.rank.failure import DivergedError
from harness.worker.rank.log import RankLog
from harness.worker.rank.usage import available_bytes
from results.cell import FEWEST_QUADS, StepPolicy, gpu_warm_up_s
from results.record import KernelTimes, Quads, Recorded, StepColumns
from results.statistics import FEWEST_FOR_INTERVAL, t_interval, within_run
from strategies.devices import device_of
from strategies.snapshot import Snapshot
from strategies.trainer import Trainer
from workloads.batch import Batch

STEADY_WITHIN = 0.05
"""Warm-up has ended when the steps of a block differ from those before it by no more than this share."""
FLAT_WITHIN = 0.005
"""A clock is flat when the means of both halves of its readings differ by no more than this share and three
standard errors. With 5 s in each half and no noise this allows a drift of 2 % in 20 s."""
MESSAGES_SHARE = 1 / 8
"""The share of the free memory that messages may take which are kept for blocks without exchange."""
Stop = Literal["target", "budget", "blocks"]
Wait = Callable[..., int]
"""`Turns.wait`: say where the run is, and return the steps of the block to time; 0: no more blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured blocks of this rank."""

    columns: StepColumns
    blocks_ns: list[int]
    block_steps: int
    """Steps of each block: the policy's, filled up to complete periods of the strategy."""
    stop: Stop


class NotTrainedError(Exception):
    """Steps without exchange did not do what steps with it do, so that their time is not comparable."""


@contextmanager
def always_updated(trainer: Trainer) -> Iterator[list[object]]:
    """List the updates of steps that will be undone. A loss scaler keeps its scale, and leaves none out."""
    updates, scaler, optimizer = list[object](), trainer.scaler, trainer.optimizer
    hook = optimizer.register_step_post_hook(lambda *made: updates.append(made))

    def step(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        # Each step waits for the device to know whether a gradient overflowed, as it does with the exchange.
        sum(found.item() for found in state["found_inf_per_device"].values())
        optimizer.step()

    if scaler.is_enabled():
        # Attributes of the instance hide its methods.
        vars(scaler).update(_maybe_opt_step=step, update=partial(scaler.update, scaler.get_scale()))
    try:
        yield updates
    finally:
        hook.remove()
        if scaler.is_enabled():
            del scaler._maybe_opt_step, scaler.update


class Stopwatch:
    """Runs one trainer in timed blocks, together with the other ranks."""

    def __init__(
        self, trainer: Trainer, batches: Iterator[Batch], *, clock: StepClock, control: Control, log: RankLog
    ) -> None:
        self._trainer = trainer
        self._batches = batches
        self._clock = clock
        self._control = control
        self._log = log
        self.after_block: Callable[[StepColumns], None] = lambda columns: None
        """Called with the steps of each block of the warm-up and of measuring, before the next one begins."""
        self.around_steps: Callable[[int], AbstractContextManager[None]] = lambda steps: nullcontext()
        """Returns a context for the steps of a block, which is entered and left outside of their time."""
        self.buckets: BucketCounter | None = None
        """Buckets of the period before the recorded steps, once these were taken."""
        self._device = device_of(control.device)
        self._fastest_s: float | None = None
        """The step time of the fastest block of the warm-up on a device, the same on all ranks."""
        self._timed_ns = 0.0
        """The time of the blocks that were measured."""
        self._off_losses_missing = 0
        """Steps without exchange since the last quad whose loss was not finite."""
        trainer.observer = clock

    def take_period(self) -> int:
        """Take one period of steps without keeping their times, and return its length; collective."""
        self._block(self._trainer.model.period, self._batches)
        return self._trainer.model.period

    def warm_up(
        self,
        policy: StepPolicy,
        clock_mhz: Callable[[float], Sequence[float]] = lambda seconds: (),
        *,
        idle_s: float = math.inf,
    ) -> tuple[StepColumns, bool]:
        """Take steps until the step time is steady, or up to the policy's limit. Returns the steps, and
        whether the time is steady.

        On a device the limits are times, by the time `idle_s` since this process timed steps, and the clock
        of the device must be flat as well: `clock_mhz` gives the readings of the clock of this rank's device
        in the last seconds, and none where it cannot be read. The first steps, in which a strategy works
        differently, have been taken before (`proof.first_steps`).
        """
        columns, warmed_s, before_s, blocks = StepColumns(), 0.0, math.inf, 0
        steady, timed = False, self._device.asynchronous and policy.warmup_max_steps > 0
        least_s, most_s = gpu_warm_up_s(self._control.largest([idle_s])[0] if timed else idle_s)
        # At least two blocks, however long they are: no step time of one block can be called steady.
        while not steady and (
            min(warmed_s - most_s, blocks - 2) < 0
            if timed
            else len(columns.step_ns) < policy.warmup_max_steps
        ):
            steps = self._block_steps(policy)
            _, wall, block = self._block(steps, self._batches)
            columns = joined_steps(columns, block)
            self.after_block(block)
            warmed_s, blocks, step_s = warmed_s + wall / 1e9, blocks + 1, wall / steps / 1e9
            steady = abs(step_s - before_s) <= STEADY_WITHIN * before_s < math.inf
            before_s = step_s
            if timed:
                self._fastest_s = min(step_s, self._fastest_s or math.inf)
                steady = steady and warmed_s >= least_s and self._is_flat(clock_mhz(least_s))
        return columns, steady

    def _is_flat(self, readings: Sequence[float]) -> bool:
        """Whether the clock of no rank's device goes up or down; collective."""
        half, change = len(readings) // 2, 0.0
        if half:
            # Three standard errors of the difference, from successive readings, which a drift hardly changes
            # (von Neumann 1941). Without them one of many devices would always exceed the bound.
            error = 3 * math.sqrt(fmean((b - a) ** 2 for a, b in itertools.pairwise(readings)) / half)
            apart = abs(fmean(readings[half:]) - fmean(readings[:half]))
            change = (apart - error) / fmean(readings)
        return self._control.largest([change])[0] <= FLAT_WITHIN

    def measure(self, policy: StepPolicy, *, quads: int = 0) -> Measured:
        """Time blocks until the within-run interval is narrow enough, the blocks run out, or the budget has
        room only for the fewest of the `quads` that follow."""
        kept = 4 * min(quads, FEWEST_QUADS)
        columns = StepColumns()
        steps = self._block_steps(policy)
        own: list[int] = []
        walls: list[float] = []
        stop: Stop | None = None
        while stop is None:
            mine, wall, block = self._block(steps, self._batches)
            columns = joined_steps(columns, block)
            self.after_block(block)
            own.append(mine)
            walls.append(wall)
            stop = stop_of(walls, policy, kept)
        self._timed_ns = sum(walls)
        return Measured(columns=columns, blocks_ns=own, block_steps=steps, stop=stop)

    def measure_in_turns(self, wait: Wait, warmup: StepColumns) -> Measured:
        """Time a block whenever `wait` gives a number of steps, until it gives 0: `wait` decides when, and
        how many.

        All ranks wait by themselves, outside of every collective, and are given the same numbers.
        """
        columns, steps = StepColumns(), 0
        own: list[int] = []
        last = warmup.step_ns[-self._trainer.model.period :]
        given = wait("measure", step_ns=sum(last) / max(1, len(last)))
        while given:
            # On a device no block is shorter than others, however few steps are asked for.
            steps = StepPolicy(block_steps=given).steps_of_block(self._trainer.model.period, self._fastest_s)
            mine, _, block = self._block(steps, self._batches)
            columns = joined_steps(columns, block)
            self.after_block(block)
            own.append(mine)
            given = wait("block", ns=mine, steps=steps)
        return Measured(columns=columns, blocks_ns=own, block_steps=steps, stop="blocks")

    def measure_exposed(self, exchange: ExchangeGroup, policy: StepPolicy) -> Quads:
        """Time interleaved blocks with the exchange on, off, off, on; what the off blocks did is undone.

        After `FEWEST_QUADS`, no further one begins if their interval is as narrow as the policy's target, or
        if it would end after the budget, of which the blocks before them took a part.

        Batches are drawn beforehand and shared by an on block and the off block next to it, so that the
        data phase is on neither side and the training data go on as if the off blocks had not been.

        Raises NotTrainedError on all ranks, after a complete quad, if a step without exchange of one of them
        did not do what a step with it does.
        """
        steps = self._steps_of_quads(policy)
        traffic, stand_ins = exchange.traffic, exchange.traffic.stand_ins
        quads = Quads(steps=steps)
        while len(quads.on_first_ns) < policy.quads and not self._enough(quads, policy):
            batches = self._draw(steps)
            keep = partial(stand_ins.keep_messages, self._room_for_messages())
            quads.on_first_ns.append(self._drawn_block(batches, last_period=keep)[0])
            snapshot = Snapshot(self._trainer)
            traffic.enabled = False
            with always_updated(self._trainer) as updates:
                quads.off_first_ns.append(self._off_block(batches, quads, stand_ins))
                # Deleted before the next batches are drawn, because batches take memory of the device.
                del batches
                batches = self._draw(steps)
                quads.off_second_ns.append(self._off_block(batches, quads, stand_ins))
            stand_ins.forget()
            traffic.enabled = True
            snapshot.restore()
            quads.on_second_ns.append(self._drawn_block(batches)[0])
            del batches, snapshot
            self._require_trained(2 * steps - len(updates))
        return quads

    def _enough(self, quads: Quads, policy: StepPolicy) -> bool:
        """Whether the quads say enough, or the budget has no room for another one; collective."""
        on = np.add(quads.on_first_ns, quads.on_second_ns, dtype=np.float64)
        off = np.add(quads.off_first_ns, quads.off_second_ns, dtype=np.float64)
        if len(on) < FEWEST_QUADS:
            return False
        exposed = t_interval(0.0, (on - off) / on.mean(), "", "t95-quads")
        with_another_ns = self._timed_ns + (on + off).sum() + (on + off).mean()
        half, ends_ns = self._control.largest([exposed.high or 0.0, float(with_another_ns)])
        return half <= policy.target or ends_ns > policy.budget_s * 1e9

    def _room_for_messages(self) -> float:
        """Return the bytes that received messages may take; ranks of a node share the memory of a host."""
        figures, ranks = self._device.memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if figures is None:
            return MESSAGES_SHARE * available_bytes() / ranks
        # What the allocator keeps for later is free, too.
        return MESSAGES_SHARE * (figures.free + figures.reserved - figures.allocated)

    def _steps_of_quads(self, policy: StepPolicy) -> int:
        """Return the steps of a quad's block: as many as of any block, or fewer, but never fewer than the
        policy's, where the drawn batches would take more than half of the memory that is free on the device.

        Collective. It draws the batches of a short block, sees what memory they take, and trains on them.
        """
        period = self._trainer.model.period
        steps, fewest = self._block_steps(policy), policy.steps_of_block(period)
        before = self._device.memory()
        if steps == fewest or before is None:
            return steps
        batches = self._draw(fewest)
        after = self._device.memory()
        assert after is not None
        # Data that are given again and again take no further memory.
        each = (after.allocated - before.allocated) / fewest
        fit = after.free / 2 / each if each > 0 else math.inf
        [negated] = self._control.largest([-min(steps, fit)])
        self._drawn_block(batches)
        return max(fewest, int(-negated) // period * period)

    def record(self, exchange: ExchangeGroup, device: torch.device) -> Recorded:
        """Take a block of about 20 steps with the recorder on; collective.

        One period goes before it and is not kept: it shows how many operations there are, and which threads
        issue them, and its buckets are counted. Raises TooManyOperationsError on all ranks if a record could
        not hold a period's.
        """
        period = self._trainer.model.period
        recorder = Recorder(self._clock, device, stages=self._trainer.model.bubble_ideal is not None)
        self._trainer.observer = exchange.traffic.recorder = recorder
        before, self._trainer.model.observe_part = self._trainer.model.observe_part, recorder.part
        self.buckets = exchange.traffic.buckets = BucketCounter(recorder)
        try:
            with self.buckets.counting(self._trainer):
                _, _, columns = self._block(period, self._batches)
            exchange.traffic.buckets = None
            operations = len(recorder.take(columns).operations.step)
            [most] = self._control.largest([float(operations)])
            _, _, columns = self._block(steps_to_record(period, int(most)), self._batches)
        finally:
            exchange.traffic.recorder = exchange.traffic.buckets = None
            self._trainer.observer, self._trainer.model.observe_part = self._clock, before
        return recorder.take(columns)

    def profile(self, device: torch.device) -> KernelTimes | None:
        """Return the kernels of complete periods of at least three steps; None if the profiler saw none.

        Collective, only on CUDA.
        """
        period = self._trainer.model.period
        steps = math.ceil(PROFILED_STEPS / period) * period
        with profiled_kernels(device) as kernels:
            # A sum by which the devices meet would be among the kernels.
            self._block(steps, self._batches, devices=False)
        return kernel_times(kernels, steps) if kernels else None

    def _block_steps(self, policy: StepPolicy) -> int:
        return policy.steps_of_block(self._trainer.model.period, self._fastest_s)

    def _draw(self, steps: int) -> list[Batch]:
        return list(itertools.islice(self._batches, steps * self._trainer.settings.accumulation))

    def _off_block(self, batches: list[Batch], quads: Quads, stand_ins: StandIns) -> int:
        """Take a block and undo it; add the times of its steps, whose sum is the block's, and of its copies.

        The time between steps is in the on blocks, too: each step has an equal share of it.
        """
        mine, columns = self._drawn_block(batches, undone=True, last_period=stand_ins.time_copies)
        quads.copies_ns.append(stand_ins.copies_ns() // self._trainer.model.period)
        self._off_losses_missing += columns.loss.count(None)
        count, between = len(columns.step_ns), mine - sum(columns.step_ns)
        shares = (between * (at + 1) // count - between * at // count for at in range(count))
        quads.off_step_ns.extend(ns + share for ns, share in zip(columns.step_ns, shares, strict=True))
        return mine

    def _require_trained(self, left_out: int) -> None:
        """Raise NotTrainedError on all ranks if steps without exchange of one of them had losses that are not
        finite, or left out updates; collective. This rank left out `left_out` of them."""
        losses, self._off_losses_missing = self._off_losses_missing, 0
        bad, missing = self._control.largest([float(losses), float(left_out)])
        # `missing` is negative where an optimizer makes several updates in a step.
        if bad > 0 or missing > 0:
            what = "had a loss that is not finite" if bad else "left out their update"
            raise NotTrainedError(f"without exchange {bad or missing:.0f} steps of a rank {what}")

    def _drawn_block(self, batches: list[Batch], **options: Any) -> tuple[int, StepColumns]:
        """Time a block with these batches; `_block` explains the `options`."""
        steps = len(batches) // self._trainer.settings.accumulation
        mine, _, columns = self._block(steps, iter(batches), **options)
        return mine, columns

    def _block(
        self,
        steps: int,
        batches: Iterator[Batch],
        *,
        undone: bool = False,
        devices: bool = True,
        last_period: Callable[[], None] = lambda: None,
    ) -> tuple[int, float, StepColumns]:
        """Time one block. Returns this rank's wall time, the longest wall time of all ranks, and the steps.
        Collective.

        `devices`: whether the ranks' devices meet before it, as their hosts do. `last_period` is called
        before the last period of steps.
        Raises DivergedError on all ranks if one had a loss that is not finite, unless the block is undone.
        """
        self._control.synchronize()
        self._control.begin_together(devices=devices)
        with self.around_steps(steps):
            start = self._device.moment()
            for left in range(steps, 0, -1):
                if left == self._trainer.model.period:
                    last_period()
                self._trainer.step(batches)
                # It reads a clock and logs a line every few seconds, so that slow steps do not look like a
                # hang.
                self._log.heartbeat()
            self._control.synchronize()
            # Read after the wait, because a strategy may leave work on streams other than the current one.
            end = self._device.moment()
        self._control.synchronize()
        mine = self._device.elapsed_ns(start, end)
        columns = self._clock.drain()
        wall, broken = self._control.largest([float(mine), float(None in columns.loss)])
        if broken and not undone:
            raise DivergedError
        return mine, wall, columns


def stop_of(walls: list[float], policy: StepPolicy, kept: int) -> Stop | None:
    """Why no further block follows, if none does; the budget has to last for `kept` blocks more."""
    if len(walls) < policy.min_blocks:
        return None
    if len(walls) >= FEWEST_FOR_INTERVAL:
        metric = within_run(walls, "ns")
        assert metric.high is not None
        if metric.high - metric.value <= policy.target * metric.value:
            return "target"
    if sum(walls) + kept * fmean(walls) >= policy.budget_s * 1e9:
        return "budget"
    return "blocks" if len(walls) >= policy.max_blocks else None
