"""Cells that were trained (`bench train`): their logs, and time to a target over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from reports.analysis.recovery import Recovery, recoveries
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell
from results.label import exchange_label
from results.launch import Attempt
from results.train_order import Target
from results.training_log import TrainingLog


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCell:
    """One cell and all that its training has written."""

    cell: Cell
    log: TrainingLog
    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    """The ends of its launches, by the id of the run."""

    @property
    def target(self) -> Target | None:
        """Of the last order."""
        return self.log.launches[-1].order.goal if self.log.launches else None

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return recoveries(self.log, self.attempts)

    @property
    def samples_per_s(self) -> float | None:
        """Of the steps that count, without validation and checkpoints."""
        steps = self.log.steps
        return steps[-1].samples / self.log.counted_s if steps and self.log.counted_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget:
    """One run and the first time that it reached its target."""

    seed: int
    seconds: float | None
    """Of the training steps up to there, without validation, checkpoints and lost steps; None: never."""
    samples: int | None
    """Of all replicas."""


def reach(trained: TrainedCell, target: Target) -> TimeToTarget:
    """When the run had its target: at the first validation, or row of the log, that is good enough."""
    log = trained.log
    if target.metric == "loss":
        found = [(row.step, row.loss) for row in log.steps]
    else:
        found = [(row.step, row.metrics.get(target.metric, math.nan)) for row in log.validations]
    step = next((step for step, value in found if target.reached(value)), None)
    if step is None:
        return TimeToTarget(seed=trained.cell.seed, seconds=None, samples=None)
    until = [row for row in log.steps if row.step <= step]
    return TimeToTarget(
        seed=trained.cell.seed,
        seconds=sum(row.seconds for row in until),
        samples=until[-1].samples if until else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median over seeds with its range. A run that never reached the target is longer than all others by
    an unknown amount: it moves the median, and no mean is made of it."""

    median: float | None
    """None where half of the runs or more never reached the target."""
    low: float | None
    high: float | None
    """None: a run never reached it."""


def spread(values: Sequence[float | None]) -> Spread:
    """Of values, None for one that is longer than any."""
    known = [math.inf if value is None else value for value in values]
    median = statistics.median(known)
    return Spread(
        median=None if math.isinf(median) else median,
        low=None if math.isinf(min(known)) else min(known),
        high=None if math.isinf(max(known)) else max(known),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One strategy, compressor and collective, over its seeds."""

    label: str
    runs: tuple[TimeToTarget, ...]
    """By seed."""

    @property
    def reached(self) -> int:
        return sum(run.seconds is not None for run in self.runs)

    @property
    def seconds(self) -> Spread:
        return spread([run.seconds for run in self.runs])

    @property
    def samples(self) -> Spread:
        return spread([run.samples for run in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Ways to train one model on one batch of one data set to one target."""

    cell: Cell
    """One of them: what they share."""
    target: str
    ways: tuple[Way, ...]
    """The baseline first: without compression, and by the first strategy of the plan."""

    def ratio(self, way: Way) -> Spread | None:
        """Median time over the baseline's, from the least to the largest of the ratios of their runs; None
        where one of the medians is unknown, and for the baseline itself."""
        base = self.ways[0]
        if way is base or way.seconds.median is None or base.seconds.median is None:
            return None
        own, its = way.seconds, base.seconds
        assert own.low is not None
        assert its.low is not None
        return Spread(
            median=way.seconds.median / base.seconds.median,
            low=None if its.high is None else own.low / its.high,
            high=None if own.high is None else own.high / its.low,
        )


def races(cells: Iterable[TrainedCell]) -> tuple[Race, ...]:
    """Those that have a target and more than one run, in the order of the plans."""
    groups: dict[tuple[object, ...], dict[str, list[TrainedCell]]] = {}
    for one in cells:
        if one.target is not None:
            ways = groups.setdefault((_shared(one.cell), one.log.launches[-1].order.target), {})
            ways.setdefault(exchange_label(one.cell), []).append(one)
    return tuple(_race(list(ways.values())) for ways in groups.values() if _runs(ways) > 1)


def _runs(ways: Mapping[str, Sequence[TrainedCell]]) -> int:
    return sum(len(runs) for runs in ways.values())


def _shared(cell: Cell) -> tuple[object, ...]:
    """What runs share that are compared: all but the seed and the way of gradients."""
    plain = msgspec.structs.replace(
        cell, seed=0, strategy=BASELINE_STRATEGY, compression=UNCOMPRESSED, collective=DEFAULT_COLLECTIVE
    )
    return msgspec.structs.astuple(plain)


def _race(ways: Sequence[Sequence[TrainedCell]]) -> Race:
    ordered = sorted(ways, key=lambda runs: not runs[0].cell.dense)
    first = ordered[0][0]
    target = first.target
    assert target is not None
    return Race(
        cell=first.cell,
        target=str(first.log.launches[-1].order.target),
        ways=tuple(
            Way(
                label=exchange_label(runs[0].cell),
                runs=tuple(reach(run, target) for run in sorted(runs, key=lambda run: run.cell.seed)),
            )
            for runs in ordered
        ),
    )
