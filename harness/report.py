"""Writing a study's report and tables, and printing its headline."""

from __future__ import annotations

from pathlib import Path

from harness.console import Console
from reports.analysis.headline import headline_table
from reports.analysis.study import StudyFigures
from results import files
from results.store import Study


def write_report(study: Study, figures: StudyFigures, console: Console, *, path: Path | None = None) -> Path:
    """Write report.html, cells.csv and runs.csv (beside `path`, or in the study); print the headline."""
    # Drawing takes a second to import, and only reports draw.
    from reports.page.frames import cells_csv, runs_csv
    from reports.page.render import render_figures

    target = path or study.root / "report.html"
    files.replace(target, render_figures(figures).encode())
    files.replace(target.with_name("cells.csv"), cells_csv(figures).encode())
    files.replace(target.with_name("runs.csv"), runs_csv(figures).encode())
    print_headline(figures, console)
    console.result(f"report: {target}")
    console.result(f"tables: {target.with_name('cells.csv')}, {target.with_name('runs.csv')}")
    return target


def print_headline(figures: StudyFigures, console: Console) -> None:
    table = headline_table(figures)
    if not table.rows:
        console.result("no cell has a figure; the report says why")
        return
    console.table(
        [column.title for column in table.columns],
        table.rows,
        numeric=[column.numeric for column in table.columns],
    )
