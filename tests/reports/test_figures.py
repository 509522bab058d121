"""Cell figures, worked out by hand from the planted rank records (`small` in conftest)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reports.analysis.budget import budget
from reports.analysis.figures import CellFigures, share_of_runs
from reports.analysis.headline import on_less_off
from reports.analysis.study import StudyFigures
from results.outcome import Evidence
from results.record import Proof


def figures_of(study: StudyFigures, strategy: str, gpus: int, micro_batch: int) -> CellFigures:
    [found] = [
        one
        for one in study.cells.values()
        if (one.cell.strategy, one.cell.gpus, one.cell.micro_batch) == (strategy, gpus, micro_batch)
    ]
    return found


@pytest.fixture
def analysed(small) -> StudyFigures:
    return small.analysed()


def test_step_time_is_the_mean_of_the_runs_by_the_slowest_rank(analysed) -> None:
    # Runs of 12.0, 12.5 and 13.0 ms on rank 0; rank 1 is 10 % faster and does not count.
    step = figures_of(analysed, "ddp", 2, 8).step_ns
    assert step.value == pytest.approx(12.5e6)
    assert (step.low, step.high) == pytest.approx((12.0e6, 13.0e6))
    assert (step.samples, step.interval) == (3, "range")


def test_throughput_is_total_work_over_total_time(analysed) -> None:
    figures = figures_of(analysed, "ddp", 4, 8)
    # 4 x 8 images in 16 ms: 2,000 a second. The mean of the runs' rates, (2286 + 2000 + 1778) / 3 = 2021,
    # would overstate it.
    assert figures.units_per_s.value == pytest.approx(2000)
    assert figures.units_per_s.unit == "images/s"
    # 32 / 18 ms and 32 / 14 ms: the ends change places.
    assert figures.units_per_s.low == pytest.approx(1777.78, abs=0.01)
    assert figures.units_per_s.high == pytest.approx(2285.71, abs=0.01)
    assert figures.samples_per_s.value == pytest.approx(2000)


def test_throughput_counts_the_workloads_own_units(planted) -> None:
    cell = planted.points("single", {1: 20}, batch=4, units_per_sample=64, unit="tokens")[0]
    figures = planted.analysed().cells[cell.id]
    # 4 samples of 64 tokens in 20 ms: 12,800 tokens a second, 200 samples a second.
    assert (figures.units_per_s.value, figures.units_per_s.unit) == (pytest.approx(12_800), "tokens/s")
    assert figures.samples_per_s.value == pytest.approx(200)


def test_phases_are_means_over_ranks_and_runs_and_the_rest_is_other(analysed) -> None:
    # Ranks at 12.5 and 11.25 ms on the mean of the runs: 11.875 ms; half of it backward.
    # Named phases are 95 %: 11.28125 ms; other = 12.5 - 11.28125.
    phases = figures_of(analysed, "ddp", 2, 8).phase_ns
    assert phases["data"] == pytest.approx(0.59375e6)
    assert phases["forward"] == pytest.approx(3.5625e6)
    assert phases["backward"] == pytest.approx(5.9375e6)
    assert phases["optimizer"] == pytest.approx(1.1875e6)
    assert phases["other"] == pytest.approx(1.21875e6)


def test_exposed_communication_is_on_minus_off_over_two_blocks(analysed) -> None:
    # Quads of 2 steps: the middle run has on = 25 ms and off = 20 ms, twice each:
    # (25 + 25 - 20 - 20) / (2 x 2) = 2.5 ms, and so in all runs; of 12.5 ms that is 20 %.
    figures = figures_of(analysed, "ddp", 2, 8)
    assert figures.exposed_ns.value == pytest.approx(2.5e6)
    assert figures.exposed_share.value == pytest.approx(0.20)
    # 2.5 / 13 and 2.5 / 12.
    assert figures.exposed_share.low == pytest.approx(0.19231, abs=1e-5)
    assert figures.exposed_share.high == pytest.approx(0.20833, abs=1e-5)


def test_copies_of_steps_without_exchange_widen_what_it_adds_over_all_runs(planted, new_timing) -> None:
    cell = planted.series("weak", "ddp", [2], batch=4)[0]
    for exposed_ms, copies_ms in ((2, 0.5), (4, 1.5)):
        planted.run(cell, new_timing(step_ms=20, exposed_ms=exposed_ms, copies_ms=copies_ms))
    figures = planted.analysed().cells[cell.id]
    # 2 and 4 ms with the copies, which take 1 ms in the mean: up to 5 ms without them, a quarter of the step.
    exposed, share = figures.exposed_ns, figures.exposed_share
    assert (exposed.value, exposed.low, exposed.high) == pytest.approx((3e6, 2e6, 5e6))
    assert (share.value, share.low, share.high) == pytest.approx((0.15, 0.1, 0.25))
    found = budget(figures)
    assert (found.transfer_ns.value, found.transfer_ns.high) == pytest.approx((3e6, 5e6))
    assert found.copies_ns == pytest.approx(1e6)
    row: Any = SimpleNamespace(figures=figures)
    assert on_less_off(row).text == "15.0 % (10.0 to 25.0)"


def test_one_device_exchanges_nothing_and_says_so(analysed) -> None:
    figures = figures_of(analysed, "single", 1, 8)
    assert figures.exposed_ns is None
    assert figures.exposed_absent == "nothing is exchanged"


def test_a_run_without_quads_leaves_the_exposed_time_unknown_with_its_reason(planted, new_timing) -> None:
    cell = planted.series("weak", "ddp", [2], batch=4)[0]
    planted.run(cell, new_timing(step_ms=20, exposed_ms=2))
    planted.run(cell, new_timing(step_ms=20))
    figures = planted.analysed().cells[cell.id]
    assert figures.exposed_ns is None
    assert figures.exposed_absent == "quads were turned off"


def test_the_strongest_proof_of_the_runs_is_named(planted, new_timing) -> None:
    cell = planted.series("weak", "single", [1], batch=4)[0]
    for method in ("earlier-run", "sampled-gradients", "replica-agreement"):
        planted.run(cell, new_timing(step_ms=20, proof=Proof(method=method, passed=True, detail="as said")))
    figures = planted.analysed().cells[cell.id]
    assert figures.proof_method == "sampled-gradients"


def test_runs_of_two_environments_are_not_pooled_and_the_difference_is_named(
    planted, new_timing, new_environment
) -> None:
    cell = planted.series("weak", "single", [1], batch=4)[0]
    old = new_environment(torch="2.12.0")
    planted.run(cell, new_timing(step_ms=30, environment=old))
    planted.run(cell, new_timing(step_ms=20))
    planted.run(cell, new_timing(step_ms=22))
    study = planted.analysed()
    assert study.cells[cell.id].step_ns.value == pytest.approx(21e6)
    assert [left.reason for left in study.left_out] == ["torch: 2.12.0 here, 2.13.0 in the runs that count"]


def test_runs_over_another_class_of_process_group_are_not_pooled(
    planted, new_timing, new_environment
) -> None:
    cell = planted.series("weak", "ddp", [2], batch=4)[0]
    for step_ms, group in [(50, "ProcessGroupNCCL"), (20, ""), (22, "ProcessGroupNCCL2")]:
        planted.run(cell, new_timing(step_ms=step_ms, environment=new_environment(process_group=group)))
    study = planted.analysed()
    assert study.cells[cell.id].step_ns.value == pytest.approx(21e6)
    assert [left.reason for left in study.left_out] == [
        "process_group: ProcessGroupNCCL here, ProcessGroupNCCL2 in the runs that count"
    ]


def test_runs_of_other_settings_are_not_pooled_and_those_of_unknown_ones_are(
    planted, new_timing, new_environment
) -> None:
    cell = planted.series("weak", "single", [1], batch=4)[0]
    for step_ms, settings in [(50, {}), (20, None), (22, {"ATEN_CPU_CAPABILITY": "default"})]:
        planted.run(cell, new_timing(step_ms=step_ms, environment=new_environment(settings=settings)))
    study = planted.analysed()
    assert study.cells[cell.id].step_ns.value == pytest.approx(21e6)
    assert [left.reason for left in study.left_out] == [
        "settings: none here, ATEN_CPU_CAPABILITY=default in the runs that count"
    ]


def test_a_newer_environment_whose_runs_failed_does_not_take_over(
    planted, new_timing, new_environment
) -> None:
    cell = planted.points("single", {1: 20}, batch=4)[0]
    broken = new_environment(torch="2.14.0")
    planted.run(cell, new_timing(step_ms=1, environment=broken, outcome="crashed", reason="no kernel"))
    study = planted.analysed(name="broken")
    assert study.cells[cell.id].step_ns.value == pytest.approx(20e6)
    assert [run.reason for _, run in study.lost] == ["rank 0: no kernel"]


def test_measured_and_emulated_runs_are_not_pooled(planted, new_timing) -> None:
    cell = planted.series("weak", "single", [1], batch=4)[0]
    planted.run(cell, new_timing(step_ms=20))
    planted.run(cell, new_timing(step_ms=40, evidence=Evidence.EMULATED))
    study = planted.analysed(name="mixed")
    assert study.cells[cell.id].evidence is Evidence.MEASURED
    assert study.cells[cell.id].step_ns.value == pytest.approx(20e6)
    assert [left.reason for left in study.left_out] == ["emulated, while the runs that count are measured"]


def test_a_share_from_six_runs_has_the_interval_of_a_ratio_estimator() -> None:
    # Wholes of 10, parts 1 2 3 1 2 3: share 0.2; residuals -0.1 0 0.1 twice, of which the deviation is
    # sqrt(0.04 / 5) = 0.0894; half-width t(5) x 0.0894 / sqrt(6) = 2.5706 x 0.036515 = 0.09386.
    share = share_of_runs([1, 2, 3, 1, 2, 3], [10] * 6)
    assert share.value == pytest.approx(0.2)
    assert share.low == pytest.approx(0.10614, abs=1e-5)
    assert share.high == pytest.approx(0.29386, abs=1e-5)
    assert share.interval == "t95-runs"
