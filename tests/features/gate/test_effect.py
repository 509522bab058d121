"""Effects by hand, what is said of them, and how often a comparison without any change calls one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_ind

from harness.features.gate.effect import (
    ALPHA,
    Effect,
    Verdict,
    difference_effect,
    judge,
    relative_effect,
    runs_that_tell,
)


def effect(low: float, high: float, error: float = 0.01) -> Effect:
    return Effect(value=(low + high) / 2, low=low, high=high, error=error, runs=(5, 5))


def test_the_effect_of_runs_is_welchs_t_on_their_logarithms() -> None:
    base, new = np.log([10.0, 11.0, 13.0, 10.5]), np.log([12.0, 15.0, 12.5])
    oracle = ttest_ind(new, base, equal_var=False).confidence_interval(0.9)
    found = relative_effect(list(np.exp(base)), list(np.exp(new)), 0.05)
    assert found.value == pytest.approx(math.expm1(new.mean() - base.mean()))
    assert (found.low, found.high) == pytest.approx((math.expm1(oracle.low), math.expm1(oracle.high)))
    assert found.error == pytest.approx(math.sqrt((base.var(ddof=1) + new.var(ddof=1)) / 2))


def test_a_difference_is_a_share_of_the_step() -> None:
    found = difference_effect([1.0, 2.0, 3.0], [3.0, 4.0, 5.0], 10.0, 0.05)
    assert found.value == pytest.approx(0.2)
    # 4 degrees of freedom, t at 0.95: 2.1318; standard error sqrt(2/3) / 10.
    assert found.high - found.value == pytest.approx(2.1318 * math.sqrt(2 / 3) / 10, rel=1e-4)


@pytest.mark.parametrize("runs", [([1.0, 1.1], [1.0, 1.1, 1.2]), ([1.0, 1.1, 0.0], [1.0, 1.1, 1.2])])
def test_without_enough_runs_or_for_values_not_above_0_there_is_no_ratio(runs) -> None:
    assert relative_effect(*runs, 0.05) is None


def test_runs_that_are_all_alike_have_an_effect_without_width() -> None:
    found = relative_effect([2.0] * 3, [2.2] * 3, 0.01)
    assert (found.low, found.high) == (found.value, found.value) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize(
    ("low", "high", "change"),
    [
        (-0.04, 0.04, Verdict.UNCHANGED),
        (0.021, 0.049, Verdict.UNCHANGED),
        (0.021, 0.06, Verdict.REGRESSED),
        (0.019, 0.06, Verdict.INCONCLUSIVE),
        (-0.06, -0.021, Verdict.IMPROVED),
        (-0.06, -0.019, Verdict.INCONCLUSIVE),
        (-0.3, 0.3, Verdict.INCONCLUSIVE),
    ],
)
def test_three_states_and_the_margin(low, high, change) -> None:
    assert judge(effect(low, high), 0.05) is change
    opposite = {Verdict.REGRESSED: Verdict.IMPROVED, Verdict.IMPROVED: Verdict.REGRESSED}
    assert judge(effect(low, high), 0.05, lower_is_better=False) is opposite.get(change, change)


def test_the_stated_number_of_runs_decides_whatever_the_effect() -> None:
    wide = effect(-0.1, 0.1, error=0.02)
    runs = runs_that_tell(wide, 0.05, 0.01)
    # The normal quantile gives the least there can be: (2.326 x 0.02 / 0.015)^2 x 2 = 19.2.
    assert 20 <= runs <= 23
    assert runs_that_tell(effect(-1, 1, error=2.0), 0.05, 0.01) is None
    rng = np.random.default_rng(5)
    for change in (0.0, 0.02, 0.035, 0.05):
        undecided = 0
        for _ in range(200):
            base = np.exp(rng.normal(0, 0.02, runs))
            new = np.exp(rng.normal(math.log1p(change), 0.02, runs))
            undecided += judge(relative_effect(list(base), list(new), 0.01), 0.05) is Verdict.INCONCLUSIVE
        # The number is for the spread that was seen; half of later spreads are larger.
        assert undecided <= 120


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("runs", [3, 10])
def test_a_comparison_without_a_change_calls_one_in_at_most_one_of_a_hundred(rows, runs) -> None:
    rng = np.random.default_rng([rows, runs])
    calls, alarms = 1500, 0
    for _ in range(calls):
        found = [
            relative_effect(*map(list, np.exp(rng.normal(0, 0.03, (2, runs)))), ALPHA / rows)
            for _ in range(rows)
        ]
        alarms += any(one is not None and judge(one, 0.05) is Verdict.REGRESSED for one in found)
    # 1 % of 1,500 is 15; more than 27 would be seen in 2 of 1,000 such tests of a gate with exactly 1 %.
    assert alarms <= 27


def test_a_slow_down_as_large_as_the_margin_is_found() -> None:
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(400):
        one = relative_effect(
            list(np.exp(rng.normal(0, 0.01, 10))), list(np.exp(rng.normal(math.log(1.05), 0.01, 10))), ALPHA
        )
        found += judge(one, 0.05) is Verdict.REGRESSED
    assert found >= 380
