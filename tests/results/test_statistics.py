from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.statistics import (
    Metric,
    differences,
    median_of,
    over_runs,
    ratio_of_runs,
    slow_steps,
    t_quantile,
    within_run,
)

TIMES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=60)
RUNS = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=60)
TINY = 1e-12


@pytest.mark.parametrize(
    ("freedom", "confidence", "quantile"),
    [
        # NIST/SEMATECH e-Handbook, table 1.3.6.7.2
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (5, 0.95, 2.571),
        (9, 0.95, 2.262),
        (30, 0.95, 2.042),
        (5, 0.90, 2.015),
        (10, 0.99, 3.169),
        (10**9, 0.95, 1.960),
    ],
)
def test_t_quantiles_are_those_of_the_table(freedom, confidence, quantile) -> None:
    assert t_quantile(freedom, confidence) == pytest.approx(quantile, abs=0.0005)


def test_twenty_blocks_make_ten_batches_of_two() -> None:
    # Blocks 1 .. 20: batch means 1.5, 3.5, ..., 19.5; their mean is 10.5 and their variance is
    # 2^2 x (10^2 - 1) / 12 x 10 / 9 = 36.6667; t(9) = 2.262157;
    # half = 2.262157 x sqrt(36.6667 / 10) = 2.262157 x 1.914854 = 4.331703
    metric = within_run(range(1, 21), "ns")
    assert (metric.value, metric.samples, metric.interval) == (10.5, 10, "t95-batch-means")
    assert metric.low == pytest.approx(10.5 - 4.331703, abs=1e-5)
    assert metric.high == pytest.approx(10.5 + 4.331703, abs=1e-5)


def test_blocks_that_do_not_divide_make_ten_batches_all_the_same() -> None:
    # 23 blocks: three batches of 3, seven of 2. The last batch, 22 and 23, has the mean 22.5:
    # means 2, 5, 8, 10.5, 12.5, 14.5, 16.5, 18.5, 20.5, 22.5; sum 130.5, sum of squares 2110.75;
    # variance (2110.75 - 130.5^2 / 10) / 9 = 45.302778; half = 2.262157 x sqrt(4.5302778) = 4.814877
    metric = within_run(range(1, 24), "ns")
    assert (metric.value, metric.samples) == (12.0, 10)
    assert metric.high == pytest.approx(12.0 + 4.814877, abs=1e-5)


@pytest.mark.parametrize("function", [within_run, differences])
def test_six_values_are_six_samples(function) -> None:
    # 1 .. 6: mean 3.5, variance 3.5; t(5) = 2.570582; half = 2.570582 x sqrt(3.5 / 6) = 1.963314
    metric = function([1, 2, 3, 4, 5, 6], "ns")
    assert (metric.value, metric.samples) == (3.5, 6)
    assert metric.low == pytest.approx(1.536686, abs=1e-5)
    assert metric.high == pytest.approx(5.463314, abs=1e-5)


def test_the_interval_over_runs_is_students_t_on_the_logarithms() -> None:
    # 10, 10, 10, 20, 20, 20: centre sqrt(200) = 14.142136; logs are +-0.346574 around it, so their
    # standard deviation is 0.346574 x sqrt(6 / 5) = 0.379652; half = 2.570582 x 0.379652 / sqrt(6) =
    # 0.398418; exp(0.398418) = 1.489467
    metric = over_runs([10, 20, 10, 20, 10, 20], "ns")
    assert (metric.value, metric.samples, metric.interval) == (15.0, 6, "t95-runs")
    assert metric.low == pytest.approx(14.142136 / 1.489467, rel=1e-5)
    assert metric.high == pytest.approx(14.142136 * 1.489467, rel=1e-5)


def test_below_six_runs_it_is_the_range() -> None:
    for function in (over_runs, differences):
        assert function([5.0, 3.0, 4.0], "ns") == Metric(
            value=4.0, unit="ns", low=3.0, high=5.0, samples=3, interval="range"
        )


