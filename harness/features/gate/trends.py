"""A history as series: the figure of each night for a metric and a cell, and the nights of its changes.

The test for a change is repeated every night. It compares the median of the last 5 to 20 nights with the
median of up to 30 nights before them, on logarithms, in units of the series' noise (window-limited tests:
Lai, Sequential changepoint detection in quality control and dynamical systems, JRSS B 1995). After a change,
the series begins anew there. The result for a night uses only this night and earlier ones, so later nights do
not change it.

Between which nights a level changed is uncertain: the answer is a range with its odds. Each place in the
window of a change has a likelihood (normal noise of the series, with a night in twenty disturbed), integrated
over the level before and the level after. Changes of several series of a machine that may have one cause are
pooled: the logarithms of their likelihoods add up, and count as those of fewer series where the noise of the
series is correlated. So the series of a study do not contradict each other on one change. Nights after it may
narrow the range. Where a slope explains the nights as well as a step, the change is a drift, which has no
place and so no commits. docs/evidence.md has the measured error rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from statistics import fmean, median

import numpy as np

from harness.features.gate.metrics import TIMED, TimedMetric
from harness.features.gate.records.baseline import Baseline
from reports.analysis.pooling import differing
from results.grouping import grouped
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
class Within:
    """Two nights between which a level changed, with the odds of that."""

    before: Night
    after: Night
    odds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change of one series."""

    likeliest: Within
    """Two nights that follow each other; of all such pairs the one with the best odds."""
    range: Within
    """The closest two nights between which the change lies with odds of at least `RANGE_ODDS`."""
    seen: Night
    """The night on which the change was found."""
    effect: float
    is_worse: bool
    series: int
    """The number of series whose changes are pooled in the odds."""
    drift: bool = False
    """Whether a slope explains the nights as well as a step: then no commit is named, and both ranges are all
    nights of the drift so far."""

    @property
    def before(self) -> Night:
        """The last night of the old level, by the best odds."""
        return self.likeliest.before

    @property
    def after(self) -> Night:
        """The first night of the new level, by the best odds."""
        return self.likeliest.after

    @property
    def facts(self) -> dict[str, tuple[str, str]]:
        """The facts of the environment that differ between the ends of the range."""
        return differing(self.range.before.facts, self.range.after.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One metric of one cell on one machine."""

    machine: str
    label: str
    metric: TimedMetric
    nights: tuple[Night, ...]
    steps: tuple[Step, ...] = ()


def trends(nights: Mapping[str, Sequence[Baseline]], metrics: Sequence[str]) -> list[Trend]:
    """Every series of these metrics that has positive figures; nights in the order of time."""
    return [
        trend
        for machine, found in nights.items()
        for trend in _with_steps([one for name in metrics for one in _series_of(machine, found, TIMED[name])])
    ]


def seen_on(measured_at: str, found: Sequence[Trend]) -> list[tuple[Trend, Step]]:
    """The changes that were found first on the night of this time."""
    return [(trend, step) for trend in found for step in trend.steps if step.seen.measured_at == measured_at]


def _series_of(machine: str, nights: Sequence[Baseline], metric: TimedMetric) -> Iterator[Trend]:
    """Every series of a metric, before its changes are pooled with the changes of other series."""
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
        yield Trend(machine=machine, label=labels[key], metric=metric, nights=tuple(points))


def _with_steps(series: Sequence[Trend]) -> Iterator[Trend]:
    """The series of one machine with their changes; changes that may have one cause have one range."""
    located = [place for one in series for place in _located(one)]
    groups = _grouped([place for place in located if not place.drift])
    groups += [[place] for place in located if place.drift]
    steps = grouped((id(place.series), _step(place, group)) for group in groups for place in group)
    for one in series:
        in_order = sorted(steps.get(id(one), []), key=lambda step: step.seen.measured_at)
        yield replace(one, steps=tuple(in_order))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """A change of one series with the likelihood of each place at which it may be."""

    series: Trend
    change: ChangePoint
    likelihoods: Mapping[str, float]
    """The logarithm, by the time of the first night of the new level."""
    rest: Mapping[str, float]
    """The noise of each night of the window, by its time."""
    drift: bool
    """Whether a slope explains the window as well as the step."""

    def at(self, times: Sequence[str]) -> Floats:
        """The likelihoods of places in the nights of several series, of which this one may lack some."""
        found, later = [], math.nan
        for time in reversed(times):
            # A change before a night that is lacking shows on the next night that is there.
            later = self.likelihoods.get(time, later)
            inside = min(self.likelihoods) <= time <= max(self.likelihoods)
            found.append(later if inside else -math.inf)
        return np.array(found[::-1])


def _located(series: Trend) -> Iterator[_Located]:
    """Locate each change among the nights from the change before it to the change after it."""
    logs = np.log([night.value for night in series.nights])
    changes = change_points([night.value for night in series.nights])
    for change, later in zip_longest(changes, changes[1:]):
        end = min(len(logs), change.seen_at + BEFORE, len(logs) if later is None else later.at)
        window = logs[change.begin : end]
        times = [night.measured_at for night in series.nights[change.begin : end]]
        noise, at = _noise(logs[:end]), change.at - change.begin
        parts = [part - np.median(part) for part in (window[:at], window[at:])]
        rest = np.clip(np.concatenate(parts) / noise, -3, 3)
        # Nights that resemble their neighbours say less than as many independent ones.
        alike = max(0.0, float(np.mean(rest[1:] * rest[:-1]) / np.mean(rest**2))) if rest.any() else 0.0
        places = place_likelihoods(window, noise) * (1 - alike) / (1 + alike)
        inside = slice(SHORTEST, len(window) - SHORTEST + 1)
        yield _Located(
            series=series,
            change=change,
            likelihoods=dict(zip(times[inside], places[inside].tolist(), strict=True)),
            rest=dict(zip(times, rest.tolist(), strict=True)),
            drift=_drifts(window, np.concatenate(parts), noise),
        )


def _drifts(window: Floats, around_step: Floats, noise: float) -> bool:
    """Whether a slope lies as near to the nights of a window as the two levels of a step do.

    The slope fits all nights (by the median of all slopes: Theil and Sen), or a ramp between two
    levels, which has one place more to choose and so must be nearer by the noise of a night. Nearness is the
    sum of absolute deviations, which disturbed nights move little.
    """
    nights, step = np.arange(len(window)), float(np.abs(around_step).sum())
    first, later = np.triu_indices(len(window), 1)
    level = window - np.median((window[later] - window[first]) / (later - first)) * nights
    ramps = [
        np.interp(nights, [begin, end - 1], [np.median(window[:begin]), np.median(window[end:])])
        for begin in range(SHORTEST, len(window))
        for end in range(begin + FEWEST_BEFORE, len(window) - SHORTEST + 1)
    ]
    ramp = min((float(np.abs(window - one).sum()) for one in ramps), default=math.inf)
    return float(np.abs(level - np.median(level)).sum()) <= step or ramp <= step - RAMP * noise


def _odds(group: Sequence[_Located], times: Sequence[str]) -> Floats | None:
    """The odds of each place by all series of the group; None if they have no place in common."""
    logs = np.sum([one.at(times) for one in group], axis=0) / (1 + (len(group) - 1) * _correlation(group))
    if not np.isfinite(logs).any():
        return None
    odds = np.exp(logs - logs.max())
    return np.asarray(odds / odds.sum(), dtype=np.float64)


def _correlation(group: Sequence[_Located]) -> float:
    """The mean correlation of the noise of the group's series, at least 0: some nights are slow for all."""
    found = []
    for one, other in combinations(group, 2):
        both = sorted(one.rest.keys() & other.rest.keys())
        pairs = np.array([[one.rest[time], other.rest[time]] for time in both])
        if len(both) > 2 and pairs.std(axis=0).all():
            found.append(float(np.corrcoef(pairs.T)[0, 1]))
    return max(0.0, fmean(found)) if found else 0.0


def _times(group: Sequence[_Located]) -> list[str]:
    return sorted({time for one in group for time in one.likelihoods})


def _grouped(located: Sequence[_Located]) -> list[list[_Located]]:
    """Group changes whose places are alike, by the Bayes factor of one place for all against several."""
    groups: list[list[_Located]] = []
    for one in sorted(located, key=lambda each: each.series.nights[each.change.at].measured_at):
        factors = [_same_place(one, group) for group in groups]
        best = max(factors, default=0.0)
        if best > SAME:
            groups[factors.index(best)].append(one)
        else:
            groups.append([one])
    return groups


def _same_place(one: _Located, group: Sequence[_Located]) -> float:
    """The Bayes factor of one place for a change and a group, if every place is equally probable before; 0 if
    they cannot have one place."""
    times = _times([*group, one])
    mine, theirs = _odds([one], times), _odds(group, times)
    if mine is None or theirs is None or any(each.series is one.series for each in group):
        return 0.0
    return len(times) * float(mine @ theirs)


def _step(one: _Located, group: Sequence[_Located]) -> Step:
    nights, change = one.series.nights, one.change
    if one.drift:
        likeliest = around = Within(before=nights[change.begin], after=nights[change.seen_at], odds=1.0)
    else:
        times = _times(group)
        odds = _odds(group, times)
        assert odds is not None, "a group has a place in common"
        best = int(odds.argmax())
        first, last = closest_range(odds)
        likeliest = _within(one.series, times[best], times[best], float(odds[best]))
        around = _within(one.series, times[first], times[last], float(odds[first : last + 1].sum()))
    return Step(
        likeliest=likeliest,
        range=around,
        seen=nights[change.seen_at],
        effect=change.effect,
        is_worse=(change.effect > 0) == (one.series.metric.better == "lower"),
        series=len(group),
        drift=one.drift,
    )


def _within(own: Trend, first: str, last: str, odds: float) -> Within:
    """The places from the night `first` to the night `last`, in nights of the series `own`."""
    # The nights of a series are in the order of time.
    before = [night for night in own.nights if night.measured_at < first][-1]
    after = next(night for night in own.nights if night.measured_at >= last)
    return Within(before=before, after=after, odds=odds)


RECENT = (5, 7, 10, 14, 20)
"""The numbers of recent nights that are compared with the nights before. Two disturbed nights of five are not
a change; longer windows detect smaller steps, but later."""
BEFORE = 30
"""The number of nights before them that count; over more nights, slow drift would look like a step."""
FEWEST_BEFORE = 8
"""The fewest nights before a change, because fewer do not show the noise."""
THRESHOLD = 4.5
"""Standard errors, chosen by simulation (docs/evidence.md)."""
SMALLEST = 0.03
"""Changes below this share are not reported: seasonal effects and drift are as large as this."""
AROUND = 15
"""The number of nights of the running median from which the noise of a night is measured."""
MEDIAN_ERROR = 1.2533
"""Ratio of the standard errors of a median and of a mean, for normal noise: sqrt(pi / 2)."""
SHORTEST = 3
"""The fewest nights of a level."""
RAMP = 2.0
"""Nights of noise by which a ramp must be nearer than a step."""
SAME = 0.05
"""The Bayes factor from which on changes of two series are one; most that are near have one cause."""
RANGE_ODDS = 0.9
"""The odds that the range of a change has at least."""
DISTURBED_NIGHTS, DISTURBED_NOISE = 0.05, 10.0
"""The share of nights that are disturbed, and the ratio of their noise to the noise of other nights."""
LEVELS = 12
"""Levels of the grid in one standard deviation of the noise."""
LEAST_NOISE = 0.002
"""The smallest noise that is assumed, because a series that hardly varies is not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A step of a series."""

    at: int
    """Index of the first night of the new level."""
    seen_at: int
    """Index of the night on which it was found first."""
    begin: int
    """Index of the first night that it was found among."""
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
    found: list[tuple[float, int, float]] = []
    for length in RECENT:
        first = now + 1 - length
        if first - start < FEWEST_BEFORE:
            break
        before, recent = logs[max(start, first - BEFORE) : first], logs[first : now + 1]
        step = float(np.median(recent) - np.median(before))
        errors = abs(step) / (MEDIAN_ERROR * noise * math.sqrt(1 / len(before) + 1 / length))
        found.append((errors, first, step))
    errors, first, step = max(found, key=lambda one: one[0])
    if errors < THRESHOLD or abs(math.expm1(step)) < SMALLEST:
        return None
    begin = max(start, first - BEFORE)
    place = _place(logs, begin, first, now)
    # Earlier nights since `start` are left out, because slow drift in them could change the sign.
    step = float(np.median(logs[place : now + 1]) - np.median(logs[begin:place]))
    return ChangePoint(at=place, seen_at=now, begin=begin, effect=math.expm1(step))


def place_likelihoods(logs: Floats, noise: float) -> Floats:
    """The logarithm of the likelihood that each night is the first one of the new level, up to a constant.

    It is integrated over the level before and the level after, on a grid of equally probable levels. It is
    minus infinity for the first night.
    """
    # A level that is far from every night is improbable.
    near = np.round(LEVELS * logs / noise)[:, None] + np.arange(-4 * LEVELS, 4 * LEVELS + 1)
    levels = np.unique(near) * noise / LEVELS
    apart = (logs[:, None] - levels) / noise
    usual = (1 - DISTURBED_NIGHTS) * np.exp(-(apart**2) / 2)
    disturbed = DISTURBED_NIGHTS / DISTURBED_NOISE * np.exp(-((apart / DISTURBED_NOISE) ** 2) / 2)
    each = np.log(np.maximum(usual + disturbed, 1e-300))
    before = np.logaddexp.reduce(np.cumsum(each, axis=0)[:-1], axis=1)
    after = np.logaddexp.reduce(np.cumsum(each[::-1], axis=0)[::-1][1:], axis=1)
    return np.concatenate([[-np.inf], before + after])


def closest_range(odds: Floats) -> tuple[int, int]:
    """The first and the last place of the shortest range with odds of at least `RANGE_ODDS`; of ranges of the
    same length the one with the best odds."""
    total = np.concatenate([[0.0], np.cumsum(odds)])
    for length in range(1, len(odds) + 1):
        shares = total[length:] - total[:-length]
        first = int(shares.argmax())
        if shares[first] >= RANGE_ODDS:
            return first, first + length - 1
    return 0, len(odds) - 1


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
