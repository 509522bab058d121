"""Communication: what the exchange adds to a step, and what it carries."""

from __future__ import annotations

from reports.analysis.study import StudyFigures
from reports.page import tables
from reports.page.bars import exposed_dots
from reports.page.section import Drawings, Paragraph, Section, Table
from reports.page.works import cells_by_workload


def communication_section(study: StudyFigures) -> Section:
    if not study.cells:
        nothing = Paragraph("No cell has a figure.", "plain")
        return Section(anchor="communication", title="Communication", blocks=(nothing,))
    words = tables.CellWords(study)
    labels = {cell.cell.id: words.label(cell.cell) for cell in study.cells.values()}
    return Section(
        anchor="communication",
        title="Communication",
        blocks=(
            Paragraph(
                "What the exchange of gradients adds to a step beyond what hides behind computation, from "
                "steps with and without it, interleaved in the same run."
            ),
            Drawings(tuple(exposed_dots(cells_by_workload(study), labels))),
            Table(tables.communication_table(study), "Exposed communication, payload and operations"),
        ),
    )