def test_below_six_blocks_a_run_has_no_interval() -> None:
    assert within_run([1, 2, 3, 4, 5], "ns") == Metric(
        value=3.0, unit="ns", low=None, high=None, samples=5, interval=None
    )


def test_one_run_has_no_interval() -> None:
    alone = Metric(value=7.0, unit="ns", low=None, high=None, samples=1, interval=None)
    assert over_runs([7.0], "ns") == differences([7.0], "ns") == within_run([7.0], "ns") == alone
    assert ratio_of_runs([14.0], [2.0], "ns") == alone


def test_differences_may_be_negative() -> None:
    metric = differences([-3.0, 1.0], "ns")
    assert (metric.value, metric.low, metric.high) == (-1.0, -3.0, 1.0)


def test_the_ratio_of_few_runs_has_the_range_a_reader_could_form() -> None:
    # means 11 and 4.5; smallest over largest 10 / 5, largest over smallest 12 / 4
    metric = ratio_of_runs([10, 12], [4, 5], "ratio")
    assert metric.value == pytest.approx(11 / 4.5)
    assert (metric.low, metric.high, metric.samples, metric.interval) == (2.0, 3.0, 2, "range")


def test_six_runs_over_one_are_still_a_range() -> None:
    metric = ratio_of_runs([10, 11, 12, 13, 14, 15], [5], "ratio")
    assert (metric.value, metric.low, metric.high, metric.samples) == (2.5, 2.0, 3.0, 1)
    assert metric.interval == "range"


def test_the_ratio_of_runs_is_welchs_interval_of_students_sleep_data() -> None:
    # Student (1908), Cushny and Peebles' hours of sleep, as printed for R's t.test(extra ~ group, sleep):
    # means 0.75 and 2.33, df = 17.776, 95 percent confidence interval -3.3654832 0.2054832.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    metric = ratio_of_runs([math.exp(x) for x in first], [math.exp(x) for x in second], "ratio")
    assert metric.low is not None
    assert metric.high is not None
    assert math.log(metric.low) == pytest.approx(-3.3654832, abs=5e-8)
    assert math.log(metric.high) == pytest.approx(0.2054832, abs=5e-8)
    assert (metric.samples, metric.interval) == (10, "t95-runs")


def test_runs_without_spread_have_an_interval_without_width() -> None:
    metric = ratio_of_runs([2.0] * 6, [1.0] * 6, "ratio")
    assert (metric.value, metric.low, metric.high) == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("steps", "slow"),
    [
        # quartiles 2.75 and 6.25 of 1 .. 8, fence 6.25 + 1.5 x 3.5 = 11.5
        ([1, 2, 3, 4, 5, 6, 7, 8], 0),
        # quartiles 3 and 7 of 1 .. 8 and x, fence 7 + 1.5 x 4 = 13: 13 is not above it
        ([1, 2, 3, 4, 5, 6, 7, 8, 13], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 14], 1),
        # quartiles 10 and 10: everything above 10 counts, what is below never
        ([10, 10, 10, 10, 10, 10, 11, 1, 1], 1),
    ],
)
def test_slow_steps_are_those_above_tukeys_fence(steps, slow) -> None:
    assert slow_steps(np.array(steps, dtype=np.int64)) == slow


def _covers(metric: Metric, truth: float) -> bool:
    return metric.low is not None and metric.high is not None and metric.low <= truth <= metric.high


