"""`bench report`: write the HTML report of one study or of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.cli.compare_over import compare_over
from harness.cli.cost_options import cost_options


@click.command(name="report")
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE.html", help="where to write it, instead of STUDY/report.html")
@click.option("--redact", is_flag=True, help="without hosts, users, paths, addresses and device ids")
@click.option(
    "--history",
    metavar="FOLDER",
    help="nights of bench history add; ./history if that is there and this is left out",
)
@click.option("--figures", metavar="FORM,...", help="also drawings as files: svg, pdf, png")
@click.option(
    "--style", type=click.Choice(("paper", "screen")), help="of --figures; paper: a column of 84 mm"
)
@compare_over
@cost_options
def command(
    studies: tuple[str, ...],
    output: str | None,
    *,
    redact: bool,
    history: str | None,
    figures: str | None,
    style: Any,
    **others: Any,
) -> int:
    """Write the report of STUDY (a folder) as one HTML file, and its tables as CSV beside it.

    Several studies stand side by side in one report, which needs --output. Works where torch is not
    installed. A study that may not be written is read all the same; then the report needs --output.
    Costs need prices, which --price, --prices or the profile of the site give (docs/costs.md); GPUs that
    have none are looked up in a catalogue of list prices. --compare-over puts cells that differ in one
    setting side by side, with their loss. --figures writes drawings into STUDY/figures, with
    --output FILE.html into FILE.figures.
    """
    from harness.reporting.report import figure_forms, write_figures, write_joint_report, write_report
    from harness.reporting.studies import CostFlags, compared_over, read_figures
    from harness.terminal.console import Console
    from results.errors import UsageError
    from results.files import is_stream
    from results.store import Study

    over = others.pop("compare_over")
    if len(studies) > 1 and output is None:
        raise UsageError("a report of several studies is in none of their folders: give --output FILE.html")
    if style is not None and figures is None:
        raise UsageError(f"--style {style} is a style of drawings: give --figures svg,pdf,png as well")
    if figures is not None and output is not None and is_stream(Path(output)):
        raise UsageError(f"--figures makes a folder beside the page, and {output} is none: give -o FILE.html")
    forms = figure_forms(figures) if figures is not None else ()
    console = Console()
    nights = Path(history or "history")
    given = nights if history is not None or any(nights.glob("*/*.json")) else None
    read = read_figures(studies, CostFlags(**others), console, redact=redact, history=given)
    read = compared_over(read, over)
    if len(studies) > 1 and output is not None:
        page = Path(output)
        write_joint_report(read, console, path=page)
    else:
        page = write_report(Study(Path(studies[0])), read[0], console, path=Path(output) if output else None)
    if forms:
        write_figures(read, console, page=page, forms=forms, style=style or "screen")
    return 0
