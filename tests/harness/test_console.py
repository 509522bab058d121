"""Tables on a terminal: nothing is cut, and a narrow one does without the columns that say least."""

from __future__ import annotations

import pytest

from harness.console import Console, Standing, column_widths, table_lines
from harness.report import FIRST_TO_GO, print_headline
from reports.analysis.study import analyse
from results.store import Study


def test_heads_break_at_their_blanks_and_figures_are_set_flush_right() -> None:
    lines = table_lines(["name", "step time"], [["a", "9 ms"], ["longer", "120 ms"]], numeric=[False, True])
    assert lines == [
        "          step",
        "name      time",
        "a         9 ms",
        "longer  120 ms",
    ]


def test_a_column_is_as_wide_as_its_widest_cell_or_the_longest_word_of_its_head() -> None:
    assert column_widths(["ranks (CPU)", "x"], [["2", "wide cell"]]) == [5, 9]
    assert column_widths(["alone"], []) == [5]


def test_what_acts_on_a_terminal_is_shown_and_takes_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("width", [60, 100, 120, 400])
def test_the_headline_fits_the_terminal_or_has_dropped_all_it_may(
    width: int,
    small_study: tuple[Study, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study, _ = small_study
    monkeypatch.setattr(Console, "width", width)
    print_headline(analyse(study.name, study.plans(), study.results()), Console())
    lines = capsys.readouterr().out.splitlines()
    widest = max(map(len, lines))
    dropped_all = not any(title in " ".join(lines[:6]).split() for title in FIRST_TO_GO)
    assert widest <= width or dropped_all
    assert all(word in " ".join(lines[:6]) for word in ("workload", "throughput", "efficiency"))
    assert ("proof" in " ".join(lines[:6])) == (width == 400)


def test_without_a_terminal_progress_is_a_line_when_a_run_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Console().progress(2) as line:
        for done in (0, 0, 0, 1, 1, 2):
            line.show(Standing(done=done, total=2, doing="cell: measuring", left="9 s"))
    assert capsys.readouterr().err.splitlines() == [
        "[0/2] cell: measuring, about 9 s left",
        "[1/2] cell: measuring, about 9 s left",
        "[2/2] cell: measuring, about 9 s left",
    ]


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "cannot be imported from facts:X: [bold]missing[/bold] :warning:"
    console = Console()
    console.result(text)
    console.note(text)
    console.warn(text)
    console.error(text)
    out, err = capsys.readouterr()
    assert out == f"{text}\n"
    assert err == f"{text}\nwarning: {text}\nerror: {text}\n"
