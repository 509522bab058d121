"""The cost of imbalance: cells whose experts are loaded unevenly, against the cell with an even load."""

from __future__ import annotations

from reports import fields
from reports.analysis.headline import FiguresRow, cells_table
from reports.analysis.imbalance import Imbalance, imbalances, missing_even
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.page.looks import cell_label
from reports.page.section import Bullets, Section, Table, absent
from reports.table import Column, TextTable, figures, words
from reports.text import listed

ANCHOR, TITLE = "imbalance", "Cost of imbalance"
_METHOD, _EXPERTS = "method-imbalance", "method-experts"


def imbalance_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has experts that may be loaded unevenly."""
    found, missing = imbalances(study), missing_even(study)
    if missing and not found:
        why = f"not available: no cell of {listed(missing)} has a figure to compare with"
        return absent(ANCHOR, TITLE, why)
    if not found:
        return None
    told = tuple(f"{cell_label(study, one.cell)}: {one.finding}." for one in found)
    table = Table(imbalance_table(study, found), "Step time by the load of the experts")
    return Section(anchor=ANCHOR, title=TITLE, blocks=(Bullets(told), table))


def imbalance_table(study: StudyFigures, found: list[Imbalance]) -> TextTable:
    """One row for each cell that is compared."""
    rows = [
        FiguresRow(figures=one.figures, setting=study.settings[setting_of(one.cell)], of=one) for one in found
    ]
    columns: list[str | Column[FiguresRow[Imbalance]]] = [
        *("workload", "strategy", "setting", "size", "batch per replica / global"),
        figures("busiest expert", lambda row: fields.number(row.of.busiest), anchor=_EXPERTS),
        "step time",
        figures("with an even load", lambda row: fields.figure(row.of.even.step_ns), anchor=_METHOD),
        figures("cost of imbalance", lambda row: fields.figure(row.of.ratio, ends=True), anchor=_METHOD),
        words("verdict", lambda row: row.of.change or f"not judged: {row.of.absent}"),
        "runs",
    ]
    return cells_table(rows, study.devices_word, columns)
