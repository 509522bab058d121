"""Writing a study's report and tables, and printing its headline."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from harness.terminal.console import Console
from harness.terminal.narrow import narrow_lines
from harness.terminal.table_text import GAP, column_widths, total_width
from reports.analysis.headline import headline, headline_table
from reports.analysis.outcomes import failures_text
from reports.analysis.size_to_buy import CPU
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.brief import Clause, brief
from reports.analysis.verdict.verdict import verdict
from reports.text import count
from results import files
from results.features import MEASURED
from results.store import Study

VERDICT_LINES = 6
"""Maximum number of lines on a terminal of the verdict on one workload."""


def write_report(study: Study, figures: StudyFigures, console: Console, *, path: Path | None = None) -> Path:
    """Write the page and its tables, and print the headline of the measurements.

    Prints nothing while the study runs. In the study:
    report.html, cells.csv, runs.csv. Elsewhere: `path`, and the tables named after it.
    """
    target = path or study.root / "report.html"
    # Drawing takes a second to import, and only reports draw.
    from reports.page.render import render_figures

    html = render_figures(figures)
    written = write_page(html, [figures], target, f"{path.stem}." if path else "", in_study=path is None)
    if figures.running:
        return target
    if figures.cells or figures.kind == MEASURED:
        print_headline(figures, console)
        print_verdict(figures, console)
    if figures.compare_over is not None:
        # Imported late: `over_table` imports the drawing code, which writing the page has already loaded.
        from reports.page.sections.over import over_table

        table = over_table(figures)
        console.table(table.titles, table.texts, numeric=table.numeric)
        console.result()
    name_files(written, console)
    return target


def write_page(
    html: str, studies: Sequence[StudyFigures], page: Path, prefix: str, *, in_study: bool = False
) -> tuple[Path, ...]:
    """Write a page of studies, and its tables in the same folder. Returns all paths, the page first."""
    from reports.page.tables import export_table

    names = () if not in_study and files.is_stream(page) else ("cells", "runs")
    tables = {name: page.with_name(f"{prefix}{name}.csv") for name in names}
    files.replace(page, html.encode(), in_study=in_study)
    for name, path in tables.items():
        files.replace(path, export_table(studies, name, "csv"), in_study=in_study)
    return page, *tables.values()


def name_files(written: Sequence[Path], console: Console) -> None:
    """Print the paths of a page and its tables."""
    page, *tables = written
    console.result(f"report: {page}")
    if tables:
        console.result(f"tables: {', '.join(map(str, tables))}")


def print_headline(figures: StudyFigures, console: Console) -> None:
    """The report's first table, in another form where the terminal has no room for it."""
    table = headline_table(figures)
    if not table.rows:
        console.result("no cell has a figure; the report says why")
        return
    if total_width(column_widths(table.titles, table.texts)) <= console.width:
        console.table(table.titles, table.texts, numeric=table.numeric)
        return
    for line in narrow_lines(headline(figures), figures.devices_word, console.width):
        console.result(line)


def print_verdict(figures: StudyFigures, console: Console) -> None:
    """Print the verdict of the study, at most `VERDICT_LINES` lines a workload, and what to run next."""
    found = verdict(figures)
    console.result()
    for one in found.workloads:
        named = [one.workload] if len(found.workloads) > 1 and one.answer is None else []
        lead = f"{one.workload}: " if len(found.workloads) > 1 else ""
        for line in textwrap.wrap(f"{lead}{one.answer}", console.width) if one.answer else ():
            console.result(line)
        for line in [*named, *clause_lines([*brief(one)], console.width, VERDICT_LINES - len(named))]:
            console.result(line)
    if any(size.absent == CPU for one in found.workloads for size in one.to_buy):
        console.result(f"No size to buy is named, because {CPU}.")
    if figures.failures:
        missing = f"{len(figures.failures):,} of {count(len(figures.pools), 'cell')}"
        failed = [one for one in figures.failures if one.runs]
        clause = f"without a figure: {missing}: {failures_text(figures.failures)}"
        for line in [
            *textwrap.wrap(clause, console.width),
            *(command_lines(figures.logs_call(failed[0].cell.id), console.width) if failed else ()),
        ]:
            console.result(line)
    for line in textwrap.wrap(figures.review_text, console.width):
        console.result(line)
    if found.next_run is not None:
        told = f"next: {found.next_run.order}, since {found.next_run.why}:"
        for line in [
            *textwrap.wrap(told, console.width),
            *command_lines(found.next_run.command, console.width),
        ]:
            console.result(line)
    console.result()


def clause_lines(clauses: Sequence[Clause], width: int, most: int) -> list[str]:
    """The clauses in at most `most` lines; clauses without room are only in the report."""
    pad = max((len(one.title) for one in clauses), default=0) + len(GAP)
    wrapped = {
        id(one): textwrap.wrap(
            f"{one.title.ljust(pad)}{one.text}", width, subsequent_indent=" " * pad, break_on_hyphens=False
        )
        for one in clauses
    }
    kept: set[int] = set()
    for one in sorted(clauses, key=lambda one: one.rank):
        if sum(len(wrapped[each]) for each in (*kept, id(one))) <= most:
            kept.add(id(one))
    return [line for one in clauses if id(one) in kept for line in wrapped[id(one)]]


def command_lines(command: str, width: int) -> list[str]:
    """A command in lines that a shell takes as one: broken before options, each line but the last ends in a
    backslash."""
    pieces = [f" --{piece}" if number else piece for number, piece in enumerate(command.split(" --"))]
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1] + piece) > width - 4:
            lines.append(f"   {piece}")
        else:
            lines[-1] += piece
    return [f"  {line} \\" for line in lines[:-1]] + [f"  {lines[-1]}"]
