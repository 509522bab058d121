"""`bench export`: write a study as Markdown, CSV, JSON, Parquet or LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.compare_over import compare_over
from harness.cli.cost_options import cost_options

if TYPE_CHECKING:
    from harness.terminal.console import Console
    from reports.analysis.study import StudyFigures

FORMATS = ("markdown", "csv", "json", "parquet", "latex")
TABLES = ("cells", "runs", "ranks", "losses", "skips")


@click.command(name="export")
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True)
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="what to make")
@click.option("--table", type=click.Choice(TABLES), help="one table of CSV or Parquet, not all of them")
@click.option("-o", "--output", metavar="PATH", help="a file; for CSV and Parquet without --table, a folder")
@click.option("--redact", is_flag=True, help="without hosts, users, paths, addresses and device ids")
@compare_over
@cost_options
def command(
    studies: tuple[str, ...],
    form: str,
    table: str | None,
    output: str | None,
    *,
    redact: bool,
    **others: Any,
) -> int:
    """Write STUDY (a folder), or several, as Markdown, CSV, JSON, Parquet or LaTeX (docs/exports.md).

    Markdown, JSON and LaTeX, and one --table of CSV, go to stdout where no --output is given.
    """
    from harness.reporting.studies import CostFlags, compared_over, read_figures
    from harness.terminal.console import Console

    over = others.pop("compare_over")
    _check(form, table, output)
    _check_over(form, over)
    console = Console()
    figures = read_figures(studies, CostFlags(**others), console, redact=redact)
    figures = compared_over(figures, over)
    if form in ("csv", "parquet"):
        _tables(figures, form, table, output, console)
    else:
        _text(figures, form, output, console)
    return 0


def _check(form: str, table: str | None, output: str | None) -> None:
    """Refuse a call that does not say where its output goes, before anything is read."""
    from results.errors import UsageError

    if form in ("markdown", "json", "latex"):
        if table is not None:
            raise UsageError(f"--table {table} is for csv and parquet; {form} is one text")
    elif output is None and form == "parquet":
        raise UsageError("parquet is no text: give --output FOLDER, or --table NAME and --output FILE")
    elif output is None and table is None:
        raise UsageError(f"csv is {len(TABLES)} tables: give --output FOLDER, or --table {'|'.join(TABLES)}")


def _check_over(form: str, compare_over: str | None) -> None:
    from results.errors import UsageError

    if compare_over is not None and form not in ("markdown", "json"):
        raise UsageError(
            f"--compare-over {compare_over} is for markdown and json; {form} has every cell with its settings"
        )


def _text(studies: Sequence[StudyFigures], form: Any, output: str | None, console: Console) -> None:
    from reports.page.export import export_text

    _put(export_text(studies, form).encode(), output, console)


def _tables(
    studies: Sequence[StudyFigures], form: Any, table: str | None, output: str | None, console: Console
) -> None:
    from reports.page import export

    if table is not None or output is None:
        _put(export.export_table(studies, table or TABLES[0], form), output, console)
        return
    for name in TABLES:
        _put(export.export_table(studies, name, form), str(Path(output) / f"{name}.{form}"), console)


def _put(data: bytes, output: str | None, console: Console) -> None:
    """To stdout as it is, without rich; or to a file, whose name is told."""
    from results import files

    if output is None:
        click.echo(data, nl=False)
    else:
        files.replace(Path(output), data)
        console.result(output)
