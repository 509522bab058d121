"""A history as series: the figure of each night for a metric and a cell, and the nights of its changes.

The test for a change is repeated every night. It compares the median of the last 5 to 20 nights with the
median of up to 30 nights before them, on logarithms, in units of the series' noise (window-limited tests:
Lai, Sequential changepoint detection in quality control and dynamical systems, JRSS B 1995). After a change,
the series begins anew there. The result for a night uses only this night and earlier ones, so later nights do
not change it. docs/gate.md has the measured error rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from reports.analysis.pooling import differing
from reports.gate.metrics import TIMED, TimedMetric
from results.baseline import Baseline
from results.statistics import Floats

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
    """The first night of the new level."""
    seen: Night
    """The night on which the change was found."""
    effect: float
    is_worse: bool

    @property
    def facts(self) -> dict[str, tuple[str, str]]:
        """The facts of the environment that differ between the two nights."""
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
        trend
        for machine, found in nights.items()
        for name in metrics
        for trend in _trends_of(machine, found, TIMED[name])
    ]


def seen_on(measured_at: str, found: Sequence[Trend]) -> list[tuple[Trend, Step]]:
    """The changes that were found first on the night of this time."""
    return [(trend, step) for trend in found for step in trend.steps if step.seen.measured_at == measured_at]


def _trends_of(machine: str, nights: Sequence[Baseline], metric: TimedMetric) -> Iterator[Trend]:
    series: dict[str, list[Night]] = {}
    labels: dict[str, str] = {}
    for night in nights:
        for subject in night.subjects:
            value = median(subject.timed.get(metric.name) or (0.0,))
            if value > 0:
                point = Night(
                    measured_at=night.measured_at, commit=night.commit, value=value, facts=subject.facts
                )
                series.setdefault(subject.key, []).append(point)
                labels[subject.key] = subject.label
    for key, points in series.items():
        found = change_points([point.value for point in points])
        steps = tuple(
            Step(
                before=points[change.at - 1],
                after=points[change.at],
                seen=points[change.seen_at],
                effect=change.effect,
                is_worse=(change.effect > 0) == (metric.better == "lower"),
            )
            for change in found
        )
        yield Trend(machine=machine, label=labels[key], metric=metric, nights=tuple(points), steps=steps)


RECENT = (5, 7, 10, 14, 20)
"""The numbers of recent nights that are compared with the nights before. Two disturbed nights of five are not
a change; longer windows detect smaller steps, but later."""
BEFORE = 30
"""The number of nights before them that count; over more nights, slow drift would look like a step."""
FEWEST_BEFORE = 8
"""The fewest nights before a change, because fewer do not show the noise."""
THRESHOLD = 4.5
"""Standard errors, chosen by simulation (docs/gate.md)."""
SMALLEST = 0.03
"""Changes below this share are not reported: seasons and drift are of this size."""
AROUND = 15
"""The number of nights of the running median from which the noise of a night is measured."""
MEDIAN_ERROR = 1.2533
"""Ratio of the standard errors of a median and of a mean, for normal noise: sqrt(pi / 2)."""
LEAST_NOISE = 0.002
"""The smallest noise that is assumed, because a series that hardly varies is not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A step of a series."""

    at: int
    """Index of the first night of the new level."""
    seen_at: int
    """Index of the night on which it was found first."""
    effect: float
    """The new level over the old one less 1."""


def change_points(values: Sequence[float]) -> list[ChangePoint]:
    """The changes of a series of positive values in the order of time."""
    logs = np.log(np.asarray(values, dtype=np.float64))
    found: list[ChangePoint] = []
    start = 0
    for now in range(len(logs)):
        change = _change(logs, start, now)
        if change is not None:
            found.append(change)
            start = change.at
    return found


def _change(logs: Floats, start: int, now: int) -> ChangePoint | None:
    """The change that the night `now` shows in the nights since `start`."""
    if now + 1 - start < FEWEST_BEFORE + RECENT[0]:
        return None
    noise = _noise(logs[: now + 1])
    best: tuple[float, int, float] | None = None
    for length in RECENT:
        first = now + 1 - length
        if first - start < FEWEST_BEFORE:
            break
        before, recent = logs[max(start, first - BEFORE) : first], logs[first : now + 1]
        step = float(np.median(recent) - np.median(before))
        errors = abs(step) / (MEDIAN_ERROR * noise * math.sqrt(1 / len(before) + 1 / length))
        if best is None or errors > best[0]:
            best = errors, first, step
    if best is None or best[0] < THRESHOLD or abs(math.expm1(best[2])) < SMALLEST:
        return None
    begin = max(start, best[1] - BEFORE)
    place = _place(logs, begin, best[1], now)
    # Earlier nights since `start` are left out, because slow drift in them could change the sign.
    step = float(np.median(logs[place : now + 1]) - np.median(logs[begin:place]))
    return ChangePoint(at=place, seen_at=now, effect=math.expm1(step))


def _place(logs: Floats, start: int, first: int, now: int) -> int:
    """The first night of the new level by least absolute deviations, in or after the window that showed it.

    A window can show a step before all of its nights have the new level.
    """

    def deviation(place: int) -> float:
        parts = logs[start:place], logs[place : now + 1]
        return sum(float(np.abs(part - np.median(part)).sum()) for part in parts)

    return min(range(first, now - 1), key=deviation)


def _noise(logs: Floats) -> float:
    """Standard deviation of a night: the larger one of two that neither steps nor outliers raise.

    One is from differences of neighbours, which contain only the noise. The other is around a running median,
    and also contains variation over several nights.
    """
    around = np.median(
        np.lib.stride_tricks.sliding_window_view(np.pad(logs, AROUND // 2, mode="edge"), AROUND), axis=1
    )
    neighbours = float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    return max(LEAST_NOISE, _NORMAL * neighbours, _NORMAL * float(np.median(np.abs(logs - around))))


_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
