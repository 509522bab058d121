"""`bench history`: nights, and where they changed."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("history"), help="where the nights are kept"
)


@click.group(name="history")
def command() -> None:
    """Nights of the same study on the same machine, and on which of them a figure changed (docs/gate.md)."""


@command.command(name="add")
@click.argument("side", metavar="STUDY")
@_FOLDER
def _add(side: str, folder: Path) -> int:
    """Add STUDY (or files of pytest-benchmark) as a night. Nothing that was added is ever changed."""
    from harness.console import Console
    from harness.gate import read_side
    from results.history import add_night

    console = Console()
    for path in add_night(read_side(side), folder):
        console.result(str(path))
    return 0


@command.command(name="show")
@click.option("--metric", "metrics", multiple=True, metavar="METRIC", help="default: step_time and time")
@click.option(
    "--cell", "words", default="", metavar="WORDS", help="only cells with these words in their name"
)
@_FOLDER
def _show(metrics: tuple[str, ...], words: str, folder: Path) -> int:
    """Show each series with its last figure, and each change with its nights, commits and environment."""
    from harness.console import Console
    from reports.gate.metrics import TIMED
    from reports.gate.text import TRENDS, step_sentence, trend_row
    from reports.gate.trends import trends
    from results.errors import UsageError, nearest
    from results.history import read_nights

    for name in metrics:
        if name not in TIMED:
            raise UsageError(f"--metric {name}{nearest(name, TIMED)}: metrics are {', '.join(TIMED)}")
    console = Console()
    nights, damaged = read_nights(folder)
    for sentence in damaged:
        console.warn(sentence)
    found = [one for one in trends(nights, metrics or ("step_time", "time")) if words in one.label]
    if not found:
        console.result("no series has a figure")
        return 0
    console.table(TRENDS, [trend_row(one) for one in found], numeric=[False, False, False, True, True, True])
    for one in found:
        for step in one.steps:
            console.result(step_sentence(one, step))
    return 0
