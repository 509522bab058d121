"""Work and memory: what a step is, and what it takes."""

from __future__ import annotations

from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.section import Paragraph, Section, Table


def work_section(study: StudyFigures) -> Section:
    if not study.cells:
        nothing = Paragraph("No cell has a figure.", "plain")
        return Section(anchor="work", title="Work and memory", blocks=(nothing,))
    reasons = [Paragraph(f"No MFU: {reason}.", "plain") for reason in tables.mfu_reasons(study)]
    caption = "What a step is and what it takes, and how training was proved"
    return Section(
        anchor="work", title="Work and memory", blocks=(Table(tables.work_table(study), caption), *reasons)
    )
