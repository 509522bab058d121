"""The knee of a curve. Weak scaling: W grows with n, so that X(m) / X(n) = (m / n) T(n) / T(m)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reports.analysis.knee import Knee, Size, knee, knee_of
from results.outcome import Evidence

Times = dict[int, list[float]]
"""Step times in ms of the runs, by size."""


@pytest.fixture
def found(planted) -> Callable[..., Knee]:
    """The knee of one series."""

    def made(times: Times, *, kind: str = "weak", batch: int = 8, emulated: tuple[int, ...] = ()) -> Knee:
        cells = planted.series(kind, "ddp", list(times), batch=batch)
        for cell in cells:
            evidence = Evidence.EMULATED if cell.gpus in emulated else Evidence.MEASURED
            planted.runs(cell, times[cell.gpus], evidence=evidence)
        return knee(planted.analysed().curves[0])

    return made


def yields(knee: Knee) -> list[float]:
    return [growth.marginal.value for growth in knee.growths]


def test_the_knee_is_the_last_size_up_to_which_every_growth_pays(found) -> None:
    one = found({1: [10.0], 2: [10.0], 4: [12.5], 8: [25.0], 16: [25.0]})
    # Of a doubling 2 T(n) / T(m) - 1: 2 - 1, 2 (0.8) - 1, 2 (0.5) - 1, 2 - 1.
    assert yields(one) == pytest.approx([1.0, 0.6, 0.0, 1.0])
    assert one.at == 4
    assert one.text == (
        "knee between 4 and 8: going from 4 to 8 changes throughput by +0 %, and +50 % or more pays"
    )


def test_under_strong_scaling_the_work_stays(found) -> None:
    one = found({1: [40.0], 2: [20.0], 4: [16.0]}, kind="strong", batch=32)
    # X(m) / X(n) = T(n) / T(m): 2 and 1.25, and so 1 and 0.25.
    assert yields(one) == pytest.approx([1.0, 0.25])
    assert (one.at, one.beyond.larger) == (2, 4)


def test_without_a_knee_it_says_up_to_where(found) -> None:
    # 2 (0.75) - 1 = 0.5 still pays.
    one = found({2: [7.5], 4: [10.0]})
    assert yields(one) == pytest.approx([0.5])
    assert one.at is None
    assert one.text == "no knee seen up to 4 (single runs)"


def test_just_below_half_does_not_pay(found) -> None:
    # 2 (7.5 / 10.1) - 1 = 0.485.
    assert found({2: [7.5], 4: [10.1]}).at == 2


def test_a_gap_is_one_growth_and_only_sizes_that_were_run_are_named(found) -> None:
    one = found({8: [10.0], 64: [20.0]})
    # Eight times the devices, 8 / 2 times the throughput: (4 - 1) / (8 - 1).
    assert yields(one) == pytest.approx([3 / 7])
    assert one.text.startswith(
        "knee between 8 and 64: going from 8 to 64 changes throughput by +300 %, and +350 % or more pays"
    )


def test_the_best_estimate_decides_and_the_odds_of_other_sizes_are_given(found) -> None:
    # Mean 16: 2 (10 / 16) - 1 = 0.25. At best 10 / 12: 2 (0.83) - 1 = 0.67; at worst 10 / 20: 0.
    one = found({1: [10.0, 10.0], 2: [12.0, 20.0]})
    assert yields(one) == pytest.approx([0.25])
    assert (one.growths[0].marginal.low, one.growths[0].marginal.high) == pytest.approx((0.0, 2 / 3))
    assert (one.at, one.shown_to) == (1, None)
    assert sum(one.odds.values()) == pytest.approx(1)
    assert one.instead == {2: one.odds[2]}
    assert one.text.startswith(f"knee between 1 and 2 (in {100 * one.odds[1]:.0f} % of resamples): going")


def test_the_odds_are_those_of_students_t(found) -> None:
    """One growth with T(1) known exactly: P(T(2) < T(1) / 0.75) is a tail of Student's t on logarithms."""
    runs = [12.9, 13.3, 13.8]
    [odds, _] = found({1: [10.0], 2: runs}).odds.values()
    logs = np.log(runs)
    # The single run of size 1 has the same variance: 1 / 1 + 1 / 3 of it in the difference.
    error = logs.std(ddof=1) * (1 + 1 / 3) ** 0.5
    exact = stats.t(2).sf((math.log(10 / 0.75) - math.log(np.mean(runs))) / error)
    assert odds == pytest.approx(exact, abs=0.05)


