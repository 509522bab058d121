"""Timed blocks: when warm-up and measuring end, and what the on and off blocks train on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_builders import CPU, MS, a_stopwatch
from torch import Tensor, nn

from harness.worker.exchange.group import Traffic
from harness.worker.measure import blocks as measure
from harness.worker.measure.blocks import NotTrainedError, Stopwatch, always_updated
from harness.worker.rank.failure import DivergedError
from results.cell import StepPolicy
from results.record import StepColumns
from strategies import Trainer, TrainSettings, devices

Watch = Callable[..., tuple[Stopwatch, Any]]


class World:
    """Trainer, clock, control, log and time in one: every block takes the wall time that is written here."""

    def __init__(self, own_ms: Sequence[float], slowest_ms: Sequence[float] | None = None) -> None:
        self._own = iter(own_ms)
        self._slowest = iter(own_ms if slowest_ms is None else slowest_ms)
        self._now = 0
        self._steps = 0
        self._reads = 0
        self.blocks = 0
        self.settings = TrainSettings()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.optimizer = torch.optim.SGD([torch.zeros(1)])
        self.model = SimpleNamespace(period=1)
        self.device = CPU

    def step(self, batches: Iterator[object]) -> None:
        next(batches)
        self._steps += 1
        self.optimizer.step()

    def perf_counter_ns(self) -> int:
        # Read once at the start of a block, and once at its end.
        self._reads += 1
        if self._reads % 2 == 0:
            self._now += int(next(self._own) * MS)
        return self._now

    def drain(self) -> StepColumns:
        columns = [self._steps] * self._steps
        self._steps = 0
        self.blocks += 1
        return StepColumns(
            step_ns=columns,
            data_ns=columns,
            forward_ns=columns,
            backward_ns=columns,
            optimizer_ns=columns,
            loss=[1.0] * len(columns),
        )

    def largest(self, values: Sequence[float]) -> list[float]:
        return [next(self._slowest) * MS, *values[1:]]

    def synchronize(self) -> None: ...

    def begin_together(self, *, devices: bool) -> None: ...

    def heartbeat(self, **fields: object) -> None: ...


@pytest.fixture
def watch(monkeypatch) -> Watch:
    def make(own_ms: Sequence[float], slowest_ms: Sequence[float] | None = None) -> tuple[Stopwatch, World]:
        world: Any = World(own_ms, slowest_ms)
        monkeypatch.setattr(devices, "time", world)
        endless: Any = iter(int, 1)
        return Stopwatch(world, endless, clock=world, control=world, log=world), world

    return make


@pytest.mark.parametrize(
    ("walls", "blocks", "steady"),
    [
        # |96 - 100| <= 5 % of 100.
        ([100, 96], 2, True),
        # 80 is 20 % off 100; 79 is 1.25 % off 80.
        ([100, 80, 79], 3, True),
        # A slow block is no sign of steadiness, nor is the return from it; 101 after 100 is.
        ([100, 200, 100, 101], 4, True),
        # Ever faster, until the limit of 20 steps, 4 blocks of 5.
        ([100, 90, 80, 70], 4, False),
        # Steady in the very last block.
        ([100, 90, 80, 80], 4, True),
    ],
)
def test_warm_up_ends_when_a_block_is_like_the_one_before_or_at_the_limit(
    watch, walls, blocks, steady
) -> None:
    stopwatch, world = watch(walls)
    columns, found = stopwatch.warm_up(StepPolicy(block_steps=5, warmup_max_steps=20))
    assert (world.blocks, found) == (blocks, steady)
    assert columns.step_ns == [5] * 5 * blocks


def test_warm_up_judges_by_the_slowest_rank(watch) -> None:
    # This rank alone would be steady after two blocks.
    stopwatch, world = watch([100, 100, 100], slowest_ms=[200, 150, 150])
    _, steady = stopwatch.warm_up(StepPolicy(block_steps=5, warmup_max_steps=20))
    assert (world.blocks, steady) == (3, True)


def test_no_warm_up_is_not_a_steady_one(watch) -> None:
    stopwatch, world = watch([])
    columns, steady = stopwatch.warm_up(StepPolicy(warmup_max_steps=0))
    assert (columns, steady, world.blocks) == (StepColumns(), False, 0)


@pytest.mark.parametrize(
    ("asked", "period", "steps"), [(5, 1, 5), (5, 3, 6), (6, 3, 6), (5, 8, 8), (8, 5, 10), (1, 1, 1)]
)
def test_a_block_is_whole_periods_of_the_strategy(watch, asked, period, steps) -> None:
    stopwatch, world = watch([100] * 5)
    world.model.period = period
    warmup, _ = stopwatch.warm_up(StepPolicy(block_steps=asked, warmup_max_steps=2))
    # Two steps at most, but whole blocks: two of them if a block is a single step.
    assert warmup.step_ns == [steps] * max(steps, 2)
    measured = stopwatch.measure(StepPolicy(block_steps=asked, min_blocks=3, max_blocks=3))
    assert measured.columns.step_ns == [steps] * 3 * steps
    assert (measured.block_steps, len(measured.blocks_ns)) == (steps, 3)


class GpuWorld(World):
    """A device whose steps take 2 ms; `mhz` is its clock at each half second, and `others` the share by which
    the clock of another rank's device changes."""

    asynchronous = True
    step_ms = 2

    def __init__(self, mhz: Any = None, others: Callable[[float], float] = lambda at: -math.inf) -> None:
        super().__init__([])
        self.lengths: list[int] = []
        self._mhz, self._others = mhz, others

    def begin_together(self, *, devices: bool) -> None:
        self._now += 1

    def step(self, batches: Iterator[object]) -> None:
        super().step(batches)
        self._now += self.step_ms * MS

    def moment(self) -> int:
        return self._now

    def elapsed_ns(self, first: int, second: int) -> int:
        return second - first

    def drain(self) -> StepColumns:
        self.lengths.append(self._steps)
        return super().drain()

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values) if len(values) > 1 else [max(values[0], self._others(self._now / 1e9))]

    def clock_mhz(self, seconds: float) -> list[float]:
        every = [self._mhz(at / 2) for at in range(self._now // (500 * MS) + 1)] if self._mhz else []
        return every[-round(2 * seconds) :]


def gpu(patches: pytest.MonkeyPatch, *given: Any) -> tuple[Stopwatch, Any]:
    world: Any = GpuWorld(*given)
    patches.setitem(devices.KINDS, "cpu", lambda device: world)
    return Stopwatch(world, iter(int, 1), clock=world, control=world, log=world), world


# Blocks of 0.5 s after a first one of 5 steps, 10 ms: 10 s are over after 20 of them, and 40 s after 80.
@pytest.mark.parametrize(
    ("mhz", "others", "blocks"),
    [
        # Where no clock can be read, the time and the step time decide.
        (None, lambda at: 0.0, 20),
        # From 8 s on it is 80 MHz lower. Of 20 readings, k of before differ in their means by 8 k MHz. Three
        # standard errors are 3 sqrt(80^2 / 19 / 10) = 17.4, and 0.5 % of the clock 9.6: k is 3 at 16 s.
        (lambda at: 1980.0 if at < 8 else 1900.0, lambda at: 0.0, 32),
        # Every third reading is higher: four of the first ten and three of the others, so that the means
        # differ by 0.9 %, and three standard errors are 7 %.
        (lambda at: 2100.0 if round(2 * at) % 3 == 1 else 1920.0, lambda at: 0.0, 20),
        (lambda at: 1980.0, lambda at: 0.006 if at < 20 else 0.005, 40),
        # It falls for ever.
        (lambda at: 1980.0 * (1 - 0.01 * at), lambda at: 0.0, 80),
    ],
)
def test_a_warm_up_on_a_gpu_ends_by_time_and_by_the_flat_clocks_of_all_ranks(
    monkeypatch, mhz, others, blocks
) -> None:
    stopwatch, world = gpu(monkeypatch, mhz, others)
    _, steady = stopwatch.warm_up(StepPolicy(warmup_max_steps=1), world.clock_mhz)
    assert world.lengths == [5, *[250] * blocks]
    assert steady is (blocks < 80)


# 0.1 s after the last timed steps four seconds are enough, 6 s after them six are; then the clock is flat.
# Where it falls for ever, a warm-up ends after four times as long. After a minute it is as in a new process.
@pytest.mark.parametrize(
    ("idle_s", "falls", "blocks"),
    [(0.1, 0.0, 8), (6.0, 0.0, 12), (60.0, 0.0, 20), (0.1, 0.01, 32), (6.0, 0.01, 48), (60.0, 0.01, 80)],
)
def test_a_later_warm_up_lasts_as_long_as_the_gpu_was_idle(monkeypatch, idle_s, falls, blocks) -> None:
    stopwatch, world = gpu(monkeypatch, lambda at: 1980.0 * (1 - falls * at), lambda at: 0.0)
    _, steady = stopwatch.warm_up(StepPolicy(), world.clock_mhz, idle_s=idle_s)
    assert world.lengths == [5, *[250] * blocks]
    assert steady is (falls == 0)


def test_a_warm_up_whose_first_block_outlasts_it_takes_a_second_one(monkeypatch) -> None:
    stopwatch, world = gpu(monkeypatch, lambda at: 1980.0, lambda at: 0.0)
    world.step_ms = 4000
    # Five steps of 4 s, where 16 s are the most.
    _, steady = stopwatch.warm_up(StepPolicy(), world.clock_mhz, idle_s=0.1)
    assert (world.lengths, steady) == ([5, 5], True)


# Half a second of 2 ms, in whole periods, and never fewer than were asked for; without a warm-up these.
@pytest.mark.parametrize(
    ("policy", "period", "steps"),
    [({}, 1, 250), ({}, 4, 252), ({"block_steps": 300}, 1, 300), ({"warmup_max_steps": 0}, 1, 5)],
)
def test_a_block_on_a_gpu_lasts_half_a_second_of_its_own_clock(monkeypatch, policy, period, steps) -> None:
    stopwatch, world = gpu(monkeypatch)
    world.model.period = period
    few = StepPolicy(min_blocks=3, max_blocks=3, **policy)
    stopwatch.warm_up(few)
    measured = stopwatch.measure(few)
    assert (measured.block_steps, measured.blocks_ns) == (steps, [steps * 2 * MS] * 3)


# Data that are given again and again take nothing. Half of 200 free bytes has room for 50 steps of 2. In any
# case there are as many steps as the policy has.
@pytest.mark.parametrize(("grown", "steps"), [(0, 250), (2, 50), (90, 5)])
def test_the_batches_of_a_long_block_do_not_fill_the_device(monkeypatch, grown, steps) -> None:
    stopwatch, world = gpu(monkeypatch)
    stopwatch.warm_up(StepPolicy())
    before = len(world.lengths)
    figures = [
        SimpleNamespace(allocated=5 * each, reserved=5 * each, free=200) for each in (100, 100 + grown)
    ]
    world.memory = lambda: figures.pop(0) if figures[1:] else figures[0]
    monkeypatch.setattr(measure, "Snapshot", lambda trainer: SimpleNamespace(restore=int))
    exchange: Any = SimpleNamespace(traffic=Traffic())
    quads = stopwatch.measure_exposed(exchange, StepPolicy(quads=2))
    assert (quads.steps, world.lengths[before:]) == (steps, [5, *[steps] * 8])


# Of six blocks of 90 and 110 ms in turn the mean is 100, the deviation sqrt(6 * 10^2 / 5) = 10.954, and the
# half-width t(5; 0.975) = 2.5706 times 10.954 / sqrt(6), so 11.496: 11.5 % of the mean.
UNEVEN = [90.0, 110.0] * 3


@pytest.mark.parametrize(
    ("walls", "policy", "blocks", "stop"),
    [
        # No spread: the first interval there is, at six blocks, has no width.
        ([100] * 6, {"target": 0.0}, 6, "target"),
        (UNEVEN, {"target": 0.1150}, 6, "target"),
        # 11.496 > 11.49: one more; seven blocks with 100 more have 2.4469 * 10 / sqrt(7) = 9.249.
        ([*UNEVEN, 100.0], {"target": 0.1149}, 7, "target"),
        # Six blocks are 0.6 s. The target comes first where both are met.
        (UNEVEN, {"target": 0.01, "budget_s": 0.6}, 6, "budget"),
        (UNEVEN, {"target": 0.2, "budget_s": 0.6}, 6, "target"),
        ([*UNEVEN, 100.0], {"target": 0.01, "budget_s": 0.601}, 7, "budget"),
        (UNEVEN, {"target": 0.01, "max_blocks": 6}, 6, "blocks"),
        ([*UNEVEN, 90.0, 110.0], {"target": 0.01, "max_blocks": 8}, 8, "blocks"),
        # The budget is spent, but so many blocks there are in any case.
        ([100] * 8, {"target": 0.0, "budget_s": 0.0, "min_blocks": 8}, 8, "target"),
        ([100, 120, 140], {"budget_s": 0.0, "min_blocks": 3}, 3, "budget"),
        # Under six blocks there is no interval that could meet the target.
        ([100, 100], {"min_blocks": 1, "max_blocks": 2}, 2, "blocks"),
    ],
)
def test_measuring_ends_at_the_target_or_the_budget_or_the_blocks(watch, walls, policy, blocks, stop) -> None:
    stopwatch, world = watch(walls)
    measured = stopwatch.measure(StepPolicy(block_steps=2, **policy))
    assert (measured.stop, world.blocks) == (stop, blocks)
    assert measured.blocks_ns == [int(wall * MS) for wall in walls]
    assert measured.columns.step_ns == [2] * 2 * blocks


@pytest.mark.parametrize(("quads", "blocks"), [(0, 19), (1, 15), (3, 7), (9, 7)])
def test_blocks_leave_quads_their_share_of_the_budget(watch, quads, blocks) -> None:
    stopwatch, _ = watch([110.0, 90.0] * 10)
    measured = stopwatch.measure(StepPolicy(target=0.01, budget_s=1.9), quads=quads)
    # Blocks of 100 ms fill 1.9 s, in which a quad has four of them.
    assert (measured.stop, len(measured.blocks_ns)) == ("budget", blocks)


def test_each_rank_keeps_its_own_walls_and_stops_by_the_slowest(watch) -> None:
    # By its own 50 ms a block this rank would go on until the budget of 0.6 s at the twelfth.
    stopwatch, _ = watch([50] * 6, slowest_ms=UNEVEN)
    measured = stopwatch.measure(StepPolicy(target=0.01, budget_s=0.6))
    assert measured.stop == "budget"
    assert measured.blocks_ns == [50 * MS] * 6


@pytest.mark.parametrize(
    ("policy", "quads"),
    [
        # Of 20, 22 and 24 % the half-width is t(2; 0.975) = 4.303 times 2 % / sqrt(3), so 4.97 %. With
        # another 22 % it is 3.182 times 1.633 % / 2, so 2.60 %.
        ({"target": 0.0497}, 3),
        ({"target": 0.0496}, 4),
        ({"target": 0.0259}, 5),
        # Fewer may be asked for.
        ({"target": 0.0497, "quads": 2}, 2),
        # Six blocks of 100 ms, and quads of 360, 356, 352 and 356 ms, take 2.024 s.
        ({"target": 0.0, "budget_s": 2.02}, 3),
        ({"target": 0.0, "budget_s": 2.03}, 4),
        ({"target": 0.0, "budget_s": 0.0}, 3),
    ],
)
def test_quads_end_at_the_target_or_with_the_budget_of_the_blocks_before_them(
    watch, monkeypatch, policy, quads
) -> None:
    off_ms = [80, 78, 76, 78, 78]
    stopwatch, world = watch([100] * 6 + [wall for off in off_ms for wall in (100, off, off, 100)])
    monkeypatch.setattr(world, "largest", list)
    stopwatch.measure(StepPolicy(max_blocks=6, target=0.0, budget_s=0.0))
    monkeypatch.setattr(measure, "Snapshot", lambda trainer: SimpleNamespace(restore=int))
    exchange: Any = SimpleNamespace(traffic=Traffic())
    taken = stopwatch.measure_exposed(exchange, StepPolicy(**policy))
    assert taken.off_first_ns == [off * MS for off in off_ms[:quads]]


class Quad:
    """A trainer of y = w x, and what it saw: each step's exchange, inputs and the weight it started from."""

    def __init__(self, *, accumulation: int) -> None:
        self.exchange: Any = SimpleNamespace(traffic=Traffic())
        self.seen: list[tuple[bool, float]] = []
        self.weights: list[float] = []
        self.diverges_when: bool | None = None
        """Whether the exchange is on in the steps whose loss is not finite; None: in no step."""
        self.module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.module.weight)
        settings = TrainSettings(optimizer="sgd:lr=1:momentum=0", accumulation=accumulation)
        self.trainer = trainer = Trainer(self.module, self._loss, device=CPU, settings=settings)
        self.batches = ((torch.tensor([[float(i)]]), torch.tensor(float(i))) for i in range(1, 100))
        control: Any = SimpleNamespace(synchronize=int, begin_together=dict, largest=list, device=CPU)
        self.watch = a_stopwatch(trainer, self.batches, control)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen.append((self.exchange.traffic.enabled, targets.item()))
        self.weights.append(self.module.weight.item())
        bad = self.diverges_when is self.exchange.traffic.enabled
        return -outputs.mean() * (float("nan") if bad else 1.0)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_quads_are_on_off_off_on_and_neighbours_share_their_batches(accumulation) -> None:
    quad = Quad(accumulation=accumulation)
    quads = quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=2, quads=2))
    each = 2 * accumulation
    drawn = [[float(1 + block * each + i) for i in range(each)] for block in range(4)]
    order = [(True, drawn[0]), (False, drawn[0]), (False, drawn[1]), (True, drawn[1])]
    order += [(True, drawn[2]), (False, drawn[2]), (False, drawn[3]), (True, drawn[3])]
    assert quad.seen == [(on, value) for on, values in order for value in values]
    assert quads.steps == 2
    walls = [quads.on_first_ns, quads.off_first_ns, quads.off_second_ns, quads.on_second_ns]
    assert [len(values) for values in walls] == [2] * 4
    assert all(wall > 0 for values in walls for wall in values)
    assert sum(quads.off_step_ns) == sum(quads.off_first_ns + quads.off_second_ns)


