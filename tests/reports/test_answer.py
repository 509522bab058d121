"""The answer for a workload in a sentence: what to use, its speed-up, and how the others compare."""

from __future__ import annotations

import pytest
from generated_study import large_study

from reports.analysis.size_to_buy import CPU
from reports.analysis.verdict.verdict import verdict
from reports.page.section import Table
from reports.page.sections.best import best_section
from results.outcome import Evidence, Outcome
from results.record import Training
from strategies.catalog import STRATEGIES

DILOCO = "local-sgd:4:outer=nesterov"
ALONE = Training(differences=("averages with its neighbours",), averages_all_gradients=False)


def answered(study) -> str:
    [found] = verdict(study).workloads
    return " ".join((found.answer, *found.beside)).strip()


def test_the_speed_up_is_named_and_what_the_others_reach_with_the_reason(planted) -> None:
    single = planted.series("weak", "single", [1], batch=8)
    ddp = planted.series("weak", "ddp", [2], batch=8)
    powersgd = planted.series("weak", "ddp", [2], batch=8, compression="powersgd:4")
    fsdp = planted.series("weak", "fsdp", [2], batch=8)
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
    assert told.startswith("ddp on 2 ranks (CPU) trains 1.82 times (1.81 to 1.83) as fast as one device. ")
    assert "Not shown to be faster or slower: ddp + powersgd:4 (1.85, " in told
    assert "Slower: fsdp, 50.0 % of its rate" in told
    [size] = verdict(study).workloads[0].to_buy
    assert size.absent == CPU


def test_a_speed_up_whose_interval_has_1_is_not_shown(planted) -> None:
    planted.points("single", {1: [100.0, 130.0, 100.0]})
    planted.points("ddp", {2: [180.0, 205.0, 190.0]})
    assert answered(planted.analysed()).startswith("ddp on 2 ranks (CPU) is not shown to be faster than one ")


def test_two_sizes_of_weak_and_strong_scaling_are_weighed_in_time_and_money() -> None:
    first, trade = answered(large_study(seed=7)).split(" For an epoch 8 GPUs take ")
    assert "going from 8 to 16 changes throughput by" in first
    assert " at a global batch of 64, and 128 GPUs take" in trade
    assert "% dearer, if the larger batch trains as well" in trade


def test_what_trains_otherwise_and_pays_is_the_second_choice_with_its_condition(new_study, tmp_path) -> None:
    # It pays up to 256, where the named strategy does not.
    larger = answered(large_study(seed=7))
    assert (
        "Second choice, if its loss is as good: ddp + powersgd:4, which compresses its gradients, has 77.3 % "
        "on 256, where ddp has 32.1 %" in larger
    )
    # On as many devices: 40 / 22 and 40 / 30 on 4.
    planted = new_study(tmp_path / "study", device="cuda")
    planted.points("single", {1: [10.0, 10.01, 9.99]})
    for compression, steps in (("none", (10.5, 14.0)), ("bf16", (10.2, 11.0))):
        sizes = {gpus: [ms, 1.001 * ms, 0.999 * ms] for gpus, ms in zip((2, 4), steps, strict=True)}
        planted.points("ddp", sizes, compression=compression)
    told = answered(planted.analysed())
    assert (
        "econd choice, if its loss is as good: ddp + bf16, which compresses its gradients, has 90.9 %" in told
    )


@pytest.mark.parametrize(
    ("axes", "clause"),
    [
        ({"strategy": "local-sgd:4"}, "It averages every 4 steps: "),
        (
            {"strategy": DILOCO, "training": Training(differences=STRATEGIES.facts(DILOCO).differences)},
            "It averages every 4 steps and takes an outer step at each average (lr 0.7, momentum 0.9): ",
        ),
        ({"strategy": "ddp", "compression": "topk:0.01"}, "It compresses its gradients: "),
        ({"strategy": "fsdp:params=bf16"}, "It gathers parameters in bf16: "),
        ({"strategy": "gossip", "training": ALONE}, "It averages with its neighbours: "),
        ({"strategy": "ddp", "collective": "ring"}, ""),
    ],
)
def test_a_fastest_that_trains_otherwise_says_so_and_has_the_plain_one_beside_it(
    planted, axes, clause
) -> None:
    timing = {"input_ms": 0.0, "off_step_ns": lambda rank: [10_000_000] * 4}
    planted.points("single", {1: [10.0] * 3}, input_ms=0.0)
    planted.points("ddp", {2: [25.0, 25.01, 24.99]}, **timing)
    planted.points(axes.pop("strategy"), {2: [12.0, 12.01, 11.99]}, **timing, **axes)
    told = answered(planted.analysed())
    assert clause in told
    assert ("compare its loss too" in told) is bool(clause)
    # 12 / 25.
    assert "lower: ddp, 48.0 % of its rate, because its exchange is not hidden" in told


