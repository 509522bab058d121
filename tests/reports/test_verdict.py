"""The verdict: records made from data, and the facts that they state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from harness.reporting.report import print_verdict
from harness.terminal.console import Console
from reports.analysis.verdict.verdict import NOTHING, Reach, StudyVerdict, verdict
from results.outcome import Evidence, Outcome
from results.run import RunResult

MS = 1_000_000


def told(planted) -> dict[str, str]:
    """The records of the only workload: the text of each, by what it is about."""
    [found] = verdict(planted.analysed()).workloads
    return {record.what: record.told for record in found.records}


def reached(planted) -> Reach:
    [found] = verdict(planted.analysed()).workloads[0].reaches
    return found


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
    found = reached(pair(step_ms=(10.1, 10.2)))
    assert (found.strategy, found.gpus, found.knee, found.lost_to) == ("ddp", 4, None, None)
    assert found.efficiency.value == pytest.approx(10 / 10.2)
    assert found.lost_share == pytest.approx(0.7 / 10.2)
    assert found.cause.startswith("little: ")


def test_a_cell_that_waits_for_its_data_is_bound_by_its_input(planted) -> None:
    # 4 ms of 10, and 1 ms of 10; 0.9 ms would not be said.
    planted.points("single", {1: 10.0}, input_ms=4.0)
    planted.points("ddp", {2: 10.0}, input_ms=1.0, off_step_ns=steps([9.0, 9.0]))
    said = told(planted)["input"]
    assert said.startswith("single on 1 rank (CPU) waits for data for 40.0 % of a step")
    assert "1 other cell" in said


def test_beyond_a_knee_it_names_what_takes_the_time(pair) -> None:
    # 2 (10 / 10) - 1 = 1 and 2 (10 / 20) - 1 = 0. On 4: 20 - 9.5 lost, 20 - 0.5 - 9.5 of it transfer.
    planted = pair(step_ms=(10.0, 20.0))
    found = reached(planted)
    assert (found.knee, found.lost_to, found.lost_gpus) == (2, "transfer", 4)
    assert found.lost_share == pytest.approx(10.5 / 20)
    said = told(planted)
    assert "knee between 2 and 4: going from 2 to 4 changes throughput by +0 %" in said["weak, batch 8"]
    assert said["time lost, weak"].endswith("against single on 1, most of it exposed transfer (10.0 ms)")


def test_the_largest_part_of_several_is_not_called_most(pair) -> None:
    # Slower ranks of 12.5: compute 11 (1.5 lost), wait 1.5; transfer 16 - 0.5 - 12.5 = 3 of 6.5 lost.
    found = reached(pair(step_ms=(16.0, 16.0), slowest_ms=12.5))
    assert found.lost_share == pytest.approx(6.5 / 16)
    assert found.cause.endswith("the largest part of it exposed transfer (3.00 ms)")


def test_a_cause_that_is_not_told_apart_from_another_is_named_with_it_and_their_ranges(planted) -> None:
    planted.points("single", {1: [10.0] * 3}, input_ms=0.5)
    # 14 - 9.5 of computation; 20, 26 and 17 less 0.5 and 14 are transfer.
    planted.points("ddp", {2: [20.0, 26.0, 17.0]}, input_ms=0.5, off_step_ns=steps([14.0, 14.0]))
    found = reached(planted)
    assert found.lost_to == "transfer"
    assert "exposed transfer (6.50 ms, 2.50 ms to 11.5 ms); slower computation (4.50 ms" in found.cause


def test_an_efficiency_narrower_than_its_interval_blames_nothing(planted) -> None:
    planted.points("single", {1: [10.0] * 2}, input_ms=0.5)
    planted.points("ddp", {2: [3.0, 70.0]}, input_ms=0.5, off_step_ns=steps([9.5, 9.5]))
    assert (reached(planted).lost_to, "too far apart" in reached(planted).cause) == (None, True)


@pytest.mark.parametrize("step_ms", [9.4, 9.504])
def test_no_loss_and_one_below_a_tenth_of_a_percent_are_zero(pair, step_ms) -> None:
    # The baseline computes for 9.5 ms; 9.504 - 9.5 is 0.04 %.
    assert reached(pair(step_ms=(10.0, step_ms))).cause == "little: 0.0 % of a step on 4"


@pytest.mark.parametrize(
    ("transfer_ms", "said_of_it"),
    [
        # Of a step of 20 with 0.5 of input and 9.5 of computation: without the rest of the 10 ms in any part.
        (9.2, "most of it exposed transfer (9.20 ms)"),
        # 1.5 are 7.5 % of the step, but no half of 8.5.
        (8.5, "most of it exposed transfer (8.50 ms)"),
        # 4 are 20 %, and more than half of 6.
        (6.0, "20.0 % less time than the timed ones: the machine changed in between"),
        # 6 too much are no half of 16.
        (16.0, "most of it exposed transfer (16.0 ms)"),
        # 12 too much, 60 % of the step, are more than half of 22.
        (22.0, "60.0 % longer than the timed ones: the machine changed in between"),
    ],
)
def test_parts_that_miss_the_step_by_much_blame_nothing(pair, transfer_ms, said_of_it) -> None:
    planted = pair(step_ms=(10.0, 20.0))
    changed = [_with_transfer(run, transfer_ms) for run in planted.study.collect()]
    [found] = verdict(planted.analysed(changed)).workloads[0].reaches
    assert found.cause.endswith(said_of_it)
    assert (found.lost_to is None) is ("the cause is unknown" in found.cause)


def _with_transfer(run: RunResult, ms: float) -> RunResult:
    if "-g004-" not in run.cell_id or run.budget is None:
        return run
    transfer = msgspec.structs.replace(run.budget.transfer_ns, value=ms * MS)
    return msgspec.structs.replace(run, budget=msgspec.structs.replace(run.budget, transfer_ns=transfer))


def test_what_the_loss_goes_to_is_not_known_without_a_budget(small) -> None:
    said = told(small)
    assert said["weak, batch 8"].startswith(
        "ddp on 4, efficiency 62.5 % (50.0 to 78.6) against single on 1; no"
    )
    assert said["time lost, weak"].startswith("unknown: ")
    assert "strong, batch 32" in said
    assert said["not in this verdict"] == "out of memory: ddp on 8"


def test_the_computation_of_a_compressor_is_called_what_it_is(planted) -> None:
    planted.points("single", {1: 10.0}, input_ms=0.0)
    off = {"off_step_ns": steps([18.0, 18.0])}
    planted.points("ddp", {2: 20.0}, compression="topk:0.01", input_ms=0.0, **off)
    # Lost 20 - 10; 18 - 10 of it are computed.
    assert reached(planted).cause.endswith(
        "most of it slower computation with encoding and decoding (8.00 ms)"
    )


def test_emulated_figures_make_no_claim(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 10.0}, evidence=Evidence.EMULATED)
    assert told(planted) == {
        "weak, batch 8": "not judged: every figure is emulated",
        "not in this verdict": "emulated: ddp on 2 and 4",
    }


def test_an_emulated_size_is_not_the_largest(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 12.5})
    planted.points("ddp", {8: 1.0}, evidence=Evidence.EMULATED)
    assert (reached(planted).gpus, reached(planted).against) == (4, "ddp on 2")
    assert told(planted)["not in this verdict"] == "emulated: ddp on 8"


def test_the_verdict_covers_the_batch_with_most_sizes(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 10.0})
    planted.points("ddp", {2: 10.0}, batch=64)
    said = told(planted)
    assert "weak, batch 8" in said
    assert "1 other piece of work" in said["not in this verdict"]


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
    planted.run(single, new_timing(step_ms=10.0, proof=None))
    planted.run(ddp[0], new_timing(step_ms=10.0, foreign_cpu_cores=1.0))
    planted.run(ddp[1], new_timing(step_ms=1.0, outcome=Outcome.CRASHED, reason="segmentation fault"))
    # What ddp would be on 1 is what the single device measured, and single on 2 is nothing: no loss.
    assert told(planted)["not in this verdict"] == (
        "crashed: ddp on 4; not run: ddp on 8; skipped: ddp on 16 and 32, fsdp on 4 and 8; 1 of 2 cells "
        "without a check that it trained"
    )


def test_super_linear_points_are_named_once(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 8.0})
    assert told(planted)["super-linear"].startswith("ddp on 2,")


def test_compression_is_a_clause_where_it_was_studied(planted) -> None:
    planted.points("ddp", {2: [10.0, 10.0, 10.0]})
    planted.points("ddp", {2: [20.0, 20.0, 20.0]}, compression="topk:0.01")
    assert "faster than the dense exchange: none" in told(planted)["exchanges"]


def test_sentences_of_several_workloads_begin_with_its_name(planted) -> None:
    for workload in ("gpt-nano", "resnet8"):
        planted.points("single", {1: 10.0}, workload=workload)
    found = verdict(planted.analysed())
    assert [one.workload for one in found.workloads] == ["gpt-nano", "resnet8"]
    assert found.sentences[0].startswith("gpt-nano: single on 1 rank (CPU) has ")


def test_when_nothing_succeeded_it_says_where_the_reasons_are(planted) -> None:
    planted.series("weak", "ddp", [2], batch=8)
    found = verdict(planted.analysed())
    assert found == StudyVerdict(workloads=(), next_run=found.next_run)
    assert found.sentences == (NOTHING,)


def test_the_terminal_shows_it_in_few_lines_with_the_next_run(pair, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_verdict(pair(step_ms=(10.1, 10.2)).analysed(), Console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "ddp on 4 ranks (CPU) trains 3.92 times as fast as one device."
    assert [line.partition("  ")[0] for line in lines[2:5:2]] == ["weak, batch 8", "time lost, weak"]
    assert "Cells with a figure: 3 of 3. 3 runs: 3 ok." in lines
    assert lines[-4].startswith("next: 6 runs each of ddp on 2 and 4")


def test_what_has_no_figure_is_told_by_kind_and_workload_with_its_output(planted, new_timing, capsys) -> None:
    [cell, _] = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.series("weak", "ddp", [2], batch=8, workload="mlp")
    planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    print_verdict(planted.analysed(), Console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "Cells with a figure: 0 of 3; without one: 2 not run (gpt-nano and mlp), 1 crashed (gpt-nano). "
        "1 run: 0 ok; 1 crashed."
    )
    assert lines[2] == f"{cell.id}: crashed: rank 0: it fell over"
    assert lines[3] == f"  bench logs planted --cell {cell.id}"
    assert lines[4].startswith("next: ddp on 2, since it was planned and not run:")