def test_the_blocks_of_quads_are_whole_periods_too() -> None:
    quad = Quad(accumulation=2)
    quad.trainer.model.period = 3
    quads = quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=2, quads=1))
    # Three steps of two batches, four times; neighbours share theirs.
    drawn = [[float(value) for value in range(first, first + 6)] for first in (1, 7)]
    assert [value for _, value in quad.seen] == drawn[0] * 2 + drawn[1] * 2
    assert quads.steps == 3


def test_the_off_blocks_are_undone_and_the_exchange_is_on_again() -> None:
    quad = Quad(accumulation=1)
    quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=1, quads=1))
    # The gradient is -x and the rate 1, so a step adds its batch: on 1; off 1 and 2, undone; on 2.
    assert quad.weights == [0.0, 1.0, 1.0 + 1.0, 1.0]
    assert quad.module.weight.item() == 1.0 + 2.0
    assert quad.exchange.traffic.enabled
    # The next batch is the third: nothing was drawn twice or left out.
    assert next(quad.batches)[1].item() == 3.0


def test_a_loss_that_is_not_finite_ends_the_run_or_in_an_off_block_only_the_quads() -> None:
    quad = Quad(accumulation=1)
    quad.diverges_when = False
    with pytest.raises(NotTrainedError, match="2 steps of a rank had a loss that is not finite"):
        quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=1, quads=3))
    # The first quad is complete, and its off blocks are undone.
    assert quad.module.weight.item() == 1.0 + 2.0
    assert quad.exchange.traffic.enabled
    quad.diverges_when = True
    with pytest.raises(DivergedError):
        quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=1, quads=1))


