"""Cells that differ only in the setting that the user asked about (`--compare-over`)."""

from __future__ import annotations

from markupsafe import Markup

from reports import fields
from reports.analysis.headline import FiguresRow, cells_table
from reports.analysis.over import OverGroup, OverRow, over_groups
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.section import Definition, Paragraph, Section, Table
from reports.table import Column, TextTable, figures, words
from reports.text import count, metric
from results.cell import label

_ABOUT = (
    "Cells that differ only in {axis}, for each way to train at the largest size that most values have. "
    "Their work differs: a shorter step does not mean that training gets as far{loss}."
)
DEFINITION = Definition(
    "method-over",
    "Compared over a setting",
    Markup(
        "<code>step time of the first value / step time of this one</code>, from runs of equal conditions. "
        "Memory: the largest of any rank and run, on a device the allocator's peak, on a CPU the memory "
        "taken over idle. Loss: the mean over the last tenth of the samples that every run of the group "
        "trained on, in each run; the interval is over runs."
    ),
)


_Row = FiguresRow[tuple[OverGroup, OverRow]]


def over_section(study: StudyFigures) -> Section | None:
    """Make the section; None if the reader did not ask for it."""
    if study.compare_over is None:
        return None
    axis = study.compare_over.replace("_", " ")
    compared = any(group.samples is not None for group in over_groups(study, study.compare_over))
    loss = (
        "; the loss after the same number of samples shows how far it got"
        if compared
        else "; no losses can be compared"
    )
    return Section(
        anchor="over",
        title=f"Compared over {axis}",
        blocks=(
            Paragraph(_ABOUT.format(axis=axis, loss=loss)),
            Table(over_table(study), f"Step, throughput, memory and loss by {axis}"),
        ),
        definitions=(DEFINITION,),
    )


def over_table(study: StudyFigures) -> TextTable:
    """One row for each value of the axis; the rows of one way to train are together."""
    assert study.compare_over is not None
    rows: list[_Row] = [
        FiguresRow(figures=row.figures, setting=group.setting, of=(group, row))
        for group in over_groups(study, study.compare_over)
        for row in group.rows
    ]
    step, ours = "method-step-time", DEFINITION.anchor
    columns: list[str | Column[_Row]] = [
        "workload",
        words("strategy", lambda row: label(row.of[0].cell)),
        *("setting", "size", "batch per replica / global"),
        words(study.compare_over.replace("_", " "), lambda row: row.of[1].value),
        figures("step time", lambda row: fields.figure(row.figures.step_ns, ends=True), anchor=step),
        "throughput",
        figures("times as fast", lambda row: _ratio(row.of[1]), anchor=ours),
        figures("memory", lambda row: fields.size(row.of[1].memory_bytes), anchor=ours),
        figures("loss", lambda row: _loss(*row.of), anchor=ours),
        "runs",
    ]
    return cells_table(rows, study.devices_word, columns)


def _ratio(row: OverRow) -> Field:
    if row.ratio is None:
        return NONE if row.absent is None else Field(f"none: {row.absent}")
    text = metric(row.ratio)
    ends = text.label if text.ends is None else f"{text.ends}; {row.absent or text.label}"
    return Field(f"{text.value} ({ends})", row.ratio.value, row.ratio.unit)


def _loss(group: OverGroup, row: OverRow) -> Field:
    loss, samples = row.loss, group.samples
    if loss is None or samples is None:
        return NONE
    text = metric(loss)
    ends = "" if text.ends is None else f" ({text.ends})"
    return Field(f"{text.value.split()[0]}{ends} after {count(samples, 'sample')}", loss.value, loss.unit)
