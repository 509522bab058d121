"""Writing a study's report and tables, and printing its headline."""

from __future__ import annotations

from pathlib import Path

from harness.console import GAP, Console, column_widths
from reports.analysis.headline import headline_table
from reports.analysis.study import StudyFigures
from reports.table import TextTable
from results import files
from results.store import Study

FIRST_TO_GO = ("proof", "against", "interval", "setting", "scaling", "runs")
"""Columns of the headline that a narrow terminal does without; the report has them all."""


def write_report(study: Study, figures: StudyFigures, console: Console, *, path: Path | None = None) -> Path:
    """Write the page and its tables, and print the headline.

    In the study: report.html, cells.csv, runs.csv. Elsewhere: `path`, and the tables named after it.
    """
    # Drawing takes a second to import, and only reports draw.
    from reports.page.frames import cells_csv, runs_csv
    from reports.page.render import render_figures

    target = path or study.root / "report.html"
    prefix = f"{path.stem}." if path else ""
    cells, runs = (target.with_name(f"{prefix}{name}.csv") for name in ("cells", "runs"))
    files.replace(target, render_figures(figures).encode())
    files.replace(cells, cells_csv(figures).encode())
    files.replace(runs, runs_csv(figures).encode())
    print_headline(figures, console)
    console.result(f"report: {target}")
    console.result(f"tables: {cells}, {runs}")
    return target


def print_headline(figures: StudyFigures, console: Console) -> None:
    """The report's first table, less the columns that a narrow terminal has no room for."""
    table = headline_table(figures)
    if not table.rows:
        console.result("no cell has a figure; the report says why")
        return
    kept = list(range(len(table.columns)))
    for title in FIRST_TO_GO:
        if _width(table, kept) > console.width:
            kept = [number for number in kept if table.columns[number].title != title]
    console.table(
        *_columns(table, kept),
        numeric=[table.columns[number].numeric for number in kept],
    )


def _columns(table: TextTable, kept: list[int]) -> tuple[list[str], list[list[str]]]:
    heads = [table.columns[number].title for number in kept]
    return heads, [[row[number] for number in kept] for row in table.rows]


def _width(table: TextTable, kept: list[int]) -> int:
    return sum(column_widths(*_columns(table, kept))) + len(GAP) * (len(kept) - 1)
