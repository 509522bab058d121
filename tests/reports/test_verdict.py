"""The verdict: sentences made from data, and the facts that they state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from harness.reporting.report import print_verdict
from harness.terminal.console import Console
from reports.analysis.verdict.scalability import LostPart
from reports.analysis.verdict.sentences import cause, scaling_sentences
from reports.analysis.verdict.verdict import NOTHING, StudyVerdict, verdict
from reports.text import listed
from results.outcome import Evidence, Outcome
from results.run import RunResult

MS = 1_000_000


def said(planted) -> tuple[str, ...]:
    return verdict(planted.analysed()).sentences


def steps(rank_ms: Sequence[float]) -> Callable[[int], list[int]]:
    """Four steps a rank without exchange, all of one length."""
    return lambda rank: [round(rank_ms[rank] * MS)] * 4


@pytest.fixture
def pair(planted) -> Callable[..., object]:
    """Weak, single on 1 with 10 ms and 0.5 ms of input, and ddp on 2 and 4 with budgets."""

    def made(*, step_ms: tuple[float, float], slowest_ms: float = 9.5):
        planted.points("single", {1: 10.0}, input_ms=0.5)
        # Ranks in pairs: half of them are slower, so that none is above the median by much.
        own = steps([slowest_ms if rank % 2 else 9.5 for rank in range(4)])
        planted.points("ddp", dict(zip((2, 4), step_ms, strict=True)), input_ms=0.5, off_step_ns=own)
        planted.plan(repeats=1)
        return planted

    return made


def test_a_study_that_scales_says_so_and_blames_nothing(pair) -> None:
    # 10 / 10.2 of a step; lost 0.7 of 10.2 against the 9.5 ms of computation: 0.5 input, 0.2 transfer.
    # 32 samples in 10.2 ms are 3,137 a second.
    assert said(pair(step_ms=(10.1, 10.2))) == (
        "Weak scaling, batch 8 per replica: ddp on 4 ranks (CPU) seems the fastest (1 run) with 3,137 "
        "images/s, an efficiency of 98.0 % against single on 1.",
        "No knee seen up to 4 (single runs); at 4 little is lost, 6.9 % of a step.",
        "Made from 3 runs.",
        "Not in this verdict: cost, for want of a price.",
    )


def test_a_cell_that_waits_for_its_data_is_bound_by_its_input(planted) -> None:
    # 4 ms of 10, and 1 ms of 10; 0.9 ms would not be said.
    planted.points("single", {1: 10.0}, input_ms=4.0)
    planted.points("ddp", {2: 10.0}, input_ms=1.0, off_step_ns=steps([9.0, 9.0]))
    planted.plan(repeats=1)
    [sentence] = [one for one in said(planted) if "input:" in one]
    assert sentence.startswith(
        "Bound by its input: single on 1 rank (CPU) waits for data for 40.0 % of a step, "
    )
    assert "and 1 other cell for a tenth or more" in sentence


def test_beyond_a_knee_it_names_what_takes_the_time(pair) -> None:
    # 2 (10 / 10) - 1 = 1 and 2 (10 / 20) - 1 = 0. On 4: 20 - 9.5 lost, 20 - 0.5 - 9.5 of it transfer.
    # 2 and 4 have the same throughput.
    found = verdict(pair(step_ms=(10.0, 20.0)).analysed())
    assert "; no difference is shown to ddp on 4;" in found.sentences[0]
    assert found.sentences[1] == (
        "Knee between 2 and 4: going from 2 to 4 changes throughput by +0 % (100 % would be ideal); at 4 a "
        "step loses 52.5 % of its time against single on 1, most of it to exposed transfer (10.0 ms)."
    )
    [weak] = found.workloads[0].scalings
    assert (weak.largest.knee, weak.largest.beyond) == (2, 4)
    dominant = weak.largest.dominant
    assert (dominant.part, dominant.gpus) == ("transfer", 4)
    assert dominant.part_ns == pytest.approx(10 * MS)
    assert dominant.lost_ns == pytest.approx(10.5 * MS)
    assert dominant.lost_share == pytest.approx(10.5 / 20)
    # Plain data parallelism is what it is about already.
    assert weak.dense is None


def test_the_largest_part_of_several_is_not_called_most(pair) -> None:
    # Slower ranks of 12.5: compute 11 (1.5 lost), wait 1.5; transfer 16 - 0.5 - 12.5 = 3 of 6.5 lost.
    sentence = said(pair(step_ms=(16.0, 16.0), slowest_ms=12.5))[1]
    assert "at 2 a step loses 40.6 % of its time" in sentence
    assert "the largest part of it to exposed transfer (3.00 ms)" in sentence


def test_a_cause_that_is_not_told_apart_from_another_is_named_with_it_and_their_ranges(pair) -> None:
    study = pair(step_ms=(16.0, 16.0), slowest_ms=12.5).analysed()
    [weak] = verdict(study).workloads[0].scalings
    assert weak.largest.dominant is not None
    rivals = (
        LostPart(part="transfer", ns=3.0 * MS, low_ns=2.0 * MS, high_ns=4.0 * MS),
        LostPart(part="compute", ns=2.9 * MS, low_ns=2.5 * MS, high_ns=3.3 * MS),
    )
    dominant = replace(weak.largest.dominant, contenders=rivals)
    told = list(scaling_sentences(replace(weak, largest=replace(weak.largest, dominant=dominant))))[1]
    assert told.endswith(
        ": exposed transfer (3.00 ms, 2.00 ms to 4.00 ms) and computation that is slower than the baseline's "
        "(2.90 ms, 2.50 ms to 3.30 ms)."
    )


def test_an_efficiency_narrower_than_its_interval_blames_nothing(pair) -> None:
    [weak] = verdict(pair(step_ms=(16.0, 16.0), slowest_ms=12.5).analysed()).workloads[0].scalings
    one = weak.largest.configuration
    wide = msgspec.structs.replace(one.efficiency, value=0.9, low=0.1, high=3.4)
    told = cause(replace(weak.largest, configuration=replace(one, efficiency=wide)))
    assert told == "the cause of the lost time is unknown: the runs are too far apart"


def test_without_a_knee_what_is_lost_at_the_largest_size_is_blamed_from_ten_percent_on(pair) -> None:
    # (10 / 12.5) a doubling from 2 on: no knee. Lost 3 of 12.5.
    sentence = said(pair(step_ms=(10.0, 12.5)))[1]
    assert sentence.startswith("No knee seen up to 4 (single runs); at 4 a step loses 24.0 % of its time")
    assert sentence.endswith("most of it to exposed transfer (2.50 ms).")


@pytest.mark.parametrize("step_ms", [9.4, 9.504])
def test_no_loss_and_one_below_a_tenth_of_a_percent_are_reported_as_nothing(pair, step_ms) -> None:
    # The baseline computes for 9.5 ms; 9.504 - 9.5 is 0.04 %.
    sentence = said(pair(step_ms=(10.0, step_ms)))[1]
    assert "; at 4 " in sentence
    assert "lost" in sentence
    assert "%" not in sentence


@pytest.mark.parametrize(
    ("transfer_ms", "said_of_it"),
    [
        # Of a step of 20 with 0.5 of input and 9.5 of computation: without the rest of the 10 ms in any part.
        (9.2, "most of it to exposed transfer (9.20 ms)."),
        # 1.5 are 7.5 % of the step, but no half of 8.5.
        (8.5, "most of it to exposed transfer (8.50 ms)."),
        # 4 are 20 %, and more than half of 6.
        (6.0, "20.0 % less time than the timed ones: the machine changed in between."),
        # 6 too much are no half of 16.
        (16.0, "most of it to exposed transfer (16.0 ms)."),
        # 12 too much, 60 % of the step, are more than half of 22.
        (22.0, "60.0 % longer than the timed ones: the machine changed in between."),
    ],
)
def test_parts_that_miss_the_step_by_much_blame_nothing(pair, transfer_ms, said_of_it) -> None:
    planted = pair(step_ms=(10.0, 20.0))
    changed = [_with_transfer(run, transfer_ms) for run in planted.study.collect()]
    assert verdict(planted.analysed(changed)).sentences[1].endswith(said_of_it)


def _with_transfer(run: RunResult, ms: float) -> RunResult:
    if "-g004-" not in run.cell_id or run.budget is None:
        return run
    transfer = msgspec.structs.replace(run.budget.transfer_ns, value=ms * MS)
    return msgspec.structs.replace(run, budget=msgspec.structs.replace(run.budget, transfer_ns=transfer))


def test_where_the_best_two_overlap_no_difference_is_shown(planted) -> None:
    planted.points("single", {1: [10.0, 10.0, 10.0]})
    planted.points("ddp", {2: [11.0, 12.0, 13.0]})
    planted.points("scratch-ddp", {2: [12.0, 13.0, 14.0]})
    planted.plan()
    first = said(planted)[0]
    assert (
        "ddp on 2 ranks (CPU) has the highest figure with 1,333 images/s (1,231 to 1,455), an efficiency"
        in first
    )
    assert first.endswith("; no difference is shown to scratch-ddp on 2.")


def test_one_run_each_is_told_apart_by_more_than_its_noise(planted) -> None:
    for name, ms in (("ddp", 10.0), ("fsdp", 10.4), ("scratch-ddp", 10.6)):
        planted.points(name, {2: ms})
    planted.plan(repeats=1)
    # 4 % and 6 % slower.
    assert "; no difference is shown to fsdp on 2;" in said(planted)[0]


def test_the_fastest_is_not_always_the_largest(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 40.0})
    planted.plan(repeats=1)
    # 8 in 10 ms; 16 in 40 ms are half of it, a quarter for each rank.
    assert said(planted)[0] == (
        "Weak scaling, batch 8 per replica: single on 1 rank (CPU) seems the fastest (1 run) with 800 "
        "images/s; on 2, the largest size measured, ddp has an efficiency of 25.0 % against single on 1."
    )


def test_why_is_not_known_without_a_budget(small) -> None:
    sentences = said(small)
    # The sums are in test_figures and test_scaling.
    assert sentences[0] == (
        "Weak scaling, batch 8 per replica: ddp on 4 ranks (CPU) is the fastest with 2,000 images/s (1,778 "
        "to 2,286), an efficiency of 62.5 % (50.0 to 78.6) against single on 1."
    )
    # From 2 to 4 at worst 2 (12 / 18) - 1 = 0.33.
    assert sentences[1].startswith("No knee seen up to 4 ")
    assert sentences[2].startswith(
        "Strong scaling, global batch 32: ddp on 4 ranks (CPU) is the fastest with "
    )
    assert sentences[-1] == (
        "Not in this verdict: failed: ddp on 8 (out of memory); cost, for want of a price."
    )
    assert len(sentences) <= 7


def test_emulated_figures_make_no_claim(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 10.0}, evidence=Evidence.EMULATED)
    planted.plan(repeats=1)
    first, last = said(planted)
    assert first.startswith("Weak scaling, batch 8 per replica: every figure is emulated")
    assert last == "Not in this verdict: emulated: ddp on 2 and 4; cost, for want of a price."


def test_an_emulated_size_is_neither_the_fastest_nor_the_largest(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 12.5})
    planted.points("ddp", {8: 1.0}, evidence=Evidence.EMULATED)
    planted.plan(repeats=1)
    sentences = said(planted)
    assert "ddp on 4 ranks (CPU) seems the fastest (1 run)" in sentences[0]
    assert "80.0 % against ddp on 2" in sentences[0]
    assert sentences[-1].startswith("Not in this verdict: emulated: ddp on 8;")


def test_one_size_says_nothing_of_scaling(planted) -> None:
    planted.points("ddp", {2: 10.0})
    planted.plan(repeats=1)
    assert "one size" in said(planted)[0]
    assert "efficiency" not in said(planted)[0]


def test_the_verdict_covers_the_batch_with_most_sizes(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 10.0})
    planted.points("ddp", {2: 10.0}, batch=64)
    planted.plan(repeats=1)
    sentences = said(planted)
    assert sentences[0].startswith("Weak scaling, batch 8 per replica:")
    assert "another batch, setting or link (see the curves)" in sentences[-1]


def test_the_verdict_names_unmeasured_points(planted, new_timing) -> None:
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2, 4, 8], batch=8)
    planted.skip("ddp", 1, "ddp needs at least 2", batch=8)
    planted.skip("single", 2, "single is for one device", batch=8)
    for gpus in (16, 32):
        planted.skip("ddp", gpus, "2 devices here", batch=8)
    planted.skip("fsdp", 4, "2 devices here", batch=8)
    # Neither is missed: what the user left out, and what has nothing to compress.
    planted.skip("ddp", 8, "excluded by the study file: strategy ddp", batch=8, compression="topk:0.01")
    planted.skip("ddp", 4, "not wanted", batch=8, compression="int8", rule="excluded")
    # But this one is: its rule says so, whatever its words are.
    planted.skip("fsdp", 8, "excluded by the study file's host", batch=8, rule="machine")
    planted.skip("single", 1, "single exchanges nothing", batch=8, compression="topk:0.01")
    planted.plan(repeats=1)
    planted.run(single, new_timing(step_ms=10.0, proof=None))
    planted.run(ddp[0], new_timing(step_ms=10.0, foreign_cpu_cores=1.0))
    planted.run(ddp[1], new_timing(step_ms=1.0, outcome=Outcome.CRASHED, reason="segmentation fault"))
    # What ddp would be on 1 is what the single device measured, and single on 2 is nothing: no loss.
    assert said(planted)[-1] == (
        "Not in this verdict: failed: ddp on 4 (crashed); not run yet: ddp on 8; skipped: ddp on 16 and 32, "
        "fsdp on 4 and 8; 1 of 2 cells without a check that it trained; cost, for want of a price."
    )


def test_super_linear_points_are_named_once(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 8.0})
    planted.plan(repeats=1)
    assert "Super-linear, and so worth a second look: ddp on 2." in said(planted)


def test_compression_is_a_clause_where_it_was_studied(planted) -> None:
    planted.points("ddp", {2: [10.0, 10.0, 10.0]})
    planted.points("ddp", {2: [20.0, 20.0, 20.0]}, compression="topk:0.01")
    planted.plan()
    assert any("faster than the dense exchange: none" in sentence for sentence in said(planted))


def test_sentences_of_several_workloads_begin_with_its_name(planted) -> None:
    for workload in ("gpt-nano", "resnet8"):
        planted.points("single", {1: 10.0}, workload=workload)
    planted.plan(repeats=1)
    found = verdict(planted.analysed())
    assert [one.workload for one in found.workloads] == ["gpt-nano", "resnet8"]
    assert found.sentences[0].startswith("gpt-nano: Weak scaling")


def test_when_nothing_succeeded_it_says_where_the_reasons_are(planted) -> None:
    planted.series("weak", "ddp", [2], batch=8)
    planted.plan()
    told = verdict(planted.analysed())
    assert told == StudyVerdict(workloads=(), next_run=told.next_run)
    assert said(planted) == (NOTHING,)


def test_the_verdict_is_data(pair) -> None:
    found = msgspec.json.decode(msgspec.json.encode(verdict(pair(step_ms=(10.0, 20.0)).analysed())))
    [weak] = found["workloads"][0]["scalings"]
    assert weak["fastest"]["strategy"] == "ddp"
    assert weak["largest"]["dominant"]["part"] == "transfer"
    assert found["workloads"][0]["made_from"]["cell_runs"] == [[1, 1]] * 3


def test_the_terminal_shows_it_in_few_lines_with_the_next_run(pair, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_verdict(pair(step_ms=(10.1, 10.2)).analysed(), Console())
    assert capsys.readouterr().out.splitlines() == [
        "",
        "ddp on 4 ranks (CPU) trains 3.92 times as fast as one device.",
        "weak  ddp on 4, 3,137 images/s, 98.0 %; no knee seen up to 4 (single runs)",
        "runs  3, none disturbed",
        "No size to buy is named, because ranks on CPU share the cores of a machine.",
        "next: 6 runs each of ddp on 2 and 4, since the answer rests on 1 run a size:",
        "  bench matrix --name planted --workload gpt-nano --strategy ddp --gpus 2,4 \\",
        "      --batch-size 8 --repeats 6 --device cpu",
        "",
    ]


def test_what_has_no_figure_is_told_by_kind_and_workload_with_its_output(planted, new_timing, capsys) -> None:
    [cell, _] = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.series("weak", "ddp", [2], batch=8, workload="mlp")
    planted.plan()
    planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    print_verdict(planted.analysed(), Console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "without a figure: 3 of 3 cells: 2 not run (gpt-nano and mlp), 1 crashed (gpt-nano)"
    assert lines[2] == f"  bench logs planted --cell {cell.id}"
    assert lines[3].startswith("next: ddp on 2, since it was planned and not run:")


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c", "d"], "a, b, c and d"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
    ],
)
def test_lists_are_short(items, text) -> None:
    assert listed(items) == text
