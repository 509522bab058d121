"""Curves, efficiencies and baselines, worked out by hand from the planted studies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.analysis.scaling import Curve, Efficiency, Point, scaled
from reports.analysis.study import StudyFigures, analyse
from results.outcome import Evidence
from results.statistics import ratio_of_runs


def analysed(planted) -> StudyFigures:
    return analyse("study", planted.study.plans(), planted.study.collect())


def curve(study: StudyFigures, kind: str, label: str) -> Curve:
    found = [one for one in study.curves if (one.key.kind, one.key.label) == (kind, label)]
    assert len(found) == 1
    return found[0]


def point(study: StudyFigures, kind: str, label: str, gpus: int) -> Point:
    found = [one for one in curve(study, kind, label).points if one.gpus == gpus]
    assert len(found) == 1
    return found[0]


def value(efficiency: Efficiency) -> float:
    assert efficiency.metric is not None
    return efficiency.metric.value


def test_weak_efficiency_against_the_single_device(small) -> None:
    study = analysed(small)
    # X(1) = 8 / 10 ms = 800, X(2) = 16 / 12.5 ms = 1280, X(4) = 32 / 16 ms = 2000 samples a second.
    assert value(point(study, "weak", "ddp", 2).single) == pytest.approx(1280 * 1 / (800 * 2))  # 0.80
    assert value(point(study, "weak", "ddp", 4).single) == pytest.approx(2000 * 1 / (800 * 4))  # 0.625


def test_weak_efficiency_against_the_own_smallest_size(small) -> None:
    study = analysed(small)
    four = point(study, "weak", "ddp", 4).own
    assert value(four) == pytest.approx(2000 * 2 / (1280 * 4))  # 0.78125
    assert four.baseline is not None
    assert four.baseline.label == "ddp on 2 ranks (CPU), 12.5 ms a step"
    assert point(study, "weak", "ddp", 2).own.is_baseline


def test_strong_efficiency_counts_the_shrinking_share_of_the_batch(small) -> None:
    study = analysed(small)
    # 32 samples in 40, 25 and 16 ms: X = 800, 1280, 2000.
    assert value(point(study, "strong", "ddp", 2).single) == pytest.approx(0.80)
    assert value(point(study, "strong", "ddp", 4).single) == pytest.approx(0.625)


def test_the_interval_of_an_efficiency_spans_the_ratios_of_single_runs(small) -> None:
    metric = point(analysed(small), "weak", "ddp", 2).single.metric
    assert metric is not None
    # Worst: 9 ms against 13 ms; best: 11 ms against 12 ms.
    assert (metric.low, metric.high) == (pytest.approx(9 / 13), pytest.approx(11 / 12))
    assert (metric.samples, metric.interval) == (3, "range")


def test_the_single_device_is_named_with_its_absolute_step_time(small) -> None:
    single = curve(analysed(small), "weak", "ddp").single
    assert single is not None
    assert single.label == "single on 1 rank (CPU), 10.0 ms a step"


def test_the_best_single_device_is_the_fastest_uncompressed_one(planted) -> None:
    slow = planted.series("weak", "single", [1], batch=8)[0]
    fast = planted.series("weak", "fsdp", [1, 2], batch=8)
    squeezed = planted.series("weak", "single", [1], batch=8, compression="topk:0.01")[0]
    planted.plan()
    planted.runs(slow, [10.0])
    planted.runs(fast[0], [8.0])
    planted.runs(fast[1], [16.0])
    planted.runs(squeezed, [4.0])
    study = analysed(planted)
    assert value(point(study, "weak", "fsdp", 2).single) == pytest.approx(8 / 16)
    # Weak scaling with one batch a replica: 8 ms / 10 ms, the slower one is 80 % of the best.
    assert value(point(study, "weak", "single", 1).single) == pytest.approx(0.8)


def test_a_single_device_of_other_work_is_no_baseline(planted) -> None:
    other_batch = planted.series("weak", "single", [1], batch=16)[0]
    other_precision = planted.series("weak", "single", [1], batch=8, precision="bf16")[0]
    ddp = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan()
    for cell in (other_batch, other_precision, ddp):
        planted.runs(cell, [10.0])
    claim = point(analysed(planted), "weak", "ddp", 2).single
    assert claim.metric is None
    assert claim.reason == "no single device ran the same work"


def test_emulated_points_make_no_claim(planted) -> None:
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    planted.runs(single, [10.0])
    planted.runs(ddp[0], [11.0])
    planted.runs(ddp[1], [20.0], evidence=Evidence.EMULATED)
    four = point(analysed(planted), "weak", "ddp", 4)
    assert four.single.metric is None
    assert four.own.metric is None
    assert four.single.reason is not None
    assert four.single.reason.startswith("emulated")


def test_nothing_is_claimed_against_an_emulated_baseline(planted) -> None:
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan()
    planted.runs(single, [10.0], evidence=Evidence.EMULATED)
    planted.runs(ddp, [11.0])
    assert point(analysed(planted), "weak", "ddp", 2).single.reason == "the baseline is emulated"


def test_cells_of_unlike_software_are_not_divided(planted, new_environment) -> None:
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan()
    planted.runs(single, [10.0], environment=new_environment(torch="2.12.0"))
    planted.runs(ddp, [11.0])
    claim = point(analysed(planted), "weak", "ddp", 2).single
    assert claim.metric is None
    assert claim.reason == "not comparable with the baseline: torch: 2.13.0 here, 2.12.0 there"


@pytest.mark.parametrize(
    ("single_ms", "ddp_ms", "expected"),
    [
        ([10.0, 10.2], [9.0, 9.1], True),  # even 10.0 / 9.1 is above 1
        ([10.0, 11.0], [10.0, 10.5], False),  # 10.0 / 10.5 is below 1: within the noise
        ([10.0], [9.0], True),  # one run each: 1.11 is above 1.05
        ([10.0], [9.8], False),  # 1.02 is not
    ],
)
def test_a_point_above_the_noise_is_super_linear_and_shown(planted, single_ms, ddp_ms, expected) -> None:
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan()
    planted.runs(single, single_ms)
    planted.runs(ddp, ddp_ms)
    claim = point(analysed(planted), "weak", "ddp", 2).single
    assert value(claim) > 1
    assert claim.super_linear is expected


def test_the_same_series_of_two_plans_is_one_curve(planted) -> None:
    first = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.skip("ddp", 4, "4 devices asked for, 2 here", batch=8)
    planted.plan()
    second = planted.series("weak", "ddp", [2, 4, 8], batch=8)
    planted.plan()
    for cell, ms in ((first, 10.0), (second[1], 11.0)):
        planted.runs(cell, [ms])
    study = analysed(planted)
    found = curve(study, "weak", "ddp")
    assert [one.gpus for one in found.points] == [2, 4]
    assert [(gap.gpus, gap.skipped) for gap in found.gaps] == [(8, False)]
    assert study.skipped == ()


def test_unlike_settings_are_separate_curves_that_say_what_differs(planted) -> None:
    for precision in ("fp32", "bf16"):
        cell = planted.series("weak", "ddp", [2], batch=8, precision=precision)[0]
        planted.runs(cell, [10.0])
    planted.plan()
    study = analysed(planted)
    assert sorted(study.settings[one.key.setting] for one in study.curves) == [
        "precision=bf16",
        "precision=fp32",
    ]


def test_failed_and_skipped_sizes_are_gaps_with_reasons(small) -> None:
    gaps = curve(analysed(small), "weak", "ddp").gaps
    assert [(gap.gpus, gap.skipped, gap.reason) for gap in gaps] == [
        (1, True, "ddp needs at least 2"),
        (8, False, "out of memory: rank 0: allocating 2 GiB"),
    ]


@given(
    st.lists(st.floats(1e6, 1e9), min_size=1, max_size=8),
    st.lists(st.floats(1e6, 1e9), min_size=1, max_size=8),
    st.floats(0.01, 100),
)
def test_scaling_a_ratio_keeps_its_relative_interval(above, below, factor) -> None:
    ratio = ratio_of_runs(above, below, "ratio")
    times = scaled(ratio, factor)
    assert times.value == pytest.approx(ratio.value * factor)
    if ratio.low is not None:
        assert times.low is not None
        assert times.low / times.value == pytest.approx(ratio.low / ratio.value)
