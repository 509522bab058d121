"""Curves, efficiencies and baselines, worked out by hand from the planted studies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.analysis.scaling import Curve, CurvePoint, Efficiency
from reports.analysis.study import StudyFigures
from results.outcome import Evidence
from results.statistics import ratio_of_runs


def curve(study: StudyFigures, kind: str, label: str) -> Curve:
    found = [one for one in study.curves if (one.key.kind, one.key.label) == (kind, label)]
    assert len(found) == 1
    return found[0]


def point(study: StudyFigures, kind: str, label: str, gpus: int) -> CurvePoint:
    found = [one for one in curve(study, kind, label).points if one.gpus == gpus]
    assert len(found) == 1
    return found[0]


def value(efficiency: Efficiency) -> float:
    return efficiency.metric.value


def test_efficiency_against_the_single_device(small) -> None:
    study = small.analysed()
    # Weak: X(1) = 8 / 10 ms = 800, X(2) = 16 / 12.5 ms = 1280, X(4) = 32 / 16 ms = 2000 samples a second.
    # Strong: 32 samples in 40, 25 and 16 ms are as many.
    for kind in ("weak", "strong"):
        assert value(point(study, kind, "ddp", 2).single) == pytest.approx(1280 * 1 / (800 * 2))  # 0.80
        assert value(point(study, kind, "ddp", 4).single) == pytest.approx(2000 * 1 / (800 * 4))  # 0.625


def test_weak_efficiency_against_the_own_smallest_size(small) -> None:
    study = small.analysed()
    four = point(study, "weak", "ddp", 4).own
    assert value(four) == pytest.approx(2000 * 2 / (1280 * 4))  # 0.78125
    assert four.baseline.name == "ddp on 2"
    assert point(study, "weak", "ddp", 2).own.is_baseline


def test_ranks_that_hold_a_replica_together_are_held_against_the_single_device(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("pipeline:1f1b", {2: 8.0}, model_parallel=2)
    # One replica of 8 samples on 1 device and on 2: 800 and 1000 a second, half of 1.25.
    assert value(point(planted.analysed(), "weak", "pipeline:1f1b", 2).single) == pytest.approx(0.625)


def test_the_interval_of_an_efficiency_spans_the_ratios_of_single_runs(small) -> None:
    metric = point(small.analysed(), "weak", "ddp", 2).single.metric
    # Worst: 9 ms against 13 ms; best: 11 ms against 12 ms.
    assert (metric.low, metric.high) == (pytest.approx(9 / 13), pytest.approx(11 / 12))
    assert (metric.samples, metric.interval) == (3, "range")


def test_the_best_single_device_is_the_fastest_uncompressed_one(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("fsdp", {1: 8.0, 2: 16.0})
    planted.points("single", {1: 4.0}, compression="topk:0.01")
    study = planted.analysed()
    assert value(point(study, "weak", "fsdp", 2).single) == pytest.approx(8 / 16)
    # Weak scaling with one batch a replica: 8 ms / 10 ms, the slower one is 80 % of the best.
    assert value(point(study, "weak", "single", 1).single) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("axes", "label"),
    [
        ({"compression": "topk:0.01"}, "ddp + topk:0.01"),
        ({"collective": "ring"}, "ddp, ring"),
        (
            {"compression": "bf16", "collective": "ring", "link_mbit_per_s": 1000.0},
            "ddp + bf16, ring, 1gbit",
        ),
    ],
)
def test_every_way_to_exchange_is_measured_against_the_one_single_device(planted, axes, label) -> None:
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 16.0, 4: 20.0}, **axes)
    study = planted.analysed()
    # 10 / 16 and 10 / 20: weak scaling, one batch a rank.
    assert value(point(study, "weak", label, 2).single) == pytest.approx(0.625)
    assert value(point(study, "weak", label, 4).single) == pytest.approx(0.5)
    assert value(point(study, "weak", label, 4).own) == pytest.approx(0.8)
    baseline = curve(study, "weak", label).single
    assert baseline.name == "single on 1"


@pytest.mark.parametrize("axes", [{"collective": "ring"}, {"link_mbit_per_s": 1000.0}])
def test_a_device_under_a_collective_or_a_link_is_never_the_best_single_one(planted, axes) -> None:
    planted.points("single", {1: 10.0})
    planted.points("fsdp", {1: 5.0, 2: 20.0}, **axes)
    (found,) = [one for one in planted.analysed().curves if one.key.strategy == "fsdp"]
    assert [value(one.single) for one in found.points] == [pytest.approx(2.0), pytest.approx(0.5)]


def test_series_differ_by_collective_and_link_and_skips_find_theirs(planted) -> None:
    squeezed = {"compression": "bf16", "link_mbit_per_s": 1000.0}
    for fields in (
        squeezed,
        {"link_mbit_per_s": 1000.0},
        {"link_mbit_per_s": 100.0},
        {"collective": "ring"},
        {},
    ):
        planted.series("weak", "ddp", [2], batch=8, **fields)
    planted.skip("ddp", 4, "on ring", batch=8, collective="ring")
    planted.skip("ddp", 8, "at 1gbit", batch=8, link="1gbit")
    study = planted.analysed()
    # The open network first, then by rate.
    gaps = {
        one.key.label: [(gap.gpus, gap.reason) for gap in one.gaps if gap.skipped] for one in study.curves
    }
    assert gaps == {
        "ddp": [],
        "ddp, ring": [(4, "on ring")],
        "ddp, 100mbit": [],
        "ddp, 1gbit": [(8, "at 1gbit")],
        "ddp + bf16, 1gbit": [],
    }
    assert list(gaps) == ["ddp", "ddp, ring", "ddp, 100mbit", "ddp, 1gbit", "ddp + bf16, 1gbit"]
    assert {one.skip.reason for one in study.skipped} == {"on ring", "at 1gbit"}


def test_skips_that_another_plan_ran_over_another_link_stand(planted) -> None:
    planted.series("weak", "ddp", [2], batch=8)
    planted.skip("ddp", 4, "no room", batch=8, link="1gbit")
    planted.skip("ddp", 4, "no room", batch=8, collective="ring")
    planted.plan()
    planted.series("weak", "ddp", [4], batch=8)
    planted.plan()
    # Two rows: they differ in more than the size.
    assert [(one.skip.collective, one.skip.link, one.gpus) for one in planted.analysed().skipped] == [
        ("default", "1gbit", (4,)),
        ("ring", "none", (4,)),
    ]


def test_a_single_device_of_other_work_is_no_baseline(planted) -> None:
    planted.points("single", {1: 10.0}, batch=16)
    planted.points("single", {1: 10.0}, precision="bf16")
    planted.points("ddp", {2: 10.0})
    claim = point(planted.analysed(), "weak", "ddp", 2).single
    assert claim.metric is None
    assert claim.reason == "no single device ran the same work"


def test_emulated_points_make_no_claim(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 11.0})
    planted.points("ddp", {4: 20.0}, evidence=Evidence.EMULATED)
    four = point(planted.analysed(), "weak", "ddp", 4)
    assert four.single.metric is None
    assert four.own.metric is None
    assert four.single.reason.startswith("emulated")


def test_nothing_is_claimed_against_an_emulated_baseline(planted) -> None:
    planted.points("single", {1: 10.0}, evidence=Evidence.EMULATED)
    planted.points("ddp", {2: 11.0})
    assert point(planted.analysed(), "weak", "ddp", 2).single.reason == "the baseline is emulated"


def test_cells_of_unlike_software_are_not_divided(planted, new_environment) -> None:
    planted.points("single", {1: 10.0}, environment=new_environment(torch="2.12.0"))
    planted.points("ddp", {2: 11.0})
    claim = point(planted.analysed(), "weak", "ddp", 2).single
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
    planted.points("single", {1: single_ms})
    planted.points("ddp", {2: ddp_ms})
    claim = point(planted.analysed(), "weak", "ddp", 2).single
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
    study = planted.analysed()
    found = curve(study, "weak", "ddp")
    assert [one.gpus for one in found.points] == [2, 4]
    assert [(gap.gpus, gap.skipped) for gap in found.gaps] == [(8, False)]
    assert study.skipped == ()


@pytest.mark.parametrize(("field", "values"), [("precision", ("bf16", "fp32")), ("node_size", (2, None))])
def test_unlike_settings_are_separate_curves_that_name_the_difference(planted, field, values) -> None:
    for one in values:
        planted.points("ddp", {2: 10.0}, **{field: one})
    study = planted.analysed()
    settings = [study.settings[one.key.setting] for one in study.curves]
    assert sorted(settings) == [f"{field}={'none' if one is None else one}" for one in values]


def test_failed_and_skipped_sizes_are_gaps_with_reasons(small) -> None:
    gaps = curve(small.analysed(), "weak", "ddp").gaps
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
    times = ratio.times(factor)
    assert times.value == pytest.approx(ratio.value * factor)
    if ratio.low is not None:
        assert times.low is not None
        assert times.low / times.value == pytest.approx(ratio.low / ratio.value)
