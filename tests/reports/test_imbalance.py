"""The cost of imbalance: cells that differ only in their routing, against the cell with an even load."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from html_page import Page

from reports.analysis.imbalance import imbalances, missing_even
from reports.analysis.study import StudyFigures
from reports.page.render import render_figures
from reports.page.tables import export_table
from results.run import BusiestExpert

EVEN, SKEWED, LEARNED = "moe-nano:routing=balanced", "moe-nano:routing=skewed:skew=4", "moe-nano"
LOADS = {EVEN: 1.0, SKEWED: 4.0, LEARNED: 1.5}


def analysed(planted) -> StudyFigures:
    """The planted runs, as the ranks of these workloads would have recorded them."""
    workloads = {cell.id: cell.workload for plan in planted.study.plans() for cell in plan.cells}
    results = [
        msgspec.structs.replace(
            run,
            even_workload=EVEN,
            busiest_expert=BusiestExpert(module="a", expert=0, times_mean=LOADS[workloads[run.cell_id]]),
        )
        for run in planted.study.collect()
    ]
    return planted.analysed(results)


@pytest.fixture
def three(planted) -> StudyFigures:
    """Three runs of each on 2: even 10 ms, skewed 12 ms, learned about 10 ms; skewed also on 4."""
    for workload, runs in (
        (EVEN, [9.9, 10.0, 10.1]),
        (SKEWED, [11.9, 12.0, 12.1]),
        (LEARNED, [10.1, 9.9, 10]),
    ):
        planted.points("ddp", {2: runs}, workload=workload)
        planted.plan()
    planted.points("ddp", {4: [20.0] * 3}, workload=SKEWED)
    planted.plan()
    return analysed(planted)


def test_each_cell_is_compared_with_the_even_one_of_its_size(three) -> None:
    found = {one.cell.workload: one for one in imbalances(three)}
    assert {(one.cell.gpus, one.even.cell.workload) for one in found.values()} == {(2, EVEN)}
    skewed, learned = found[SKEWED], found[LEARNED]
    assert len(found) == 2
    assert skewed.ratio is not None
    # 12 ms over 10 ms; the range from 11.9 over 10.1 to 12.1 over 9.9.
    assert (skewed.ratio.value, skewed.ratio.low, skewed.ratio.high) == pytest.approx(
        (1.2, 11.9 / 10.1, 12.1 / 9.9)
    )
    assert (skewed.change, learned.change) == ("longer", "no difference shown")
    assert (skewed.busiest, learned.busiest) == (4.0, 1.5)
    assert skewed.finding == (
        f"a step takes 1.20 times as long as with {EVEN} (1.18 to 1.22, range of 3): longer"
    )


def test_the_page_and_the_table_have_the_cost_and_rows_of_routings_are_not_pooled(three) -> None:
    page = Page(render_figures(three))
    assert page.sections.index("imbalance") < page.sections.index("communication")
    assert "a step takes 1.20 times as long" in page.text
    rows = list(csv.DictReader(io.StringIO(export_table([three], "cells", "csv").decode())))
    costs = {(row["workload"], row["gpus"]): row["imbalance_cost"] for row in rows}
    assert len(rows) == 4
    assert float(costs[SKEWED, "2"]) == pytest.approx(1.2)
    assert (costs[EVEN, "2"], costs[SKEWED, "4"]) == ("", "")
    assert {row["workload"]: float(row["busiest_expert"]) for row in rows} == LOADS


def test_two_runs_are_compared_and_not_judged(planted) -> None:
    for workload, ms in ((EVEN, 10.0), (SKEWED, 20.0)):
        planted.points("ddp", {2: [ms] * 2}, workload=workload)
        planted.plan()
    [one] = imbalances(analysed(planted))
    assert (one.ratio and one.ratio.value, one.change) == (2.0, None)
    assert one.finding.endswith("not judged, as a verdict needs 3 runs of each")


def test_without_the_even_cell_the_page_names_its_workload(planted) -> None:
    planted.points("ddp", {2: [10.0] * 3}, workload=SKEWED)
    planted.plan()
    study = analysed(planted)
    assert (imbalances(study), missing_even(study)) == ([], [EVEN])
    assert f"no cell of {EVEN} has a figure to compare with" in render_figures(study)


def test_a_study_without_experts_has_no_such_section(small) -> None:
    assert "imbalance" not in Page(render_figures(small.analysed())).sections
