"""Which night a series changed at: a test that is made again every night, and never takes an answer back.

Each night the median of the last 5 to 20 nights is held against that of up to 30 nights before them, on
logarithms, in units of the series' own noise (window-limited tests: Lai, Sequential changepoint detection in
quality control and dynamical systems, JRSS B 1995). After a change the series begins anew there. An answer
for a night uses that night and those before alone, so that looking again every night changes no earlier
answer. How often it errs is measured: docs/gate.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from results.statistics import Floats

RECENT = (5, 7, 10, 14, 20)
"""Nights that are held against what was before. Two disturbed nights of five are no change; longer windows
see smaller steps, later."""
BEFORE = 30
"""Nights before them that count: further back, slow drift would become a step."""
FEWEST_BEFORE = 8
"""Nights before anything is said: of fewer the noise is not known."""
THRESHOLD = 4.5
"""Standard errors, chosen by simulation (docs/gate.md)."""
SMALLEST = 0.03
"""Changes below this share are never called: seasons and drift are of this size."""
AROUND = 15
"""Nights of the running median that a night's noise is measured around."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""
LEAST_NOISE = 0.002
"""A series that hardly varies is not taken to be exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A step of a series."""

    at: int
    """Index of the first night of the new level."""
    seen_at: int
    """Index of the night on which it was first called."""
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
    # Not since `start`: slow drift before these nights could turn its sign.
    step = float(np.median(logs[place : now + 1]) - np.median(logs[begin:place]))
    return ChangePoint(at=place, seen_at=now, effect=math.expm1(step))


def _place(logs: Floats, start: int, first: int, now: int) -> int:
    """The first night of the new level, in or after the window that showed it: least absolute deviations.

    A window shows a step before all of its nights are of the new level.
    """

    def deviation(place: int) -> float:
        parts = logs[start:place], logs[place : now + 1]
        return sum(float(np.abs(part - np.median(part)).sum()) for part in parts)

    return min(range(first, now - 1), key=deviation)


def _noise(logs: Floats) -> float:
    """Standard deviation of a night: the larger one of two that neither steps nor outliers raise.

    From differences of neighbours, which sees the noise alone, and around a running median, which sees what
    nights that are like their neighbours add.
    """
    around = np.median(
        np.lib.stride_tricks.sliding_window_view(np.pad(logs, AROUND // 2, mode="edge"), AROUND), axis=1
    )
    neighbours = float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    return max(LEAST_NOISE, _NORMAL * neighbours, _NORMAL * float(np.median(np.abs(logs - around))))


_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
