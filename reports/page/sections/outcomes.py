"""Failures and skips: every planned point without a figure, and why."""

from __future__ import annotations

from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.section import Block, Paragraph, Section, Table
from reports.page.skips import skipped_table

FOLDED_ABOVE = 12
"""Rows of skips, each a reason."""


def outcomes_section(study: StudyFigures) -> Section:
    skipped = skipped_table(study)
    shown = [
        Table(tables.failures_table(study), "Cells without a successful run"),
        Table(tables.lost_table(study), "Failed runs of cells that others succeeded in"),
        Table(skipped, "Points that were not run", folded=len(skipped.rows) > FOLDED_ABOVE),
    ]
    blocks: list[Block] = [one for one in shown if one.data.rows]
    if study.strangers:
        strangers = ", ".join(study.strangers)
        blocks.append(
            Paragraph(f"Results of cells that stand in no plan are not shown: {strangers}.", "plain")
        )
    if not any(one.data.rows for one in shown):
        every = "Nothing is missing: every planned cell has a figure, and no run failed."
        blocks.append(Paragraph(every, "plain"))
    return Section(anchor="outcomes", title="Failures and skips", blocks=tuple(blocks))
