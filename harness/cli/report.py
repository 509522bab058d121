"""`bench report` and `bench export`: the HTML report of one study or of several, or their tables in another
form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from results.features import Given, joined
from results.registry import load

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from harness.cli.options import Function
    from reports.analysis.study import StudyFigures

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_OPTIONS: tuple[_Decorator, ...] = (
    click.option("--price", type=float, metavar="USD", help="what one device (on CPU: rank) costs an hour"),
    click.option(
        "--prices",
        metavar="FILE.csv",
        help="prices by device, with columns gpu, usd_per_gpu_hour, price_date, price_source",
    ),
    click.option(
        "--epoch-samples", metavar="N", help="samples of one epoch; of several workloads WORKLOAD=N,..."
    ),
    click.option(
        "--within", metavar="TIME", help="show the cheapest cell that finishes an epoch in this time, like 4h"
    ),
    click.option(
        "--goal",
        metavar="GOAL",
        help="what the size to buy is chosen by: knee, throughput, cost, time:24h or efficiency:80%",
    ),
    click.option(
        "--smallest-effect", metavar="SHARE", help="differences below it are not called faster or slower (2%)"
    ),
    click.option("--unproven", is_flag=True, help="choose also cells that are not proven, and say so"),
)


def cost_options(function: Function, options: Sequence[_Decorator] = _OPTIONS) -> Function:
    """Decorate a command with the flags of `harness.reporting.assumptions.CostFlags` (None: not given)."""
    for option in reversed(options):
        function = option(function)
    return function


def price_options(function: Function) -> Function:
    """Decorate a command with the flags that say what a device costs and what an epoch is."""
    return cost_options(function, _OPTIONS[:3])


def _given(command: str) -> dict[str, Given]:
    """The options that features add to a command, in the order of their names."""
    every = sorted(joined(lambda one: one.given).items())
    return {name: one for name, one in every if command in one.commands}


def given_options(command: str) -> _Decorator:
    """A decorator with the options by which features are given files and folders."""
    every = _given(command).items()
    options = [click.option(f"--{name}", metavar=one.metavar, help=one.help) for name, one in every]
    return lambda function: cost_options(function, options)


def given_files(command: str, options: dict[str, Any]) -> dict[str, str]:
    """Take the options of features out of the options of a call; a missing option may have a default."""
    found = {
        name: options.pop(name) or (load(one.default)() if one.default else None)
        for name, one in _given(command).items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _settings() -> click.Choice[str]:
    # Loaded where a name is given or completed, since the help of a command is to load nothing heavy.
    from harness.plan.study_file import SETTINGS

    return click.Choice([name.replace("_", "-") for name in SETTINGS])


def _known(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return None if value is None else _settings().convert(value, param, ctx)


def _completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _settings().shell_complete(ctx, param, incomplete)


compare_over = click.option(
    "--compare-over",
    metavar="SETTING",
    callback=_known,
    shell_complete=_completed,
    help="put cells that differ only in this side by side, with their loss: precision, optimizer, ...",
)


@click.command(name="report")
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE.html", help="where to write it, instead of STUDY/report.html")
@click.option("--redact", is_flag=True, help="without hosts, users, paths, addresses and device ids")
@given_options("report")
@click.option("--figures", metavar="FORM,...", help="also drawings as files: svg, pdf, png")
@click.option(
    "--style", type=click.Choice(("paper", "screen")), help="style of --figures; paper is a column of 84 mm"
)
@click.option("--watch", is_flag=True, help="write it again as cells end, until the study no longer runs")
@compare_over
@cost_options
def report_command(
    studies: tuple[str, ...],
    output: str | None,
    *,
    redact: bool,
    figures: str | None,
    style: Any,
    **others: Any,
) -> int:
    """Write the report of STUDY (a folder) as one HTML file, and its tables as CSV in the same folder.

    Several studies are side by side in one report, which needs --output. Works where torch is not
    installed. A study in a read-only folder is read as well; then the report needs --output.
    Costs need prices, which --price, --prices or the profile of the site give (docs/costs.md); other GPUs
    are looked up in a catalogue of list prices. --compare-over puts cells that differ in one
    setting side by side, with their loss. --figures writes drawings into STUDY/figures, with
    --output FILE.html into FILE.figures. With --watch the open page shows what runs, and becomes the
    page of the finished study by itself.
    """
    from dataclasses import replace

    from harness.cli.study import running_cells
    from harness.reporting.assumptions import CostFlags
    from harness.reporting.extra_files import figure_forms, write_figures, write_joint_report
    from harness.reporting.report import write_report
    from harness.reporting.studies import compared_over, read_figures
    from harness.terminal.console import Console
    from results.errors import UsageError
    from results.files import is_stream
    from results.store import Study

    over, watch, given = others.pop("compare_over"), others.pop("watch"), given_files("report", others)
    if watch and (len(studies) > 1 or redact):
        raise UsageError("--watch follows one study while it runs, and does not redact it: name one study")
    if len(studies) > 1 and output is None:
        raise UsageError("a report of several studies is in none of their folders: give --output FILE.html")
    if style is not None and figures is None:
        raise UsageError(f"--style {style} is a style of drawings: give --figures svg,pdf,png as well")
    if figures is not None and output is not None and is_stream(Path(output)):
        raise UsageError(f"--figures makes a folder next to the page: give -o FILE.html, not {output}")
    forms = figure_forms(figures) if figures is not None else ()
    console = Console()
    if watch:
        console.note(
            f"{output or Path(studies[0], 'report.html')} follows the study until it ends, or Ctrl-C"
        )
    states = running_cells(Study.existing(Path(studies[0])), console) if watch else [()]
    for running in states:
        read = read_figures(studies, CostFlags(**others), console, redact=redact, given=given)
        read = [replace(one, running=running) for one in compared_over(read, over)]
        if running:
            write_report(Study(Path(studies[0])), read[0], console, path=Path(output) if output else None)
    if len(studies) > 1 and output is not None:
        page = Path(output)
        write_joint_report(read, console, path=page)
    else:
        page = write_report(Study(Path(studies[0])), read[0], console, path=Path(output) if output else None)
    if forms:
        write_figures(read, console, page=page, forms=forms, style=style or "screen")
    return 0


FORMATS = ("markdown", "csv", "json", "parquet", "latex")
TABLES = ("cells", "runs", "ranks", "losses", "skips")
TARGETS = joined(lambda one: one.targets)


@click.command(name="export")
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True)
@click.option("--format", "form", type=click.Choice(FORMATS), help="what to make")
@click.option("--to", type=click.Choice([*TARGETS]), help="send each cell as a run to this tracker instead")
@click.option("--table", type=click.Choice(TABLES), help="one table of CSV or Parquet, not all of them")
@click.option("-o", "--output", metavar="PATH", help="a file; for CSV and Parquet without --table, a folder")
@click.option("--redact", is_flag=True, help="without hosts, users, paths, addresses and device ids")
@compare_over
@cost_options
def export_command(
    studies: tuple[str, ...],
    form: str | None,
    to: str | None,
    table: str | None,
    output: str | None,
    *,
    redact: bool,
    **others: Any,
) -> int:
    """Write STUDY (a folder), or several, as Markdown, CSV, JSON, Parquet or LaTeX (docs/exports.md).

    Markdown, JSON and LaTeX, and one --table of CSV, go to stdout where no --output is given. With --to each
    cell becomes a run of a tracker.
    """
    from harness.reporting.assumptions import CostFlags
    from harness.reporting.studies import compared_over, read_figures
    from harness.terminal.console import Console
    from results import files

    over = others.pop("compare_over")
    _check_choice(form, to, table or output or over)
    if form is not None:
        _check(form, table, output, over)
    console = Console()
    figures = read_figures(studies, CostFlags(**others), console, redact=redact)
    figures = compared_over(figures, over)
    if to is not None:
        for one, root in zip(figures, studies, strict=True):
            console.result(load(TARGETS[to])(one, Path(root), redact=redact))
        return 0
    for path, data in _exported(figures, form, table, output):
        if path is None:
            # rich would wrap or style the data: print it unchanged.
            click.echo(data, nl=False)
        else:
            files.replace(Path(path), data)
            console.result(path)
    return 0


def _check_choice(form: str | None, to: str | None, other: str | None) -> None:
    """Refuse a call with neither a form nor a tracker, or with a tracker and options of forms."""
    from results.errors import UsageError

    if (form is None) == (to is None) or (to and other):
        choice, tracker = "|".join(FORMATS), "|".join(TARGETS)
        raise UsageError(
            f"give --format {choice}, or --to {tracker} without --table, --output and --compare-over"
        )


def _check(form: str, table: str | None, output: str | None, compare_over: str | None) -> None:
    """Refuse a call that does not say where its output goes, before anything is read."""
    from results.errors import UsageError

    if form in ("markdown", "json", "latex"):
        if table is not None:
            raise UsageError(f"--table {table} is for csv and parquet; {form} is one text")
    elif output is None and form == "parquet":
        raise UsageError("parquet is binary: give --output FOLDER, or --table NAME and --output FILE")
    elif output is None and table is None:
        raise UsageError(f"csv is {len(TABLES)} tables: give --output FOLDER, or --table {'|'.join(TABLES)}")
    if compare_over is not None and form not in ("markdown", "json"):
        raise UsageError(
            f"--compare-over {compare_over} is for markdown and json; {form} has every cell with its settings"
        )


def _exported(
    studies: Sequence[StudyFigures], form: Any, table: str | None, output: str | None
) -> Iterator[tuple[str | None, bytes]]:
    """Each file of an export with its path; without a path it goes to stdout."""
    from reports.page.export import export_text
    from reports.page.tables import export_table

    if form not in ("csv", "parquet"):
        yield output, export_text(studies, form).encode()
    elif table is not None or output is None:
        yield output, export_table(studies, table or TABLES[0], form)
    else:
        for name in TABLES:
            yield str(Path(output) / f"{name}.{form}"), export_table(studies, name, form)
