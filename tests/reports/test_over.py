"""`--compare-over`: cells that differ only in one setting, side by side with their loss."""

from __future__ import annotations

import json
from unittest.mock import patch

import msgspec
import pytest

from harness.cli import run
from reports.analysis.over import comparing_over, over_groups
from reports.analysis.study import StudyFigures
from reports.page.export import export_text
from reports.page.render import render_figures
from reports.page.sections.over import over_table
from results.cell import StepPolicy
from results.errors import UsageError

FALLING = {"fp32": (8.0, 6.0, 4.0, 2.0), "bf16": (8.0, 7.0, 6.0, 5.0, 1.0, 1.0)}
"""Losses of each step; bf16 was trained for two steps more."""


@pytest.fixture
def planted_two(planted):
    """fp32 in 10 ms and bf16 in 5 ms, on 2 and on 4, of digits; on 4 alone also fp16."""
    for precision, ms, sizes in (("fp32", 10.0, [2, 4]), ("bf16", 5.0, [2, 4]), ("fp16", 4.0, [2])):
        points = dict.fromkeys(sizes, [ms] * 3)
        planted.points("ddp", points, dataset="digits", precision=precision)
        planted.plan()
    return planted


def analysed(planted) -> StudyFigures:
    cells = {cell.id: cell for plan in planted.study.plans() for cell in plan.cells}
    results = []
    for one in planted.study.collect():
        losses = FALLING.get(cells[one.cell_id].precision, ())
        steps = {"warmup_steps": 0, "steps": len(losses)} if losses else {}
        results.append(msgspec.structs.replace(one, losses=losses, first_steps=0, **steps))
    return planted.analysed(results)


def test_most_values_decide_the_size_and_losses_are_those_after_equal_samples(planted_two) -> None:
    [group] = over_groups(analysed(planted_two), "precision")
    assert group.cell.gpus == 2
    assert [row.value for row in group.rows] == ["fp32", "bf16", "fp16"]
    # 4 steps of 2 x 8 samples, of which the last tenth lies in the fourth step.
    assert group.samples == 64
    assert [row.loss and row.loss.value for row in group.rows] == [2.0, 5.0, None]
    ratios = [row.ratio and row.ratio.value for row in group.rows]
    assert ratios == [None, pytest.approx(2.0), pytest.approx(2.5)]
    # As planted: rank 1 has a byte more.
    assert [row.memory_bytes for row in group.rows] == [100 * 2**20 + 1] * 3


def test_accumulation_keeps_the_batch_and_so_the_micro_batch_differs(planted) -> None:
    for accumulation, micro_batch in ((1, 8), (4, 2)):
        planted.points("ddp", {2: 10.0}, batch=micro_batch, accumulation=accumulation)
        planted.plan()
    [group] = over_groups(analysed(planted), "accumulation")
    assert [(row.value, row.figures.cell.batch_per_replica) for row in group.rows] == [("1", 8), ("4", 8)]
    assert [row.absent for row in group.rows] == [None, "a verdict needs 3 runs of each"]


def test_groups_of_other_settings_are_told_apart(planted) -> None:
    """Each precision by two optimizers: two groups that are alike but for that."""
    for optimizer in ("adamw", "sgd:lr=0.1"):
        for precision in ("fp32", "bf16"):
            planted.points("ddp", {2: 10.0}, precision=precision, optimizer=optimizer)
            planted.plan()
    study = analysed(planted)
    settings = [group.setting for group in over_groups(study, "precision")]
    assert settings == ["optimizer=adamw", "optimizer=sgd:lr=0.1"]
    told = over_table(comparing_over(study, "precision"))
    place = told.titles.index("setting")
    assert [row[place] for row in told.texts] == [settings[0]] * 2 + [settings[1]] * 2


def test_two_cells_of_one_value_are_no_comparison_and_the_later_one_stands_for_it(planted_two) -> None:
    assert "setting" not in over_table(comparing_over(analysed(planted_two), "precision")).titles
    for precision, sizes in (("fp32", [2, 4, 8]), ("fp32", [8]), ("bf16", [4])):
        steps = StepPolicy(quads=len(sizes))
        made = planted_two.series(
            "weak", "ddp", sizes, batch=8, dataset="digits", precision=precision, steps=steps
        )
        planted_two.plan()
        for cell in made:
            planted_two.runs(cell, [20.0])
    [group] = over_groups(analysed(planted_two), "precision")
    # Four cells on 4, of two values; three values on 2, and on 8 one.
    assert group.cell.gpus == 2
    assert [row.value for row in group.rows] == ["fp32", "bf16", "fp16"]
    assert [row.figures.cell.steps.quads for row in group.rows] == [3, StepPolicy().quads, StepPolicy().quads]


def test_the_page_and_exports_have_it_where_it_is_asked_for(planted_two) -> None:
    study = analysed(planted_two)
    assert "Compared over" not in render_figures(study)
    assert "compare_over" not in json.loads(export_text([study], "json"))["studies"][0]
    asked = comparing_over(study, "precision")
    page = render_figures(asked)
    assert "Compared over precision" in page
    assert "after 64 samples" in page
    assert "2.00 x (2.00 to 2.00" in export_text([asked], "markdown")
    [group] = json.loads(export_text([asked], "json"))["studies"][0]["compare_over"]["groups"]
    assert [one["value"] for one in group["cells"]] == ["fp32", "bf16", "fp16"]
    assert [one["loss"] and one["loss"]["value"] for one in group["cells"]] == [2.0, 5.0, None]


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("compile", "--compare-over compile: all cells with a figure have no; measure several in one study"),
        ("clip_norm", r"bench matrix --clip-norm A,B"),
    ],
)
def test_an_axis_of_one_value_is_refused_with_the_call(planted_two, axis, message) -> None:
    with pytest.raises(UsageError, match=message):
        comparing_over(analysed(planted_two), axis)


def test_the_command_refuses_before_it_writes(planted_two, capsys) -> None:
    root = str(planted_two.study.root)
    assert run(["report", root, "--compare-over", "memory-format"]) == 2
    assert "--compare-over memory-format: all cells" in capsys.readouterr().err
    assert run(["export", root, "--format", "latex", "--compare-over", "precision"]) == 2
    assert "is for markdown and json" in capsys.readouterr().err
    with patch.dict("os.environ", {"COLUMNS": "400"}):
        assert run(["report", root, "--compare-over", "precision"]) == 0
    assert "times as fast" in capsys.readouterr().out


def test_on_80_columns_every_line_fits_and_no_cell_is_torn(planted_two, capsys, monkeypatch) -> None:
    root = str(planted_two.study.root)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["report", root, "--compare-over", "precision"]) == 0
    # A path is to be copied, and as long as it is.
    lines = [line for line in capsys.readouterr().out.splitlines() if root not in line]
    assert [line for line in lines if len(line) > 80] == []
    said = " ".join(" ".join(lines).split())
    table = over_table(comparing_over(analysed(planted_two), "precision"))
    assert len(table.texts) == 3
    for row in table.texts:
        # Losses are those that this file plants into the results that it analyses.
        for title, cell in zip(table.titles, row, strict=True):
            assert title == "loss" or cell.strip("-") in said, (title, cell)
