"""A cell whose proof failed is drawn, and decides a question only if the reader allows that."""

from __future__ import annotations

import csv
import io
import json

import pytest

from reports.analysis.assumptions import Assumptions
from reports.analysis.headline import headline
from reports.analysis.outcomes import reason_of
from reports.analysis.size_to_buy import NONE_PROVEN, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from reports.page.export import export_text
from reports.page.render import render_figures
from reports.page.tables import export_table
from results.record import Proof

WRONG = Proof(method="serial-simulation", passed=False, detail="gradient of w differs by 0.5")


@pytest.fixture
def planted(tmp_path, new_study):
    """Sizes 1, 2 and 4 are proven, and pay; 8 pays most, and its proof failed."""
    study = new_study(tmp_path / "study", device="cuda")
    study.points("single", {1: [10.0] * 6})
    study.points("ddp", {2: [10.5] * 6, 4: [11.0] * 6})
    [wrong] = study.points("ddp", {8: [11.1] * 6}, proof=WRONG)
    study.plan(repeats=6)
    return study, wrong


def analysed(planted, *, unproven: bool = False) -> StudyFigures:
    return planted[0].analysed(assumptions=Assumptions(unproven=unproven))


def test_a_run_that_is_not_proven_has_figures_and_says_so_everywhere(planted) -> None:
    figures = analysed(planted)
    row = {row.cell.gpus: row for row in headline(figures)}[8]
    assert row.figures.step_ns.value == pytest.approx(11.1e6)
    assert row.figures.proof_method == "not proven"
    assert row.efficiency.metric is None
    assert row.efficiency.reason == f"not proven: {WRONG.detail}"
    assert not figures.failures
    for name in ("cells", "runs"):
        rows = list(csv.DictReader(io.StringIO(export_table([figures], name, "csv").decode())))
        assert {one["proof"] for one in rows if one["gpus"] == "8"} == {"not proven"}
        assert {one["proof"] for one in rows if one["gpus"] == "4"} == {"serial-simulation"}
    [cell] = [
        one
        for one in json.loads(export_text([figures], "json"))["studies"][0]["cells"]
        if one["cell"]["gpus"] == 8
    ]
    assert (cell["figures"]["proof"]["passed"], cell["figures"]["proof"]["detail"]) == (False, WRONG.detail)
    page = render_figures(figures)
    assert "not proven" in page
    assert WRONG.detail in page
    [said] = [one for one in verdict(figures).sentences if "Not in this verdict" in one]
    assert "not proven: ddp on 8" in said


def test_nothing_is_decided_by_it(planted) -> None:
    _, wrong = planted
    [found] = sizes_to_buy(analysed(planted))
    assert (found.choice.gpus, found.choice.proven) == (4, True)
    assert found.left_out == ("ddp on 8 (not proven)",)
    [found] = verdict(analysed(planted)).workloads[0].reaches
    assert found.gpus == 4
    assert analysed(planted).pools[wrong.id].unproven == WRONG.detail


def test_a_reader_may_buy_it_and_the_answer_says_so(planted) -> None:
    [found] = sizes_to_buy(analysed(planted, unproven=True))
    assert (found.choice.gpus, found.choice.proven) == (8, False)
    assert "ddp, which is not proven" in found.text
    assert found.confidence == "low"
    assert "1 cell of 4 not proven" in found.doubts


def test_without_one_proven_cell_no_size_is_named_and_the_way_out_is(tmp_path, new_study) -> None:
    study = new_study(tmp_path / "study", device="cuda")
    study.points("single", {1: [10.0] * 3}, proof=WRONG)
    study.points("ddp", {2: [10.5] * 3, 4: [11.0] * 3}, proof=WRONG)
    [found] = sizes_to_buy(study.analysed())
    assert found.absent == NONE_PROVEN
    [taken] = sizes_to_buy(study.analysed(assumptions=Assumptions(unproven=True)))
    assert taken.choice is not None


def test_runs_that_are_proven_count_before_others_of_their_cell(tmp_path, new_study) -> None:
    study = new_study(tmp_path / "study")
    [cell] = study.points("single", {1: [10.0]})
    study.runs(cell, [20.0], proof=WRONG)
    pool = study.analysed().pools[cell.id]
    assert [run.step_ns.value for run in pool.runs if run.step_ns] == [10e6]
    assert [reason_of(run) for run in pool.lost] == [f"it did not train as it should: {WRONG.detail}"]
