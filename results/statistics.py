"""Means with intervals: the run, not the step, is the independent sample.

Sources: batch means, Law & Kelton, Simulation Modeling and Analysis, ch. 9; interval over runs, Kalibera &
Jones, Rigorous Benchmarking in Reasonable Time (ISMM 2013); ratios of runs by Welch's t on logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

FEWEST_FOR_INTERVAL = 6
"""The number of runs below which the range is given: no distribution-free 95 % interval of the median exists
for n <= 5."""
BATCHES = 10

DOUBT_ABOVE = 0.05
"""Share of a figure by which it may be too low without a wider interval."""

IntervalKind = Literal["range", "t95-runs", "t95-batch-means", "t95-quads"]
Floats = npt.NDArray[np.float64]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its uncertainty."""

    value: float
    unit: str
    low: float | None
    high: float | None
    samples: int
    """Independent samples behind it: runs, or the batches or quads of one run."""
    interval: IntervalKind | None
    """The kind of `low` and `high`; None if there is one sample, and so neither."""

    @property
    def tells(self) -> bool:
        """Whether the interval, if there is one, is narrower than the value: else the value says nothing."""
        return self.low is None or self.high is None or self.high - self.low <= abs(self.value)

    def or_more(self, more: float) -> Metric:
        """Extend the interval by `more` upwards, unless that is at most `DOUBT_ABOVE` of the larger value."""
        if more <= max(0.0, DOUBT_ABOVE * (self.value + more)):
            return self
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return msgspec.structs.replace(self, low=low, high=high + more, interval="range")

    def mapped(self, of: Callable[[float], float], unit: str | None = None) -> Metric:
        """Map the value and both ends by an increasing function."""
        low = None if self.low is None else of(self.low)
        high = None if self.high is None else of(self.high)
        return msgspec.structs.replace(self, value=of(self.value), unit=unit or self.unit, low=low, high=high)

    def times(self, factor: float, unit: str | None = None) -> Metric:
        """Multiply the metric by a known positive factor."""
        return self.mapped(lambda end: end * factor, unit)

    def over(self, work: float, unit: str) -> Metric:
        """Known work over the metric, whose ends change places."""
        turned = self.mapped(lambda end: work / end, unit)
        return msgspec.structs.replace(turned, low=turned.high, high=turned.low)


def t_quantile(freedom: float, confidence: float = 0.95) -> float:
    """Two-sided quantile of Student's t."""
    return float(stdtrit(freedom, (1 + confidence) / 2))


