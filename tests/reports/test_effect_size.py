"""On which side of 1 a ratio lies: by its interval and by an effect that matters."""

from __future__ import annotations

import numpy as np
import pytest

from reports.analysis.effect import SMALLEST_EFFECT, side, sides
from results.statistics import Metric, p_equal


@pytest.mark.parametrize(
    ("low", "value", "high", "expected"),
    [
        (1.001, 1.02, 1.1, "faster"),
        (1.001, 1.019, 1.1, None),
        (0.999, 1.05, 1.1, None),
        # 1 / 1.02 is 0.98039.
        (0.9, 0.980, 0.999, "slower"),
        (0.9, 0.981, 0.999, None),
        (0.9, 0.95, 1.001, None),
        (None, 2.0, None, None),
    ],
)
def test_a_side_is_told_by_the_interval_and_from_two_percent_on(low, value, high, expected) -> None:
    kind = None if low is None else "range"
    ratio = Metric(value=value, unit="x", low=low, high=high, samples=3, interval=kind)
    assert side(ratio, SMALLEST_EFFECT) == expected


def test_another_effect_may_be_the_smallest_that_matters() -> None:
    ratio = Metric(value=1.04, unit="x", low=1.03, high=1.05, samples=3, interval="range")
    assert (side(ratio, 0.03), side(ratio, 0.05)) == ("faster", None)


EQUAL = ([10.0, 10.1, 10.2], [10.0, 10.1, 10.2])
APART = ([10.55, 10.6, 10.75], [10.1, 10.0, 10.2])
"""Logarithms differ by 0.0514 with a standard error of 0.0081: t = 6.3 with 4 degrees of freedom."""


def test_what_one_comparison_shows_many_do_not() -> None:
    # 0.05 / 16 = 0.0031 and 0.05 / 17 = 0.0029.
    assert p_equal(*APART) == pytest.approx(0.00305, abs=5e-6)
    assert sides([APART, *[EQUAL] * 15], SMALLEST_EFFECT) == ["faster", *[None] * 15]
    assert sides([APART, *[EQUAL] * 16], SMALLEST_EFFECT) == [None] * 17


def test_those_that_are_shown_leave_more_to_the_others() -> None:
    """Holm's method: with 16 that are certain before it, the last is one comparison of 4."""
    certain = ([20.0, 20.1, 20.2], [10.0, 10.1, 10.2])
    assert sides([*[certain] * 16, APART, *[EQUAL] * 3], SMALLEST_EFFECT)[16] == "faster"


def test_equal_cells_lead_to_a_claim_in_at_most_one_study_of_twenty() -> None:
    """500 studies have 20 pairs of three runs each, all from one distribution."""
    rng = np.random.default_rng(16)
    runs = np.exp(rng.normal(0.0, 0.03, size=(500, 20, 2, 3)))
    claims = sum(any(sides([tuple(pair) for pair in study], SMALLEST_EFFECT)) for study in runs)
    # The mean is at most 25; four standard deviations of a binomial above that are 44.
    assert claims <= 44


def test_runs_without_spread_are_told_apart_by_any_difference_and_single_ones_never() -> None:
    assert p_equal([10.0, 10.0], [11.0, 11.0]) == 0.0
    assert p_equal([10.0, 10.0], [10.0, 10.0]) == 1.0
    assert p_equal([10.0], [20.0, 20.0]) == 1.0
