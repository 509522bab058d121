"""The anatomy of a step: where its time goes."""

from __future__ import annotations

from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.bars import phase_bars
from reports.page.section import Drawings, Paragraph, Section, Table
from reports.page.works import cells_by_work


def anatomy_section(study: StudyFigures) -> Section:
    if not study.cells:
        return Section(
            anchor="phases", title="Step by phase", blocks=(Paragraph("No cell has a figure.", "plain"),)
        )
    words = tables.CellWords(study)
    labels = {cell.cell.id: words.label(cell.cell) for cell in study.cells.values()}
    return Section(
        anchor="phases",
        title="Step by phase",
        blocks=(
            Paragraph(
                "Where the time of a step goes, on the mean over ranks, steps and runs. Rows are named by "
                "strategy x size, batch per replica / global."
            ),
            Drawings(tuple(phase_bars(cells_by_work(study), labels))),
            Table(tables.phases_table(study), "Step time and its phases"),
            Table(tables.spread_table(study), "Spread of single steps"),
        ),
    )
