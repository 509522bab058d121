"""Cells that differ only in the setting that the user asked about (`--compare-over`)."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from reports import fields
from reports.analysis.headline import runs_text
from reports.analysis.over import OverGroup, OverRow, over_groups
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.section import Definition, Paragraph, Section, Table
from reports.table import Column, TextTable, figures, table, words
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


@dataclass(frozen=True, slots=True)
class _Row:
    group: OverGroup
    row: OverRow


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
    groups = over_groups(study, study.compare_over)
    rows = [_Row(group, row) for group in groups for row in group.rows]
    setting: Column[_Row] = words("setting", lambda one: one.group.setting)
    columns: list[Column[_Row]] = [
        words("workload", lambda one: one.group.cell.workload),
        words("strategy", lambda one: label(one.group.cell)),
        *([setting] if any(group.setting for group in groups) else []),
        figures(study.devices_word, lambda one: fields.whole(one.group.cell.gpus)),
        figures("batch per replica / global", lambda one: fields.batch(one.group.cell)),
        words(study.compare_over.replace("_", " "), lambda one: one.row.value),
        figures(
            "step time",
            lambda one: fields.figure(one.row.figures.step_ns, ends=True),
            anchor="method-step-time",
        ),
        figures(
            "throughput", lambda one: fields.figure(one.row.figures.throughput), anchor="method-throughput"
        ),
        figures("times as fast", _ratio, anchor=DEFINITION.anchor),
        figures("memory", lambda one: fields.size(one.row.memory_bytes), anchor=DEFINITION.anchor),
        figures("loss", _loss, anchor=DEFINITION.anchor),
        words("runs", lambda one: runs_text(one.row.figures), anchor="method-evidence"),
    ]
    return table(rows, columns)


def _ratio(one: _Row) -> Field:
    row = one.row
    if row.ratio is None:
        return NONE if row.absent is None else Field(f"none: {row.absent}")
    text = metric(row.ratio)
    ends = text.label if text.ends is None else f"{text.ends}; {row.absent or text.label}"
    return Field(f"{text.value} ({ends})", row.ratio.value, row.ratio.unit)


def _loss(one: _Row) -> Field:
    loss, samples = one.row.loss, one.group.samples
    if loss is None or samples is None:
        return NONE
    text = metric(loss)
    ends = "" if text.ends is None else f" ({text.ends})"
    return Field(f"{text.value.split()[0]}{ends} after {count(samples, 'sample')}", loss.value, loss.unit)