def test_a_size_that_rests_on_a_hole_is_named_so_far(new_study, new_timing, tmp_path) -> None:
    planted = new_study(tmp_path / "study", device="cuda")
    planted.points("single", {1: [10.0, 10.01, 9.99]})
    planted.points("ddp", {2: [10.2, 10.21, 10.19]})
    planted.points("ddp", {4: 1.0}, outcome=Outcome.CRASHED)
    told = answered(planted.analysed())
    assert "the size to buy so far (2 to 4 GPUs; ddp on 4 has no figure)" in told
    assert "100 %" not in told


def test_a_study_of_stand_ins_has_no_answer(planted) -> None:
    [cell] = planted.series("weak", "ddp", [2], batch=8)
    planted.runs(cell, [10.0, 10.1], evidence=Evidence.EMULATED)
    assert answered(planted.analysed()) == ""


def test_where_no_growth_pays_the_single_device_is_named_with_the_growth(new_study, tmp_path) -> None:
    planted = new_study(tmp_path / "study", device="cuda")
    [single] = planted.series("weak", "single", [1], batch=8)
    ddp = planted.series("weak", "ddp", [2, 4], batch=8)
    for cell, ms in zip((single, *ddp), (10.0, 19.0, 38.0), strict=True):
        planted.runs(cell, [ms, 1.001 * ms, 0.999 * ms])
    told = answered(planted.analysed())
    assert told.startswith("single on 1 GPU has ")
    assert "the size to buy in 100 % of resamples: going from 1 to 2 changes throughput by +5 %" in told


def test_without_a_baseline_the_others_have_their_rate_of_the_fastest(planted) -> None:
    [fsdp] = planted.series("weak", "fsdp", [2], batch=8)
    [ddp] = planted.series("weak", "ddp", [2], batch=8)
    planted.runs(fsdp, [100.0, 100.2, 99.8])
    planted.runs(ddp, [100.0, 120.0, 110.0])
    told = answered(planted.analysed())
    assert told.startswith("fsdp on 2 ranks (CPU) has ")
    assert "Not shown to be faster or slower: ddp (90.9 % of its rate)." in told


def test_points_of_unequal_global_batches_are_not_compared(new_study, tmp_path) -> None:
    planted = new_study(tmp_path / "study", device="cuda")
    planted.points("single", {1: [10.0, 10.01, 9.99]})
    planted.points("fsdp", {2: [11.0, 11.01, 10.99], 4: [12.0, 12.01, 11.99]})
    # Its rate in samples is twice as high, at half of the samples a step.
    planted.points("fsdp:tp=2", {2: [2.5, 2.51, 2.49], 4: [3.0, 3.01, 2.99]}, model_parallel=2)
    study = planted.analysed()
    told = answered(study)
    assert told.startswith("fsdp on 4 GPUs trains 3.33 times ")
    assert (
        "ot comparable, because a step trains on another number of samples than 32: fsdp:tp=2 (16); " in told
    )
    assert (
        "econd choice, if its loss is as good: fsdp:tp=2, which trains on 16 samples a step instead of 32"
        in told
    )
    [bought] = verdict(study).workloads[0].to_buy
    assert bought.choice is not None
    assert bought.choice.strategy == "fsdp"
    [table] = [block for block in best_section(study).blocks if isinstance(block, Table)]
    assert "fsdp:tp=2" not in str(table)
