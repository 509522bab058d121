"""Writing a study's report and tables, and printing its headline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.terminal.console import Console
from harness.terminal.narrow import narrow_lines
from harness.terminal.table_text import GAP, column_widths, total_width
from reports.analysis.headline import headline, headline_table
from reports.analysis.size_to_buy import CPU
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import Record, StudyVerdict, verdict
from reports.text import capital
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
    for line in _verdict_lines(figures, found, console.width):
        console.result(line)
    console.result()


def _verdict_lines(figures: StudyFigures, found: StudyVerdict, width: int) -> Iterator[str]:
    for one in found.workloads:
        lead = f"{one.workload}: " if len(found.workloads) > 1 else ""
        told = " ".join((one.answer, *one.beside)) if one.answer else "every figure is emulated"
        yield from textwrap.wrap(f"{lead}{told}", width)
        yield from record_lines(one.records, width, VERDICT_LINES)
    if any(size.absent == CPU for one in found.workloads for size in one.to_buy):
        yield f"No size to buy is named, because {CPU}."
    yield from textwrap.wrap(capital(f"{figures.cells_text}. {figures.run_counts.text}."), width)
    if failed := [one for one in figures.failures if one.runs]:
        yield from textwrap.wrap(f"{failed[0].cell.id}: {failed[0].text}", width)
        yield from command_lines(figures.logs_call(failed[0].cell.id), width)
    yield from textwrap.wrap(figures.review_text, width)
    if found.next_run is not None:
        yield from textwrap.wrap(f"next: {found.next_run.order}, since {found.next_run.why}:", width)
        yield from command_lines(found.next_run.command, width)


def record_lines(records: Sequence[Record], width: int, most: int) -> list[str]:
    """The records in at most `most` lines; records without room are only in the report."""
    pad = max((len(one.what) for one in records), default=0) + len(GAP)
    wrapped = {
        id(one): textwrap.wrap(
            f"{one.what.ljust(pad)}{one.short}", width, subsequent_indent=" " * pad, break_on_hyphens=False
        )
        for one in records
    }
    kept: set[int] = set()
    for one in sorted(records, key=lambda one: one.rank):
        if sum(len(wrapped[each]) for each in (*kept, id(one))) <= most:
            kept.add(id(one))
    return [line for one in records if id(one) in kept for line in wrapped[id(one)]]


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
