"""The one full table: every planned cell in a row, its columns in presets that answer one question each.

A column has one unit, which its head says, so that its figures line up and can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from reports.analysis.communication import communication
from reports.analysis.memory import cell_memories
from reports.analysis.peaks import link_peaks
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.frames import cells_csv, runs_csv
from reports.page.rows import CellRow, cell_rows
from reports.page.scaling_charts import ROW
from reports.page.section import Downloads, Paragraph, Section, Table
from reports.page.sections import anatomy, correctness, cost, memory
from reports.page.sections import communication as network
from reports.page.sections.table_columns import Column, FigureColumn, Looked, Words, presets, step_ns
from reports.table import TextColumn, TextTable
from reports.text import number

_ABOUT = Paragraph(
    "One row a planned cell; points of the drawings lead here. With scripts allowed, a head sorts, and the "
    "rows shown are filtered, copied and saved. The files hold every figure unrounded.",
    "plain",
)
_EXPLAINED = (
    *anatomy.DEFINITIONS,
    *network.DEFINITIONS,
    *memory.DEFINITIONS,
    *cost.DEFINITIONS,
    *correctness.DEFINITIONS,
)
"""Of the sections that draw what the table lists; one of them may have nothing to draw."""
_NONE = Field("")
_UNITS: Mapping[str, tuple[tuple[float, str], ...]] = MappingProxyType(
    {
        "ns": ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns")),
        "once": ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns")),
        "hours": ((3.6e12, "h"), (6e10, "min"), (1e9, "s"), (1e6, "ms")),
        "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
        "rate": ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")),
        "ratio": ((0.01, "%"),),
        "flops": ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")),
        "": ((1.0, ""),),
        "tiny": ((1.0, ""),),
        "count": ((1.0, ""),),
    }
)
"""Scales of a kind of figure, the largest first."""
_FORMS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {"tiny": "{:.2g}".format, "count": "{:,.0f}".format}
)


def table_section(study: StudyFigures) -> Section | None:
    """The last of the page; None where nothing is planned."""
    rows = cell_rows(study)
    if not rows:
        return None
    files = Downloads((("cells.csv", cells_csv(study)), ("runs.csv", runs_csv(study))))
    shown = full_table(study, rows)
    linked = {column.anchor for column in shown.data.columns}
    speed_up = network.speed_up_definition(study.assumptions.smallest_effect)
    return Section(
        anchor="table",
        title="Every cell",
        blocks=(_ABOUT, shown, files),
        definitions=tuple(one for one in (*_EXPLAINED, speed_up) if one.anchor in linked),
    )


def full_table(study: StudyFigures, rows: Sequence[CellRow]) -> Table:
    """With figures or without; columns without a value in any row are left out."""
    peaks = link_peaks(study.cells.values())
    memories = {one.cell.id: one for one in cell_memories(study)}
    looked = [
        Looked(row, communication(row.figures, peaks) if row.figures else None, memories.get(row.cell.id))
        for row in rows
    ]
    made: list[tuple[str, TextColumn, list[Field]]] = []
    for preset, columns in presets(study).items():
        for column in columns:
            head, fields = _made(column, looked)
            if any(field.text for field in fields):
                made.append((preset, head, fields))
    data = TextTable(
        columns=tuple(head for _, head, _ in made),
        rows=tuple(tuple(fields[place] for _, _, fields in made) for place in range(len(rows))),
    )
    ids = tuple(f"{ROW}{row.cell.id}" for row in rows)
    names = tuple(preset for preset, _, _ in made)
    return Table(data, "Every planned cell", tools=True, row_ids=ids, presets=names)


def _made(column: Column, rows: Sequence[Looked]) -> tuple[TextColumn, list[Field]]:
    if isinstance(column, Words):
        head = TextColumn(title=column.title, anchor=column.anchor, hint=column.hint)
        return head, [Field(column.show(row)) for row in rows]
    values = [column.value(row) for row in rows]
    # Parts of a step are shown in the unit of the step, so that they can be added up by eye.
    sizes = values if column.kind != "ns" else [step_ns(row) for row in rows]
    scale, unit = _scale(column, [abs(value) for value in sizes if value])
    head = TextColumn(
        title=f"{column.title}, {unit}" if unit else column.title,
        numeric=True,
        anchor=column.anchor,
        hint=column.hint,
    )
    form = _FORMS.get(column.kind, number)
    return head, [
        _NONE if value is None else Field(form(value / scale), value, column.kind) for value in values
    ]


def _scale(column: FigureColumn, sizes: Sequence[float]) -> tuple[float, str]:
    """The unit in which the middle one of the figures is at least 1."""
    scales = _UNITS[column.kind]
    middle = median(sizes) if sizes else 0.0
    scale, prefix = next((one for one in scales if middle >= one[0]), scales[-1])
    # Symbols are joined, words are not: `MB/s`, `M units/s`.
    apart = "" if column.unit == "B/s" else " "
    return scale, f"{prefix}{apart}{column.unit}".strip() if column.unit else prefix
