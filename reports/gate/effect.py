"""How large a change is, what it shows, and how many runs would tell.

An effect is a difference of logarithms of runs by Welch's t (the run is the sample: Kalibera & Jones, ISMM
2013), or, for figures that may be near 0, a difference over BASE's step time. Confidence is that of the whole
comparison: with `rows` intervals each leaves out alpha / rows on either side (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.special import stdtrit

from results.statistics import Floats

ALPHA = 0.01
"""Probability that a comparison without any change calls one for the worse, at most, however many rows it
has; the same for the better."""
FEWEST_RUNS = 3
"""On each side. Two give a t of 1 degree of freedom: 32 standard errors at 99 %."""
QUIET = 0.4
"""The part of a margin that a change must exceed for certain before it is called one."""
MOST_RUNS = 1000


class Change(StrEnum):
    """What the runs of two sides show."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    UNCHANGED = "unchanged"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A change as a share: 0.05 is 5 % more in NEW than in BASE."""

    value: float
    low: float
    high: float
    error: float
    """Standard deviation of one run on each side, pooled, as a share."""
    runs: tuple[int, int]


def relative_effect(base: Sequence[float], new: Sequence[float], alpha: float) -> Effect | None:
    """The change of positive values as a ratio less 1; None with too few runs, or for values not above 0."""
    if min(len(base), len(new)) < FEWEST_RUNS or min(*base, *new) <= 0:
        return None
    centre, half, error = _welch(np.log(new), np.log(base), alpha)
    return Effect(
        value=math.expm1(centre),
        low=math.expm1(centre - half),
        high=math.expm1(centre + half),
        error=error,
        runs=(len(base), len(new)),
    )


def difference_effect(
    base: Sequence[float], new: Sequence[float], scale: float, alpha: float
) -> Effect | None:
    """The difference of values over `scale`; None with too few runs."""
    if min(len(base), len(new)) < FEWEST_RUNS or scale <= 0:
        return None
    centre, half, error = _welch(np.array(new) / scale, np.array(base) / scale, alpha)
    return Effect(
        value=centre, low=centre - half, high=centre + half, error=error, runs=(len(base), len(new))
    )


def judge(effect: Effect, margin: float, *, lower_is_better: bool = True) -> Change:
    """What an effect shows against the smallest change that matters.

    unchanged: the whole interval is within the margin. regressed, improved: the whole interval is beyond
    `QUIET` of the margin on that side, and not within the margin. Else inconclusive.
    """
    low, high = (effect.low, effect.high) if lower_is_better else (-effect.high, -effect.low)
    if -margin < low and high < margin:
        return Change.UNCHANGED
    if low > QUIET * margin:
        return Change.REGRESSED
    if high < -QUIET * margin:
        return Change.IMPROVED
    return Change.INCONCLUSIVE


def runs_that_tell(effect: Effect, margin: float, alpha: float) -> int | None:
    """Runs on each side with which any effect can be judged; None: more than `MOST_RUNS`.

    An interval no wider than what lies between QUIET x margin and the margin is always on one side of one.
    """
    wanted = (1 - QUIET) * margin / 2
    for runs in range(FEWEST_RUNS, MOST_RUNS + 1):
        if float(stdtrit(2 * runs - 2, 1 - alpha)) * effect.error * math.sqrt(2 / runs) <= wanted:
            return runs
    return None


def _welch(new: Floats, base: Floats, alpha: float) -> tuple[float, float, float]:
    """Difference of means, the half-width of its interval with `alpha` on each side, a run's deviation."""
    a, b = float(new.var(ddof=1)), float(base.var(ddof=1))
    difference = float(new.mean() - base.mean())
    spread = a / len(new) + b / len(base)
    error = math.sqrt((a + b) / 2)
    if spread == 0:
        return difference, 0.0, error
    freedom = spread**2 / ((a / len(new)) ** 2 / (len(new) - 1) + (b / len(base)) ** 2 / (len(base) - 1))
    return difference, float(stdtrit(freedom, 1 - alpha)) * math.sqrt(spread), error
