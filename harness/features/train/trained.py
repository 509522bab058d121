"""Cells that were trained (`bench train`): their logs, and time to a target over seeds.

How a training run recovered after each interruption follows from its log and the ends of its launches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from harness.features.train.log import Ended, Started, Steps, TrainingLog, training_log
from harness.features.train.order import Target
from reports.analysis.losses import FINAL_SHARE, mean_until
from reports.text import count
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell, exchange_label
from results.grouping import grouped
from results.launch import Attempt
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study
from results.value_types import seconds_between


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One interruption. Times are in seconds after the last sign of life of the launch; None: not known."""

    noticed_s: float | None
    """Time until the interrupted launch had been ended."""
    started_s: float | None
    """Time until the next launch was started."""
    ready_s: float
    """Time until its ranks had loaded the checkpoint."""
    first_step_s: float | None
    """Time until the first step after that had been taken; None if no step was."""
    step: int
    """The last step of the interrupted launch in the log."""
    steps_lost: int
    """Steps in the log that were done again."""
    replicas: int
    """The number of replicas after it."""
    reason: str | None
    """Why the interrupted launch ended."""


def recoveries(log: TrainingLog, attempts: Mapping[str, Attempt]) -> tuple[Recovery, ...]:
    """The interruptions of a run, oldest first; a start after a run that ended by itself does not count.

    `attempts` are by run, as from a study.
    """
    found = []
    before: Started | None = None
    step = 0
    for place, row in enumerate(log.rows):
        if not isinstance(row, Started):
            step = max(step, row.step)
            continue
        last = log.rows[place - 1] if place else None
        if before is not None and last is not None and not isinstance(last, Ended):
            ended, next_one = attempts.get(before.run_id), attempts.get(row.run_id)
            if before.launch_id == row.launch_id:
                # The launch itself went on, so its end says nothing about this interruption.
                ended = next_one = None
            signs = [at for at in ended.heartbeats.values() if at <= ended.ended_at] if ended else []
            fault = max([last.at, *signs])
            first = next((one for one in log.rows[place + 1 :] if isinstance(one, Steps | Started)), None)
            found.append(
                Recovery(
                    noticed_s=_since(fault, ended.ended_at if ended else None),
                    started_s=_since(fault, next_one.started_at if next_one else None),
                    ready_s=seconds_between(fault, row.at),
                    first_step_s=_since(fault, first.at if isinstance(first, Steps) else None),
                    step=step,
                    steps_lost=max(0, step - (row.resumed_step or 0)),
                    replicas=row.replicas,
                    reason=(ended.reasons.get(before.run_id) or ended.stopped_by or ended.scheduler)
                    if ended
                    else None,
                )
            )
        before, step = row, row.resumed_step or 0
    return tuple(found)


def _since(fault: str, at: str | None) -> float | None:
    """Seconds after the fault; None also for a time before it, which belongs to another event."""
    return None if at is None or at < fault else seconds_between(fault, at)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCell:
    """One cell with the log of its training."""

    cell: Cell
    log: TrainingLog
    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    """The ends of its launches, by the id of the run."""
    diverged: bool = False
    """Whether its last launch ended by a loss that was not finite, so that training is not resumed."""

    @property
    def over(self) -> bool:
        return self.diverged or self.log.ended is not None

    @property
    def target(self) -> Target | None:
        """The target of the last order."""
        return self.log.launches[-1].order.goal if self.log.launches else None

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the steps that count, without validation and checkpoints."""
        steps = self.log.steps
        return steps[-1].samples / self.log.counted_s if steps and self.log.counted_s > 0 else None


def told_not_finite(log: TrainingLog) -> list[str]:
    """A sentence for each metric that was NaN or infinite in validations that count."""
    steps = grouped((name, row.step) for row in log.validations for name in row.not_finite)
    return [
        f"{name} was not finite (NaN or infinity) in {count(len(found), 'validation')}, first at step "
        f"{found[0]:,}: such values never count as better"
        for name, found in sorted(steps.items())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget:
    """The first time at which one run reached its target; if it did not, its time so far."""

    seed: int
    reached: bool
    ended: bool
    """Whether its training is over; a run that continues may reach the target later."""
    seconds: float
    """Time of the training steps up to there, without validation, checkpoints and lost steps."""
    samples: int
    """Samples of all replicas."""


def reach(trained: TrainedCell, target: Target) -> TimeToTarget:
    """When the run reached the target: at the first validation, or row of the log, that is good enough."""
    log = trained.log
    step = next((step for step, value in log.values(target.metric) if target.reached(value)), None)
    until = [row for row in log.steps if step is None or row.step <= step]
    return TimeToTarget(
        seed=trained.cell.seed,
        reached=step is not None,
        ended=trained.over,
        seconds=sum(row.seconds for row in until),
        samples=until[-1].samples if until else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median over seeds with its range.

    A run that never reached the target counts as longer than all others by an unknown amount: it moves the
    median, and no mean is made. A run that has not ended takes longer than it has so far: figures that this
    may still change are unknown.
    """

    median: float | None
    """None where half of the runs or more never reached the target, or where it is unknown."""
    low: float | None
    high: float | None
    """None: a run never reached it, or has not ended."""
    open: bool = False
    """Whether a run has not ended and did not reach it."""


