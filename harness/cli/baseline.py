"""`bench baseline`: keep accepted figures with the code."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.option(
    "--baselines",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("baselines"),
    help="where they are kept",
)


@click.group(name="baseline")
def baseline_command() -> None:
    """Baselines are small JSON files, tracked with the code: figures, facts of the machine, a commit.

    `bench compare NAME runs/new` compares a study with one.
    """


@baseline_command.command(name="save")
@click.argument("name")
@click.argument("side", metavar="STUDY")
@_FOLDER
def _save(name: str, side: str, folder: Path) -> int:
    """Keep the figures of STUDY (or of files of pytest-benchmark) as the baseline NAME."""
    from harness.gate.baselines import read_side, require_idle, save, warn_of_edits, warn_of_failures
    from harness.terminal.console import Console

    console = Console()
    require_idle(side)
    kept = read_side(side, folder, console)
    console.result(str(save(name, kept, folder)))
    warn_of_edits(kept, console)
    warn_of_failures(kept, console)
    return 0


@baseline_command.command(name="list")
@_FOLDER
def _list(folder: Path) -> int:
    """List the baselines, with commit, age and number of cells."""
    from harness.gate.baselines import baseline_paths
    from harness.terminal.console import Console
    from reports.text import moment
    from results import schemas
    from results.errors import SchemaError

    console = Console()
    kept, damaged = [], 0
    for path in baseline_paths(folder):
        try:
            kept.append(schemas.BASELINE.read(path))
        except SchemaError as error:
            console.warn(str(error))
            damaged += 1
    if not kept and not damaged:
        console.result(f"no baseline in {folder}/; keep one with bench baseline save NAME STUDY")
        return 0
    rows = [
        (
            one.name,
            (one.commit or "-")[:12],
            moment(one.measured_at),
            str(len(one.subjects)),
            str(len(one.accepted)),
        )
        for one in kept
    ]
    heads = ("baseline", "commit", "measured", "cells", "accepted changes")
    console.table(heads, rows, numeric=[False, False, False, True, True])
    return int(damaged > 0)


@baseline_command.command(name="show")
@click.argument("name")
@_FOLDER
def _show(name: str, folder: Path) -> int:
    """Show a baseline: its cells with their figures, and what was accepted with which reason."""
    from harness.gate.baselines import read_side
    from harness.terminal.console import Console
    from reports.gate.text import accepted_sentence, baseline_sentences, baseline_table

    kept, console = read_side(name, folder), Console()
    for sentence in baseline_sentences(kept):
        console.sentence(sentence)
    table = baseline_table(kept)
    console.table(table.titles, table.texts, numeric=table.numeric)
    for one in kept.accepted:
        console.sentence(accepted_sentence(one))
    return 0


@baseline_command.command(name="promote")
@click.argument("name")
@click.argument("side", metavar="STUDY")
@click.option("--reason", required=True, help="why the change is right")
@click.option(
    "--cell", "cells", multiple=True, metavar="NAME", help="only cells of this id, strategy, size or label"
)
@click.option(
    "--remove",
    multiple=True,
    metavar="NAME",
    help="remove the baseline's cells of this name that STUDY does not have",
)
@click.option("--reviewed", is_flag=True, help="only if bench review has approved STUDY as it is")
@_FOLDER
def _promote(
    name: str, side: str, folder: Path, *, reason: str, reviewed: bool, **names: tuple[str, ...]
) -> int:
    """Accept the figures of STUDY: they replace the figures of the baseline.

    Cells of the baseline that STUDY does not have stay, unless --remove names them.
    """
    from harness.gate.baselines import promote, read_side, require_approval, require_idle, warn_of_edits
    from harness.terminal.console import Console
    from reports.gate.text import accepted_sentence

    console = Console()
    require_idle(side)
    if reviewed:
        require_approval(side)
    figures = read_side(side, folder, console)
    path, accepted = promote(name, figures, reason, names["cells"], names["remove"], folder)
    console.result(str(path))
    for one in accepted:
        console.sentence(accepted_sentence(one))
    warn_of_edits(figures, console)
    return 0
