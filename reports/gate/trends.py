"""A history as series: what each metric of each cell was night after night, and where it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from reports.analysis.pooling import differing
from reports.gate.change_points import ChangePoint, change_points
from reports.gate.metrics import TIMED, TimedMetric
from results.baseline import Baseline, Subject

WATCHED = ("step_time", "time")
"""Metrics whose series are shown, and searched when a night is added, unless others are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One point of a series."""

    measured_at: str
    commit: str | None
    value: float
    """The median over the night's runs."""
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change, between two nights that follow each other."""

    before: Night
    """The last night of the old level."""
    after: Night
    """The first of the new one."""
    seen: Night
    """The night on which it was called."""
    effect: float
    is_worse: bool

    @property
    def facts(self) -> dict[str, tuple[str, str]]:
        """What changed in the environment there."""
        return differing(self.before.facts, self.after.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One metric of one cell on one machine."""

    machine: str
    label: str
    metric: TimedMetric
    nights: tuple[Night, ...]
    steps: tuple[Step, ...]


def trends(nights: Mapping[str, Sequence[Baseline]], metrics: Sequence[str]) -> list[Trend]:
    """Every series of these metrics that has positive figures; nights in the order of time."""
    return [
        trend for machine, found in nights.items() for name in metrics for trend in _of(machine, found, name)
    ]


def seen_on(measured_at: str, found: Sequence[Trend]) -> list[tuple[Trend, Step]]:
    """The changes that the night of this time shows first."""
    return [(trend, step) for trend in found for step in trend.steps if step.seen.measured_at == measured_at]


def _of(machine: str, nights: Sequence[Baseline], name: str) -> Iterator[Trend]:
    series: dict[str, list[Night]] = {}
    labels: dict[str, str] = {}
    for night in nights:
        for subject in night.subjects:
            point = _point(night, subject, name)
            if point is not None:
                series.setdefault(subject.key, []).append(point)
                labels[subject.key] = subject.label
    for key, points in series.items():
        found = change_points([point.value for point in points])
        steps = tuple(_step(points, change, TIMED[name]) for change in found)
        yield Trend(machine=machine, label=labels[key], metric=TIMED[name], nights=tuple(points), steps=steps)


def _point(night: Baseline, subject: Subject, name: str) -> Night | None:
    values = subject.timed.get(name)
    if not values or median(values) <= 0:
        return None
    return Night(
        measured_at=night.measured_at, commit=night.commit, value=median(values), facts=subject.facts
    )


def _step(points: Sequence[Night], change: ChangePoint, metric: TimedMetric) -> Step:
    return Step(
        before=points[change.at - 1],
        after=points[change.at],
        seen=points[change.seen_at],
        effect=change.effect,
        is_worse=(change.effect > 0) == (metric.better == "lower"),
    )
