"""Tables on a terminal: no text is cut, and a narrow one does without the columns that say least."""

from __future__ import annotations

import os
import shlex
from types import SimpleNamespace

import pytest
from builders import a_cell
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.cli import run
from harness.reporting.report import command_lines, print_headline, record_lines
from harness.terminal.console import Console, Standing
from harness.terminal.narrow import narrow_lines
from harness.terminal.table_text import fitted_lines, table_lines
from reports.analysis.headline import FiguresRow, HeadlineRow
from reports.analysis.scaling import Efficiency, NoClaim
from reports.analysis.study import analyse
from reports.analysis.verdict.verdict import Record
from results.statistics import Metric


def test_heads_break_at_their_blanks_and_figures_are_set_flush_right() -> None:
    lines = table_lines(["name", "step time"], [["a", "9 ms"], ["longer", "120 ms"]], numeric=[False, True])
    assert lines == ["          step", "name      time", "a         9 ms", "longer  120 ms"]


def test_texts_that_have_no_room_go_on_below_in_their_column_and_figures_do_not() -> None:
    rows = [["ddp", "9 ms", "replicas, bucketed all-reduce"], ["  option", "120 ms", "a b"]]
    numeric = [False, True, False]
    assert [*fitted_lines(["name", "step time", "meaning"], rows, numeric=numeric, width=40)] == [
        "            step",
        "name        time  meaning",
        "ddp         9 ms  replicas, bucketed",
        "                  all-reduce",
        "  option  120 ms  a b",
    ]


def test_columns_that_have_no_room_are_told_below_their_rows() -> None:
    titles = ["way", "of how many runs", "step time", "throughput", "runs"]
    rows = [
        ["a", "1", "9.58 ms (9.1 to 9.8)", "-", "1 measured, disturbed"],
        ["b", "2", "8 ms", "4 images/s", ""],
    ]
    numeric = [False, True, True, True, False]
    assert [*fitted_lines(titles, rows, numeric=numeric, width=40)] == [
        "       of",
        "      how",
        "     many",
        "way  runs             step time",
        "a       1  9.58 ms (9.1 to 9.8)",
        "    runs 1 measured, disturbed",
        "b       2                  8 ms",
        "    throughput 4 images/s",
    ]


_ROW = st.lists(st.lists(st.integers(3, 12), min_size=1, max_size=3), min_size=3, max_size=3)


@settings(max_examples=60)
@given(
    lengths=st.lists(_ROW, min_size=2, max_size=4),
    numeric=st.lists(st.booleans(), min_size=3, max_size=3),
    width=st.integers(40, 60),
)
@example(lengths=[[[9, 9], [4, 9, 3], [9]], [[7], [8, 9], [7, 9]]], numeric=[False] * 3, width=44)
def test_a_fitted_table_has_every_word_of_its_rows_in_their_order(lengths, numeric, width) -> None:
    """`lengths` are the lengths of the words. A word begins with its row (0: the heads), column and place."""
    heads, *rows = [
        [
            " ".join(f"{row}{column}{place}".ljust(length, "x") for place, length in enumerate(cell))
            for column, cell in enumerate(cells)
        ]
        for row, cells in enumerate(lengths)
    ]
    lines = [*fitted_lines(heads, rows, numeric=numeric, width=width)]
    assert max(map(len, lines)) <= width
    printed = [word.rstrip(";") for line in lines for word in line.split() if word[0] != "0"]
    assert [word[0] for word in printed] == sorted(word[0] for word in printed)
    for row, cells in enumerate(rows, 1):
        for column, cell in enumerate(cells):
            assert [word for word in printed if word.startswith(f"{row}{column}")] == cell.split()


def test_what_acts_on_a_terminal_is_shown_and_takes_its_columns(capsys) -> None:
    console = Console()
    console.table(["words", "n"], [["\x1b[2J\nx", "1"], ["plain", "22"]], numeric=[False, True])
    for say in (console.result, console.text, console.note, console.warn, console.error):
        say("a \u202ereason")
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "words       n",
        r"\x1b[2J x   1",
        "plain      22",
        r"a \u202ereason",
        r"a \u202ereason",
    ]
    assert [line.rpartition("a ")[2] for line in said.err.splitlines()] == [r"\u202ereason"] * 3