def spread(reached: Sequence[float], never: int = 0, so_far: Sequence[float] = ()) -> Spread:
    """The spread of the values of runs that `reached` the target, with the number of runs that `never` did
    and the values `so_far` of runs that have not ended."""
    over = [math.inf] * never
    soonest, latest = [*reached, *over, *so_far], [*reached, *over, *(math.inf for _ in so_far)]
    return Spread(
        median=_known(statistics.median(soonest), statistics.median(latest)),
        low=_known(min(soonest), min(latest)),
        high=_known(max(soonest), max(latest)),
        open=bool(so_far),
    )


def _known(soonest: float, latest: float) -> float | None:
    return soonest if soonest == latest and not math.isinf(soonest) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One strategy, compressor and collective, over its seeds."""

    label: str
    runs: tuple[TimeToTarget, ...]
    """The runs by seed."""

    @property
    def reached(self) -> int:
        return sum(run.reached for run in self.runs)

    @property
    def never(self) -> tuple[TimeToTarget, ...]:
        """Runs that ended without reaching the target."""
        return tuple(run for run in self.runs if run.ended and not run.reached)

    @property
    def unfinished(self) -> tuple[TimeToTarget, ...]:
        """Runs that have neither reached the target nor ended."""
        return tuple(run for run in self.runs if not (run.ended or run.reached))

    @property
    def seconds(self) -> Spread:
        return self._spread(lambda run: run.seconds)

    @property
    def samples(self) -> Spread:
        return self._spread(lambda run: run.samples)

    def _spread(self, value: Callable[[TimeToTarget], float]) -> Spread:
        return spread(
            [value(run) for run in self.runs if run.reached],
            len(self.never),
            [value(run) for run in self.unfinished],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Ways to train one model on one batch of one data set to one target."""

    cell: Cell
    """A cell with the fields that all of them share."""
    target: str
    ways: tuple[Way, ...]
    """The baseline first: without compression, and by the first strategy of the plan."""

    def ratio(self, way: Way) -> Spread | None:
        """Median time over the baseline's, with the smallest and the largest ratio of their runs; None if one
        of the medians is unknown, and for the baseline itself."""
        own, its = way.seconds, self.ways[0].seconds
        if way is self.ways[0] or own.median is None or its.median is None:
            return None
        return Spread(
            median=own.median / its.median,
            low=None if own.low is None or its.high is None else own.low / its.high,
            high=None if own.high is None or its.low is None else own.high / its.low,
            open=own.open or its.open,
        )


def races(cells: Iterable[TrainedCell]) -> tuple[Race, ...]:
    """The races of cells with a target and more than one run, in the order of the plans."""
    groups: dict[tuple[object, ...], dict[str, list[TrainedCell]]] = {}
    for one in cells:
        if one.target is not None:
            # All fields except the seed and the way to exchange gradients.
            shared = msgspec.structs.replace(
                one.cell,
                seed=0,
                strategy=BASELINE_STRATEGY,
                compression=UNCOMPRESSED,
                collective=DEFAULT_COLLECTIVE,
            )
            work = (*msgspec.structs.astuple(shared), one.log.launches[-1].order.target)
            ways = groups.setdefault(work, {})
            ways.setdefault(exchange_label(one.cell), []).append(one)
    found = []
    for ways in groups.values():
        ordered = sorted(ways.items(), key=lambda way: not way[1][0].cell.dense)
        first = ordered[0][1][0]
        target = first.target
        if target is not None and sum(map(len, ways.values())) > 1:
            of_seeds = ((label, sorted(runs, key=lambda run: run.cell.seed)) for label, runs in ordered)
            race = tuple(
                Way(label=label, runs=tuple(reach(run, target) for run in runs)) for label, runs in of_seeds
            )
            words = str(first.log.launches[-1].order.target)
            found.append(Race(cell=first.cell, target=words, ways=race))
    return tuple(found)


def final_losses(study: Study, runs: Sequence[RunResult]) -> dict[int, float | None]:
    """Return the final loss after all steps (`Kind.losses`); None after the ordered steps if it diverged."""
    log = training_log(study, runs[-1].cell_id)
    if log.ended is None or not log.steps:
        diverged = runs[-1].outcome is Outcome.DIVERGED and bool(log.launches)
        return {log.launches[-1].total_steps: None} if diverged else {}
    losses, ends = [row.loss for row in log.steps], [row.step for row in log.steps]
    return {log.step: mean_until(log.step, losses, ends, window=log.step / FINAL_SHARE)}
