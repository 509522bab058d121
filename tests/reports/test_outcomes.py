"""Cells without a figure, and those that need none because a smaller batch ran out of memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.jobs.progress import progress
from harness.launch.tally import Conditions
from reports.analysis.outcomes import pruned
from reports.analysis.study import StudyFigures, analyse
from reports.page.section import Table
from reports.page.sections.correctness import correctness_section
from reports.page.sections.outcomes import outcomes_section
from reports.page.tables import csv_text, frame_of
from results.cell import Cell, pruning_reason
from results.outcome import Outcome

EXHAUSTED = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "no memory"}


@pytest.fixture
def cells(planted) -> list[Cell]:
    """Three batches of one cell: 4, 8 and 16."""
    found = [planted.series("weak", "ddp", [2], batch=batch)[0] for batch in (4, 8, 16)]
    planted.plan(repeats=2)
    return found


def _figures(planted: Any) -> StudyFigures:
    return analyse("s", planted.study.plans(), planted.study.results())


def _standing(planted: Any, code_hash: str = "c0de") -> dict[str, tuple[str, str]]:
    """State and words of each cell, as `bench status` shows them."""
    rows = progress(planted.study, planted.study.plans(), Conditions(code_hash=code_hash), [])
    return {row.cell: (row.state, row.others) for row in rows}


def _outcomes(planted: Any) -> dict[str, tuple[str, str, int]]:
    return {one.cell.id: (one.outcome, one.reason, one.runs) for one in _figures(planted).failures}


def test_larger_batches_without_runs_are_skipped_in_words(planted, new_timing, cells) -> None:
    four, eight, sixteen = cells
    planted.run(four, new_timing(step_ms=1.0))
    planted.run(eight, new_timing(step_ms=1.0, **EXHAUSTED))
    words = f"inferred out of memory: {eight.id} has a smaller batch and ran out of it"
    assert _outcomes(planted)[sixteen.id] == ("skipped", words, 0)
    assert _outcomes(planted)[eight.id] == ("out_of_memory", "rank 0: no memory", 1)
    assert four.id not in _outcomes(planted)
    figures = _figures(planted)
    (table,) = [block.data for block in outcomes_section(figures).blocks if isinstance(block, Table)]
    assert ("skipped", words) in {(row[0], row[-1]) for row in table.texts}
    rows = {line.split(",")[1]: line for line in csv_text(frame_of([figures], "cells")).splitlines()}
    assert words in rows[sixteen.id]
    (gap,) = next(
        curve.gaps for curve in figures.curves if any("inferred" in gap.reason for gap in curve.gaps)
    )
    assert gap.reason == f"skipped: {words}"
    assert _standing(planted)[sixteen.id] == ("skipped", words)
    assert _standing(planted)[eight.id] == ("failed", "1 out_of_memory: rank 0: no memory")


def test_page_and_status_say_why_a_strategy_has_no_proof(planted, new_timing, cells) -> None:
    why = "gossip is declared to be without a proof: averages are weighted"
    planted.run(cells[0], new_timing(step_ms=1.0, proof=None, absent={"proof": why}))
    assert _standing(planted)[cells[0].id][1] == why
    section = correctness_section(_figures(planted))
    assert f"Not checked: {why}" in section.blocks[0].text


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [(Outcome.OUT_OF_MEMORY, "out_of_memory"), (Outcome.CRASHED, "crashed"), (Outcome.OK, None)],
)
def test_a_larger_batch_that_was_run_all_the_same_has_its_own_outcome(
    planted, new_timing, cells, outcome, shown
) -> None:
    planted.run(cells[1], new_timing(step_ms=1.0, **EXHAUSTED))
    planted.run(cells[2], new_timing(step_ms=1.0, outcome=outcome, reason="its own"))
    assert _outcomes(planted).get(cells[2].id, (None,))[0] == shown
    assert "skipped" not in {state for state, _ in _standing(planted).values()}


def test_a_cell_has_failed_where_the_same_command_would_leave_it_out(planted, new_timing, cells) -> None:
    crash = new_timing(step_ms=1.0, outcome=Outcome.CRASHED, reason="no luck")
    planted.run(cells[0], crash)
    planted.run(cells[1], new_timing(step_ms=1.0))
    planted.run(cells[1], crash)
    words = "1 crashed: rank 0: no luck"
    assert [_standing(planted)[cell.id] for cell in cells] == [
        ("failed", words),
        ("to do", words),  # One of its two runs ended well.
        ("to do", ""),
    ]
    planted.run(cells[2], new_timing(step_ms=1.0, outcome=Outcome.SKIPPED, reason="w has no dimension"))
    assert _standing(planted)[cells[2].id] == ("skipped", "1 skipped: rank 0: w has no dimension")
    # A crash of other code says nothing of the code that would run now.
    assert _standing(planted, code_hash="beef")[cells[0].id] == ("to do", words)


def test_nothing_is_inferred_from_a_cell_that_ran_or_that_failed_otherwise_since(
    planted, new_timing, cells
) -> None:
    planted.run(cells[0], new_timing(step_ms=1.0, **EXHAUSTED))
    planted.run(cells[0], new_timing(step_ms=1.0))
    planted.run(cells[1], new_timing(step_ms=1.0, **EXHAUSTED))
    planted.run(cells[1], new_timing(step_ms=1.0, outcome=Outcome.CRASHED, reason="other"))
    assert _outcomes(planted)[cells[2].id][0] == "not run"


def test_plans_infer_from_their_own_cells(planted) -> None:
    (small,) = planted.points("ddp", {2: 1.0}, batch=4, **EXHAUSTED)
    planted.plan()
    (large,) = planted.series("weak", "ddp", [2], batch=8)
    planted.plan()
    assert _outcomes(planted)[large.id][0] == "not run"
    results, (first, second) = planted.study.results(), planted.study.plans()
    joined = msgspec.structs.replace(first, cells=first.cells + second.cells)
    assert pruned([joined], results) == {large.id: pruning_reason(small.id)}
