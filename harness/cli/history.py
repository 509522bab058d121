"""`bench history`: nights, and where they changed."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("history"), help="where the nights are kept"
)


@click.group(name="history")
def history_command() -> None:
    """Nights of the same study on the same machine, and on which of them a figure changed (docs/gate.md)."""


@history_command.command(name="add")
@click.argument("side", metavar="[STUDY]", default="@latest")
@click.option(
    "--on-regression",
    metavar="CMD",
    help="run CMD by sh if this night shows a change for the worse; BENCH_VERDICT is the path of its JSON",
)
@_FOLDER
def _add(side: str, folder: Path, *, on_regression: str | None) -> int:
    """Add STUDY (or files of pytest-benchmark) as a night, and print the changes that this night is the first
    to show.

    Without STUDY, the newest study of bench matrix --fresh. A night is never changed after it was added.
    """
    from harness.gate.baselines import LATEST, latest, read_side, warn_of_edits
    from harness.gate.nights import require_ended, set_off
    from harness.terminal.console import Console
    from reports.gate.text import changes_json, step_sentence
    from reports.gate.trends import WATCHED, seen_on, trends
    from results.history import add_night, later_nights, read_nights

    console = Console()
    side = str(latest(side)) if side.endswith(LATEST) else side
    if list(Path(side).glob("plan-*.json")):
        require_ended(Path(side))
    night = read_side(side, console=console)
    added = add_night(night, folder)
    warn_of_edits(night, console)
    for path in added:
        console.result(str(path))
        for later in later_nights(path)[:1]:
            console.warn(
                f"{later} was measured after this night and is there already, and nights are ordered by the "
                f"clock: if the clock went back, remove {path}; if it was ahead then, remove {later}"
            )
    nights, damaged = read_nights(folder)
    for sentence in damaged:
        console.warn(sentence)
    here = {path.parent.name: nights[path.parent.name] for path in added}
    found = seen_on(night.measured_at, trends(here, WATCHED))
    for trend, step in found:
        console.result(step_sentence(trend, step))
    if on_regression is not None and any(step.is_worse for _, step in found):
        wrong = set_off(on_regression, changes_json(found))
        if wrong:
            console.warn(wrong)
    return 0


@history_command.command(name="show")
@click.option("--metric", "metrics", multiple=True, metavar="METRIC", help="default: step_time and time")
@click.option(
    "--cell", "words", default="", metavar="WORDS", help="only cells with these words in their name"
)
@_FOLDER
def _show(metrics: tuple[str, ...], words: str, folder: Path) -> int:
    """Show each series with its last figure, and each change with its nights, commits and environment."""
    from harness.terminal.console import Console
    from reports.gate.metrics import TIMED
    from reports.gate.text import step_sentence, trend_table
    from reports.gate.trends import WATCHED, trends
    from results.errors import UsageError, nearest
    from results.history import read_nights

    for name in metrics:
        if name not in TIMED:
            raise UsageError(f"--metric {name}{nearest(name, TIMED)}: metrics are {', '.join(TIMED)}")
    console = Console()
    nights, damaged = read_nights(folder)
    for sentence in damaged:
        console.warn(sentence)
    every = trends(nights, metrics or WATCHED)
    found = [one for one in every if words in one.label]
    if every and not found:
        labels = "; ".join(sorted({one.label for one in every}))
        raise UsageError(f"--cell {words}: no series has that in its name; there are {labels}")
    if not found:
        console.result("no series has a figure")
        return 0
    table = trend_table(found)
    console.table(table.titles, table.texts, numeric=table.numeric)
    for one in found:
        for step in one.steps:
            console.result(step_sentence(one, step))
    return 0