def test_an_off_block_without_its_updates_has_no_time() -> None:
    quad = Quad(accumulation=1)
    update = quad.trainer.update
    quad.trainer.update = lambda: update() if quad.exchange.traffic.enabled else None
    with pytest.raises(NotTrainedError, match="2 steps of a rank left out their update"):
        quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=1, quads=1))


def test_an_off_block_with_more_updates_than_steps_has_left_out_none() -> None:
    quad = Quad(accumulation=1)
    update = quad.trainer.update
    quad.trainer.update = lambda: [update(), update()]
    assert quad.watch.measure_exposed(quad.exchange, StepPolicy(block_steps=1, quads=1)).steps == 1


def test_an_overflow_without_exchange_changes_neither_the_scale_nor_the_number_of_updates() -> None:
    module = nn.Linear(1, 1, bias=False)
    settings = TrainSettings(optimizer="sgd:lr=0.1", precision="fp16")
    trainer = Trainer(module, lambda y, t: (y * t).mean(), device=CPU, settings=settings)
    steep = iter(lambda: (torch.ones(1, 1), torch.tensor(3e38)), None)
    scales = []

    def step() -> None:
        trainer.compute_gradients(steep)
        trainer.update()
        scales.append(trainer.scaler.get_scale())

    step()
    with always_updated(trainer) as updates:
        step()
        step()
    step()
    assert len(updates) == 2
    assert scales == [2.0**15, 2.0**15, 2.0**15, 2.0**14]


def diverging(rank: int, bad_rank: int) -> tuple[str, int]:
    """On a rank: blocks of two steps with a NaN in the third step of one rank; what ends them, and when."""
    module = nn.Linear(1, 1, bias=False)
    settings = TrainSettings(optimizer="sgd:lr=0")
    trainer = Trainer(module, lambda y, t: (y * t).mean(), device=CPU, settings=settings)
    bad = float("nan") if rank == bad_rank else 1.0
    data = ((torch.ones(1, 1), torch.tensor(bad if index == 2 else 1.0)) for index in range(100))
    try:
        a_stopwatch(trainer, data).measure(StepPolicy(block_steps=2))
    except DivergedError as error:
        return str(error), sum(1 for _ in data)
    return "nothing", 0


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_loss_that_is_not_finite_on_one_rank_ends_the_blocks_of_all(ranks, bad_rank) -> None:
    # In the second block of two steps, so that 100 - 4 batches are left.
    assert ranks(2, diverging, bad_rank) == [("the loss is not a finite number (NaN or infinity)", 96)] * 2
