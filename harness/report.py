"""Writing a study's report and tables, and printing its headline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.console import GAP, Console, column_widths
from reports.analysis.headline import headline_table
from reports.analysis.side_by_side import compare
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from reports.table import TextTable
from results import files
from results.store import Study

FIRST_TO_GO = ("proof", "against", "interval", "setting", "scaling", "runs")
"""Columns of the headline that a narrow terminal does without; the report has them all."""


def write_report(study: Study, figures: StudyFigures, console: Console, *, path: Path | None = None) -> Path:
    """Write the page and its tables, and print the headline.

    In the study: report.html, cells.csv, runs.csv. Elsewhere: `path`, and the tables named after it.
    """
    target = path or study.root / "report.html"
    written = _write([figures], target, f"{path.stem}." if path else "")
    print_headline(figures, console)
    print_verdict(figures, console)
    _tell(written, console)
    return target


def write_joint_report(studies: Sequence[StudyFigures], console: Console, *, path: Path) -> None:
    """Write one page of several studies at `path`, their tables beside it, and print what they share."""
    written = _write(studies, path, f"{path.stem}.")
    for study in studies:
        console.result(f"{study.name}:")
        print_headline(study, console)
        console.result()
    for finding in compare(studies).findings:
        console.result(finding)
    _tell(written, console)


def _write(studies: Sequence[StudyFigures], page: Path, prefix: str) -> tuple[Path, ...]:
    # Drawing takes a second to import, and only reports draw.
    from reports.page.export import table
    from reports.page.render import render_studies

    tables = {name: page.with_name(f"{prefix}{name}.csv") for name in ("cells", "runs")}
    files.replace(page, render_studies(studies).encode())
    for name, path in tables.items():
        files.replace(path, table(studies, name, "csv"))
    return page, *tables.values()


def _tell(written: Sequence[Path], console: Console) -> None:
    page, *tables = written
    console.result(f"report: {page}")
    console.result(f"tables: {', '.join(map(str, tables))}")


def print_headline(figures: StudyFigures, console: Console) -> None:
    """The report's first table, less the columns that a narrow terminal has no room for."""
    table = headline_table(figures)
    if not table.rows:
        console.result("no cell has a figure; the report says why")
        return
    for title in FIRST_TO_GO:
        if _width(table) > console.width:
            table = table.columns_at([place for place, one in enumerate(table.titles) if one != title])
    console.table(table.titles, table.texts, numeric=[column.numeric for column in table.columns])


def print_verdict(figures: StudyFigures, console: Console) -> None:
    """The conclusions in sentences, as at the top of the report."""
    found = verdict(figures)
    if not found.workloads:
        return
    console.result()
    for sentence in found.sentences:
        console.result(sentence)
    console.result()


def _width(table: TextTable) -> int:
    return sum(column_widths(table.titles, table.texts)) + len(GAP) * (len(table.columns) - 1)