@pytest.mark.parametrize("runs", [6, 10])
def test_the_interval_over_runs_covers_the_truth_as_often_as_it_says(runs) -> None:
    # 2000 studies: the share has a standard deviation of sqrt(0.95 x 0.05 / 2000) = 0.0049; four of them.
    draws = np.random.default_rng(11).lognormal(mean=3.0, sigma=0.15, size=(2000, runs))
    covered = fmean(_covers(over_runs(row, "ns"), math.exp(3.0)) for row in draws)
    assert abs(covered - 0.95) < 4 * 0.0049


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    # Unequal spreads and numbers of runs; Welch is approximate, so five standard deviations of 0.0049.
    random = np.random.default_rng(12)
    above = random.lognormal(mean=math.log(3.0), sigma=0.05, size=(2000, 6))
    below = random.lognormal(mean=0.0, sigma=0.15, size=(2000, 10))
    covered = fmean(_covers(ratio_of_runs(a, b, "x"), 3.0) for a, b in zip(above, below, strict=True))
    assert abs(covered - 0.95) < 5 * 0.0049


def _correlated(random: np.random.Generator, *, length: int, phi: float) -> list[float]:
    """A stationary AR(1) series with the mean 100 and a standard deviation of 10."""
    shocks = random.normal(0, 10 * math.sqrt(1 - phi**2), size=length)
    series = [float(random.normal(0, 10))]
    for shock in shocks[1:]:
        series.append(phi * series[-1] + float(shock))
    return [100 + value for value in series]


def test_batch_means_hold_where_steps_are_correlated_and_a_naive_interval_does_not() -> None:
    # AR(1), phi 0.6, 200 steps: about 0.94 by batch means, about 0.67 naively. The standard deviation of
    # a share of 1000 is at most sqrt(0.7 x 0.3 / 1000) = 0.0145: both limits are four or more away.
    random = np.random.default_rng(13)
    series = [_correlated(random, length=200, phi=0.6) for _ in range(1000)]
    batches = fmean(_covers(within_run(values, "ns"), 100) for values in series)
    naive = fmean(_covers(differences(values, "ns"), 100) for values in series)
    assert batches > 0.88
    assert naive < 0.80


def _holds_its_value(metric: Metric) -> bool:
    if metric.low is None or metric.high is None:
        return metric.interval is None
    slack = TINY * abs(metric.value)
    return metric.low - slack <= metric.value <= metric.high + slack


@given(TIMES)
def test_an_interval_of_means_holds_its_value(values) -> None:
    assert _holds_its_value(within_run(values, "ns"))
    assert _holds_its_value(differences(values, "ns"))
    assert _holds_its_value(differences([-value for value in values], "ns"))


@given(RUNS, RUNS)
def test_an_interval_over_runs_holds_its_value(first, second) -> None:
    assert _holds_its_value(over_runs(first, "ns"))
    if min(len(first), len(second)) < 6:
        assert _holds_its_value(ratio_of_runs(first, second, "ratio"))


@given(RUNS)
def test_a_cell_over_itself_is_one(runs) -> None:
    metric = ratio_of_runs(runs, runs, "ratio")
    assert metric.value == 1.0
    assert _holds_its_value(metric)
    if metric.low is not None and metric.high is not None:
        assert metric.low * metric.high == pytest.approx(1.0)


@given(RUNS, RUNS)
def test_turning_a_ratio_round_turns_its_interval_round(first, second) -> None:
    one, other = ratio_of_runs(first, second, "ratio"), ratio_of_runs(second, first, "ratio")
    assert one.value * other.value == pytest.approx(1.0)
    if one.low is not None and one.high is not None:
        assert other.low == pytest.approx(1 / one.high)
        assert other.high == pytest.approx(1 / one.low)


@pytest.mark.parametrize(
    ("count", "below"),
    # Ranks of the ends of the 95 % interval of a median (Conover, Practical Nonparametric Statistics): with
    # n = 6 the extremes, with 10 the second and ninth value, with 20 the sixth and fifteenth.
    [(5, 0), (6, 0), (8, 0), (9, 1), (10, 1), (20, 5), (30, 9)],
)
def test_the_interval_of_a_median_is_by_order_statistics(count, below) -> None:
    median, low, high = median_of([float(value) for value in range(count, 0, -1)])
    assert (median, low, high) == ((count + 1) / 2, below + 1, count - below)