def test_a_disturbed_run_is_left_out_where_two_others_are_left(planted) -> None:
    cells = planted.series("weak", "ddp", [1, 2], batch=8)
    planted.runs(cells[0], [10.0, 10.0, 10.0])
    planted.runs(cells[1], [13.0, 13.1, 13.2])
    planted.runs(cells[1], [15.0], foreign_cpu_cores=1.0)
    one = knee(planted.analysed().curves[0])
    # 2 (10 / 13.1) - 1 = 0.53; with the run of 15 ms it would be 0.47.
    assert yields(one) == pytest.approx([2 / 1.31 - 1])
    assert (one.at, one.left_out) == (None, 1)
    assert one.text.endswith("; 1 disturbed run left out")


@pytest.mark.slow
def test_a_slow_run_does_not_walk_past_the_first_growth_that_does_not_pay(found) -> None:
    """Efficiencies 94 % at 64, 66 % at 128, 56 % at 512; one of six runs at 64 takes 15 % longer."""
    true = {1: 10.0, 64: 10.6, 128: 15.1, 256: 16.5, 512: 17.8}
    times = {n: [t * (1 + 0.02 * (at - 2.5) / 2.5) for at in range(6)] for n, t in true.items()}
    times[64][3] *= 1.15
    one = found(times)
    assert one.at == 64
    assert 512 not in one.instead


def test_emulated_points_make_no_claim(found) -> None:
    one = found({1: [10.0], 2: [10.0], 4: [90.0], 8: [990.0]}, emulated=(4, 8))
    assert one.text == "no knee seen up to 2 (single runs)"
    assert one.unclaimed == (4, 8)


def test_an_emulated_point_between_measured_ones_is_passed_over(found) -> None:
    one = found({1: [10.0], 2: [90.0], 4: [10.0]}, emulated=(2,))
    assert [(growth.smaller, growth.larger) for growth in one.growths] == [(1, 4)]
    assert one.text == "no knee seen up to 4 (single runs)"


def test_a_curve_of_emulated_points_has_no_knee_and_says_why(found) -> None:
    one = found({2: [10.0], 4: [90.0]}, emulated=(2, 4))
    assert (one.at, one.growths) == (None, ())
    assert one.text == "no knee is claimed: emulated sizes make no claim"


def test_one_size_has_no_knee(found) -> None:
    assert found({2: [10.0]}).text == "no knee is claimed: fewer than two sizes have a figure"


def test_the_single_device_stands_in_front(planted) -> None:
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2, 4], batch=8)
    for cell, ms in ((single, 10.0), (ddp[0], 20.0), (ddp[1], 20.0)):
        planted.runs(cell, [ms])
    curve = planted.analysed().curves[1]
    assert curve.key.strategy == "ddp"
    one = knee(curve)
    assert [(growth.smaller, growth.larger) for growth in one.growths] == [(1, 2), (2, 4)]
    assert one.at == 1


def test_sizes_of_unlike_machines_are_not_divided(planted, new_timing, new_environment) -> None:
    cells = planted.series("weak", "ddp", [2, 4, 8, 16], batch=8)
    # From 8 to 16 nothing is gained either, but what is beyond an unknown growth is unknown.
    for cell, device, ms in zip(cells, ("A", "A", "B", "B"), (10.0, 10.0, 90.0, 180.0), strict=True):
        planted.run(cell, new_timing(step_ms=ms, environment=new_environment(device_name=device)))
    one = knee(planted.analysed().curves[0])
    assert one.text == "no knee seen up to 4 (single runs)"
    assert one.unclaimed == (8, 16)
    assert "device" in one.reason


@given(
    smaller=st.integers(1, 512), times=st.floats(1.01, 64), before=st.floats(1e-3, 1e6), gain=st.floats(0, 1)
)
def test_the_yield_is_what_an_added_device_brings_over_what_each_brought(
    smaller, times, before, gain
) -> None:
    larger = max(smaller + 1, round(smaller * times))
    # Each added one brings `gain` of what each brought before.
    after = before + gain * before / smaller * (larger - smaller)
    sizes = [
        Size(gpus=gpus, batch=8, steps=(8 / rate,), left_out=0)
        for gpus, rate in ((smaller, before), (larger, after))
    ]
    [growth] = knee_of(sizes).growths
    assert growth.marginal.value == pytest.approx(gain, abs=1e-6)
