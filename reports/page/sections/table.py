"""The one full table: every planned cell in a row, its columns in presets that answer one question each.

A column has one unit, which its head says, so that its figures line up and can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reports.analysis.study import StudyFigures
from reports.page.columns import PRESETS, CellRow, cell_columns, cell_rows
from reports.page.looks import ROW
from reports.page.section import Downloads, Paragraph, Section, Table
from reports.page.sections import anatomy, correctness, cost, memory
from reports.page.sections import communication as network
from reports.page.tables import export_table
from reports.table import Column, table

_ABOUT = Paragraph(
    "One row for each planned cell; points of the drawings link here. With scripts allowed, a head sorts the "
    "rows, and the shown rows can be filtered, copied and saved. The files have every figure unrounded.",
    "plain",
)
_EXPLAINED = (
    *anatomy.DEFINITIONS,
    *network.DEFINITIONS,
    *memory.DEFINITIONS,
    *cost.DEFINITIONS,
    *correctness.DEFINITIONS,
)
"""The definitions of other sections whose figures the table lists, because these sections may be missing."""


def table_section(study: StudyFigures) -> Section | None:
    """Make the last section of the page; None if no cell is planned."""
    rows = cell_rows(study)
    if not rows:
        return None
    files = Downloads(
        tuple((f"{name}.csv", export_table([study], name, "csv").decode()) for name in ("cells", "runs"))
    )
    shown = full_table(study, rows)
    linked = {column.anchor for column in shown.data.columns}
    speed_up = network.speed_up_definition(study.assumptions.smallest_effect)
    return Section(
        anchor="table",
        title="Every cell",
        blocks=(_ABOUT, shown, files),
        definitions=tuple(one for one in (*_EXPLAINED, speed_up) if one.anchor in linked),
    )


def _columns(study: StudyFigures, *, several: bool) -> list[tuple[str, Column[CellRow]]]:
    """Each column with its preset; the workload is one of them if there are several."""
    return [
        (preset, replace(column, title=study.devices_word) if column.name == "gpus" else column)
        for preset in PRESETS
        for column in cell_columns(preset)
        if several or column.name != "workload"
    ]


def full_table(study: StudyFigures, rows: Sequence[CellRow]) -> Table:
    """The table of all cells, with or without figures; columns without any value are left out."""
    made = _columns(study, several=len({row.cell.workload for row in rows}) > 1)
    data = table(rows, [column for _, column in made])
    told = [place for place in range(len(made)) if any(row[place].text for row in data.rows)]
    ids = tuple(f"{ROW}{row.cell.id}" for row in rows)
    names = tuple(made[place][0] for place in told)
    return Table(data.columns_at(told), "Every planned cell", tools=True, row_ids=ids, presets=names)