def within_run(block_values: Sequence[float], unit: str) -> Metric:
    """The mean of one run's blocks, with an interval by the method of batch means.

    Steps, and so blocks, are correlated, so the blocks are grouped in at most ten batches whose means are
    nearly independent. Fewer than six blocks give no interval. The interval is for the mean of this run and
    says nothing about other runs.
    """
    values = np.asarray(block_values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < FEWEST_FOR_INTERVAL:
        return Metric(value=mean, unit=unit, low=None, high=None, samples=len(values), interval=None)
    batches = values
    if len(values) >= 2 * BATCHES:
        batches = np.array([batch.mean() for batch in np.array_split(values, BATCHES)])
    return t_interval(mean, batches, unit, "t95-batch-means")


def over_runs(run_values: Sequence[float], unit: str) -> Metric:
    """One cell's figure from the figures of its runs: their mean, and an interval or, below six, the range.

    The interval is Student's t on the logarithms of the runs (times are skewed), widened if need be to
    contain their mean. Values must be positive.
    """
    values = np.asarray(run_values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < FEWEST_FOR_INTERVAL:
        return differences(run_values, unit)
    logs = np.log(values)
    return _of_logs(mean, float(logs.mean()), _half_width(logs), unit, len(values))


def median_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of independent values, and the ends of its 95 % interval by order statistics, or of the
    range of fewer than six (David & Nagaraja, Order Statistics, section 7.1)."""
    ordered = sorted(values)
    count, tail, inner = len(ordered), 1.0, 0
    # Of `count` values, `inner` or fewer lie below the median with probability `tail` / 2**count.
    while count >= FEWEST_FOR_INTERVAL and 2 * (tail + math.comb(count, inner + 1)) <= 0.05 * 2.0**count:
        inner += 1
        tail += math.comb(count, inner)
    return float(np.median(ordered)), ordered[inner], ordered[count - 1 - inner]


def differences(
    values: Sequence[float], unit: str, *, of: Literal["t95-runs", "t95-quads"] = "t95-runs"
) -> Metric:
    """The mean of values that may be negative, with Student's t from six on, and below six their range.

    `of` names what each value is a difference of: a run, or a quad within one run.
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) == 1:
        return Metric(value=mean, unit=unit, low=None, high=None, samples=1, interval=None)
    if len(array) < FEWEST_FOR_INTERVAL:
        low, high = float(array.min()), float(array.max())
        return Metric(value=mean, unit=unit, low=low, high=high, samples=len(array), interval="range")
    return t_interval(mean, array, unit, of)


def t_interval(value: float, spread: Floats, unit: str, interval: IntervalKind) -> Metric:
    """A value with Student's t on the spread of the samples, whose mean it is or estimates."""
    half, samples = _half_width(spread), len(spread)
    return Metric(
        value=value, unit=unit, low=value - half, high=value + half, samples=samples, interval=interval
    )


def _half_width(array: Floats) -> float:
    """Half the interval of the mean of an array by Student's t."""
    return float(t_quantile(len(array) - 1) * array.std(ddof=1) / len(array) ** 0.5)


def _of_logs(value: float, centre: float, half: float, unit: str, samples: int) -> Metric:
    """A value with an interval on logarithms, widened if need be to contain it."""
    low, high = (float(np.exp(end)) for end in (centre - half, centre + half))
    low, high = min(value, low), max(value, high)
    return Metric(value=value, unit=unit, low=low, high=high, samples=samples, interval="t95-runs")


def ratio_of_runs(above: Sequence[float], below: Sequence[float], unit: str) -> Metric:
    """The ratio of two cells' means, from the figures of their runs.

    From six runs on each side, the interval is Welch's t on logarithms, widened if need be to contain the
    value. With fewer it is the range of all ratios of two runs, from smallest over largest to largest over
    smallest. One run on both sides gives no interval.
    """
    top, bottom = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    value = float(top.mean() / bottom.mean())
    fewest = min(len(top), len(bottom))
    if max(len(top), len(bottom)) == 1:
        return Metric(value=value, unit=unit, low=None, high=None, samples=1, interval=None)
    if fewest < FEWEST_FOR_INTERVAL:
        low, high = float(top.min() / bottom.max()), float(top.max() / bottom.min())
        return Metric(value=value, unit=unit, low=low, high=high, samples=fewest, interval="range")
    centre, variance, freedom = welch_t(np.log(top), np.log(bottom))
    half = t_quantile(freedom) * variance**0.5 if variance else 0.0
    return _of_logs(value, centre, half, unit, fewest)


def p_equal(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability of a difference at least as large if the cells are equal, by Welch's t on logarithms.

    It is 1 if a side has only one run, whose spread is unknown.
    """
    if min(len(first), len(second)) < 2:
        return 1.0
    difference, variance, freedom = welch_t(np.log(first), np.log(second))
    if variance == 0:
        return float(difference == 0)
    return 2 * float(stdtr(freedom, -abs(difference) / variance**0.5))


def welch_t(first: Floats, second: Floats) -> tuple[float, float, float]:
    """Difference of means, its variance, and the degrees of freedom (Welch-Satterthwaite)."""
    a, b = float(first.var(ddof=1)) / len(first), float(second.var(ddof=1)) / len(second)
    difference = float(first.mean() - second.mean())
    if a + b == 0:
        return difference, 0.0, math.inf
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return difference, a + b, freedom


def slow_steps(step_ns: npt.NDArray[np.int64]) -> int:
    """Steps above Tukey's upper fence (upper quartile + 1.5 interquartile ranges); counted, never removed."""
    lower, upper = np.percentile(step_ns, [25, 75])
    return int((step_ns > upper + 1.5 * (upper - lower)).sum())