@pytest.mark.parametrize("width", [40, 60, 80, 120, 400])
def test_the_headline_fits_the_terminal_and_keeps_every_fact_of_trust(
    width, small_study, monkeypatch, capsys
) -> None:
    study, _ = small_study
    monkeypatch.setenv("COLUMNS", str(width))
    figures = analyse(study.name, study.plans(), study.results())
    print_headline(figures, Console())
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    for word in ("strategy", "efficiency", "measured", "serial-simulation"):
        assert word in said
    assert ("disturbed" in said) == any(one.disturbed for one in figures.cells.values())
    assert ("Left out on" in said) == (width < 120)


def test_a_long_name_has_lines_of_its_own_and_a_row_that_differs_says_so() -> None:
    rows = [
        _row("ddp", disturbed=False),
        _row("ddp" + 97 * " + x", disturbed=False),
        _row("fsdp", disturbed=True),
    ]
    lines = narrow_lines(rows, "GPUs", 80)
    assert max(map(len, lines)) <= 80
    assert "".join(lines).replace(" ", "").count("+x") == 97
    [differs] = [line for line in lines if "disturbed" in line]
    assert differs.lstrip().startswith("3 measured, disturbed") or differs.startswith("fsdp")
    assert lines[0] == "gpt-nano, weak scaling, batch 8 per replica, serial-simulation, 3 measured"


def _row(strategy: str, *, disturbed: bool) -> HeadlineRow:
    pool = SimpleNamespace(planned=3, disturbed_out=0, unproven=0)
    step = Metric(value=1e7, unit="ns", low=9e6, high=1.1e7, samples=3, interval="range")
    rate = Metric(value=800.0, unit="samples/s", low=700.0, high=900.0, samples=3, interval="range")
    figures = SimpleNamespace(
        cell=a_cell(workload="gpt-nano", strategy=strategy, gpus=4, micro_batch=8),
        step_ns=step,
        throughput=rate,
        exposed_share=None,
        proof_method="serial-simulation",
        runs=[SimpleNamespace(copies_ns=None)] * 3,
        pool=pool,
        evidence="measured",
        disturbed=disturbed,
    )
    return FiguresRow(
        of=("weak",),
        figures=figures,
        efficiency=Efficiency(metric=None, baseline=None, no_claim=NoClaim("emulated")),
    )


def test_the_verdict_takes_six_lines_a_workload_and_the_lowest_ranks_stay() -> None:
    records = [
        Record(what=f"title {rank}", figure=" ".join(["word"] * words), rank=rank)
        for rank, words in ((0, 5), (5, 60), (1, 5), (2, 20), (3, 40), (4, 2))
    ]
    lines = record_lines(records, 80, 6)
    assert len(lines) <= 6
    assert max(map(len, lines)) <= 80
    assert [line[:7] for line in lines if line.startswith("title")] == [
        "title 0",
        "title 1",
        "title 2",
        "title 4",
    ]


def test_a_command_is_broken_so_that_a_shell_takes_it_as_one() -> None:
    command = "bench matrix --out 'my runs/a' --workload gpt-nano --strategy ddp --gpus 2,4,8 --repeats 6"
    lines = command_lines(command, 40)
    assert max(map(len, lines)) <= 40
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == shlex.split(command)


def test_without_a_terminal_progress_is_a_line_when_a_run_is_done(capsys) -> None:
    with Console().progress(2) as line:
        for done in (0, 0, 0, 1, 1, 2):
            line.show(Standing(done=done, total=2, doing="cell: measuring", left="9 s", elapsed="3 s"))
    assert capsys.readouterr().err.splitlines() == [
        "[0/2] cell: measuring; 3 s so far, about 9 s left",
        "[1/2] cell: measuring; 3 s so far, about 9 s left",
        "[2/2] cell: measuring; 3 s so far, about 9 s left",
    ]


def test_text_is_printed_as_it_is(capsys) -> None:
    text = "cannot be imported from facts:X: [bold]missing[/bold] :warning:"
    console = Console()
    console.result(text)
    console.note(text)
    console.warn(text)
    console.error(text)
    out, err = capsys.readouterr()
    assert out == f"{text}\n"
    assert err == f"{text}\nwarning: {text}\nerror: {text}\n"


def test_who_reads_no_more_ends_a_command_as_shells_have_it(monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        assert run(["list", "optimizers"]) == 141
