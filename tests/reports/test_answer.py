"""The answer for a workload in a sentence: what to use, its speed-up, and how the others compare."""

from __future__ import annotations

from generated_study import large_study

from reports.analysis.size_to_buy import CPU
from reports.analysis.verdict.verdict import verdict
from results.outcome import Evidence


def answered(study) -> str:
    [found] = verdict(study).workloads
    return found.answer


def test_the_speed_up_is_named_and_what_the_others_reach_with_the_reason(planted) -> None:
    single = planted.series("weak", "single", [1], batch=8)
    ddp = planted.series("weak", "ddp", [2], batch=8)
    powersgd = planted.series("weak", "ddp", [2], batch=8, compression="powersgd:4")
    fsdp = planted.series("weak", "fsdp", [2], batch=8)
    planted.plan()
    # Twice the samples in 1.1 times the time: 20 / 11.
    for [cell], steps in (
        (single, [100.0, 100.2, 99.8]),
        (ddp, [110.0, 110.2, 109.8]),
        (powersgd, [100.0, 120.0, 105.0]),
        (fsdp, [220.0, 220.2, 219.8]),
    ):
        planted.runs(cell, steps)
    study = planted.analysed()
    told = answered(study)
    assert told.startswith("ddp on 2 ranks (CPU) trains 1.82 times as fast as one device; ")
    assert "not shown to be faster or slower: ddp + powersgd:4 (1.85, " in told
    assert "slower: fsdp, 50.0 % of its rate" in told
    [size] = verdict(study).workloads[0].to_buy
    assert size.absent == CPU


def test_two_sizes_of_weak_and_strong_scaling_are_weighed_in_time_and_money() -> None:
    first, trade = answered(large_study(seed=7)).rstrip(".").split(" of resamples")[1].split(". 8 GPUs ")
    assert "going from 8 to 16 changes throughput by" in first
    assert "if its loss is as good, ddp + powersgd:4, which compresses its gradients, pays up to 256" in first
    assert "for an epoch at a global batch of 64; 128 GPUs take" in trade
    assert "% dearer, if the larger batch trains as well" in trade


def test_a_study_of_stand_ins_has_no_answer(planted) -> None:
    [cell] = planted.series("weak", "ddp", [2], batch=8)
    planted.plan()
    planted.runs(cell, [10.0, 10.1], evidence=Evidence.EMULATED)
    assert answered(planted.analysed()) is None


def test_where_no_growth_pays_the_single_device_is_named_with_the_growth(new_study, tmp_path) -> None:
    planted = new_study(tmp_path / "study", device="cuda")
    [single] = planted.series("weak", "single", [1], batch=8)
    ddp = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    for cell, ms in zip((single, *ddp), (10.0, 19.0, 38.0), strict=True):
        planted.runs(cell, [ms, 1.001 * ms, 0.999 * ms])
    told = answered(planted.analysed())
    assert told.startswith("single on 1 GPU has ")
    assert "the size to buy in 100 % of resamples: going from 1 to 2 changes throughput by +5 %" in told
