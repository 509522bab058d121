"""Whether a ratio of two cells is a difference that a reader should act on."""

from __future__ import annotations

from typing import Literal

from results.statistics import Metric

SMALLEST_EFFECT = 0.02
"""Share by which two cells must differ to be called different: less is no reason to choose (2 %)."""


def side(ratio: Metric) -> Literal["above", "below"] | None:
    """On which side of 1 a ratio lies: its whole interval, and its value by `SMALLEST_EFFECT` or more.

    None: no difference is shown, or the ratio has no interval.
    """
    if ratio.low is None or ratio.high is None:
        return None
    if ratio.low > 1 and ratio.value >= 1 + SMALLEST_EFFECT:
        return "above"
    return "below" if ratio.high < 1 and ratio.value <= 1 / (1 + SMALLEST_EFFECT) else None
