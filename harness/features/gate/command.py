"""`bench compare`, `baseline`, `history` and `prune`: their options, and what the short ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.features.gate.baselines import (
    LATEST,
    baseline_paths,
    latest,
    promote,
    read_side,
    require_approval,
    save,
    warn_of_edits,
    warn_of_failures,
)
from harness.features.gate.metrics import TIMED
from harness.features.gate.nights import nights_in, require_ended, set_off
from harness.features.gate.prune import prune
from harness.features.gate.records.baseline import BASELINE
from harness.features.gate.records.history import add_night, later_nights
from harness.features.gate.text import (
    FACES,
    accepted_sentence,
    baseline_sentences,
    baseline_table,
    changes_json,
    step_sentence,
    trend_table,
)
from harness.features.gate.trends import WATCHED, seen_on, trends
from harness.terminal.console import Console
from reports.text import moment
from results.errors import SchemaError, UsageError, nearest
from results.files import require_idle

_PATH = click.Path(path_type=Path)
_BASELINES = click.option(
    "--baselines", "folder", type=_PATH, default=Path("baselines"), help="where they are kept"
)
_HISTORY = click.option("--folder", type=_PATH, default=Path("history"), help="where the nights are kept")


@click.command(name="compare")
@click.argument("sides", nargs=-1, metavar="BASE NEW [-- MATRIX OPTIONS]")
@click.option("--ab", is_flag=True, help="BASE and NEW are revisions: run them side by side, in short blocks")
@click.option("--base-options", metavar="TEXT", default="", help="with --ab: matrix options of BASE only")
@click.option("--new-options", metavar="TEXT", default="", help="with --ab: matrix options of NEW only")
@click.option("--base-python", metavar="PATH", help="with --ab: interpreter of BASE, instead of this one")
@click.option("--new-python", metavar="PATH", help="with --ab: interpreter of NEW, instead of this one")
@click.option(
    "--looks",
    type=click.IntRange(1, 4),
    help="with --ab: maximum number of looks, of 6 pairs each; 4 if left out",
)
@click.option(
    "--alternate",
    type=click.Choice(("blocks", "launches")),
    help="with --ab: blocks, or whole launches where both sides do not fit in memory; blocks if left out",
)
@click.option(
    "--others-above",
    metavar="PERCENT",
    help="with --ab: leave out quads in which other processes took more of the cores; 25% if left out",
)
@click.option("--max-time", metavar="TIME", help="with --ab: begin no further pair after this, such as 3m")
@click.option("--out", type=_PATH, help="with --ab: folder of the records; runs/ab-TIME if left out")
@click.option(
    "--again",
    type=_PATH,
    help="decide again from the records of a --ab, by the rules of its last call; runs nothing",
)
@click.option(
    "--fail-above",
    multiple=True,
    metavar="METRIC=PERCENT",
    help="the smallest change that matters, such as step_time=5%; may be repeated",
)
@click.option(
    "--across",
    metavar="FACTS",
    default="",
    help="facts that may differ because they are what is compared, such as torch,python",
)
@click.option("--strict", is_flag=True, help="exit with 1 where something is inconclusive, too")
@click.option("--all", "every", is_flag=True, help="list what is unchanged, too")
@click.option(
    "--format",
    "forms",
    multiple=True,
    metavar="FORM=FILE",
    help=f"write it for CI, too: {', '.join(FACES)}; FORM alone goes to stdout; may be repeated",
)
@click.option("--json", "as_json", is_flag=True, help="the same as --format json, on stdout")
@click.option(
    "--on-regression",
    metavar="CMD",
    help="run CMD by sh if the exit code is 1; BENCH_VERDICT is the path of the verdicts as JSON",
)
@click.option("--baselines", type=_PATH, default=Path("baselines"), help="folder of kept baselines")
def compare_command(
    sides: tuple[str, ...], *, fail_above: tuple[str, ...], across: str, baselines: Path, **given: Any
) -> int:
    """Compare NEW with BASE: studies, runs, kept baselines, or files of pytest-benchmark (docs/gate.md).

    With --ab they are git revisions, measured now: bench compare --ab main HEAD -- --gpus 2. `.` is the
    working tree as it is.

    Exit codes: 0 nothing regressed, 1 something regressed, changed, failed or is missing, 2 no
    verdict: the call is wrong or a file is damaged, 3 nothing regressed and something is incomparable, or
    nothing was compared.
    """
    from harness.features.gate.compare import compare

    return compare(sides, fail_above, across, baselines, given)


@click.group(name="baseline")
def baseline_command() -> None:
    """Baselines are small JSON files, tracked with the code: figures, facts of the machine, a commit.

    `bench compare NAME runs/new` compares a study with one.
    """


@baseline_command.command(name="save")
@click.argument("name")
@click.argument("side", metavar="STUDY")
@_BASELINES
def _save_baseline(name: str, side: str, folder: Path) -> int:
    """Keep the figures of STUDY (or of files of pytest-benchmark) as the baseline NAME."""
    console = Console()
    require_idle(Path(side))
    kept = read_side(side, folder, console)
    console.result(str(save(name, kept, folder)))
    warn_of_edits(kept, console)
    warn_of_failures(kept, console)
    return 0


@baseline_command.command(name="list")
@_BASELINES
def _list_baselines(folder: Path) -> int:
    """List the baselines, with commit, age and number of cells."""
    console = Console()
    rows, damaged = [], 0
    for path in baseline_paths(folder):
        try:
            one = BASELINE.read(path)
        except SchemaError as error:
            console.warn(str(error))
            damaged += 1
            continue
        counts = str(len(one.subjects)), str(len(one.accepted))
        rows.append((one.name, (one.commit or "-")[:12], moment(one.measured_at), *counts))
    if not rows and not damaged:
        console.result(f"no baseline in {folder}/; keep one with bench baseline save NAME STUDY")
        return 0
    heads = ("baseline", "commit", "measured", "cells", "accepted changes")
    console.table(heads, rows, numeric=[False, False, False, True, True])
    return int(damaged > 0)


@baseline_command.command(name="show")
@click.argument("name")
@_BASELINES
def _show_baseline(name: str, folder: Path) -> int:
    """Show a baseline: its cells with their figures, and what was accepted with which reason."""
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
@_BASELINES
def _promote_baseline(
    name: str, side: str, folder: Path, *, reason: str, reviewed: bool, **names: tuple[str, ...]
) -> int:
    """Accept the figures of STUDY: they replace the figures of the baseline.

    Cells of the baseline that STUDY does not have stay, unless --remove names them.
    """
    console = Console()
    require_idle(Path(side))
    if reviewed:
        require_approval(side)
    figures = read_side(side, folder, console)
    path, accepted = promote(name, figures, reason, names["cells"], names["remove"], folder)
    console.result(str(path))
    for one in accepted:
        console.sentence(accepted_sentence(one))
    warn_of_edits(figures, console)
    return 0


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
@_HISTORY
def _add_night(side: str, folder: Path, *, on_regression: str | None) -> int:
    """Add STUDY (or files of pytest-benchmark) as a night, and print the changes that this night is the first
    to show.

    Without STUDY, the newest study of bench matrix --fresh. A night is never changed after it was added.
    """
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
    nights = nights_in(folder, console)
    here = {path.parent.name: nights[path.parent.name] for path in added}
    found = seen_on(night.measured_at, trends(here, WATCHED))
    for trend, step in found:
        console.result(step_sentence(trend, step))
    if on_regression is not None and any(step.is_worse for _, step in found):
        set_off(on_regression, changes_json(found), console)
    return 0


@history_command.command(name="show")
@click.option("--metric", "metrics", multiple=True, metavar="METRIC", help="default: step_time and time")
@click.option(
    "--cell", "words", default="", metavar="WORDS", help="only cells with these words in their name"
)
@_HISTORY
def _show_history(metrics: tuple[str, ...], words: str, folder: Path) -> int:
    """Show each series with its last figure, and each change with its nights, commits and environment."""
    if unknown := [name for name in metrics if name not in TIMED]:
        [name, *_] = unknown
        raise UsageError(f"--metric {name}{nearest(name, TIMED)}: metrics are {', '.join(TIMED)}")
    console = Console()
    every = trends(nights_in(folder, console), metrics or WATCHED)
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


@click.command(name="prune")
@click.argument("folder", type=_PATH, default=Path("runs"))
@click.option("--keep", required=True, metavar="TIME", help="studies younger than this stay, such as 30d")
@click.option("--yes", is_flag=True, help="remove them; without it they are only listed")
@click.option(
    "--baselines", type=_PATH, help="kept baselines; baselines/ here and next to FOLDER if left out"
)
@click.option("--history", type=_PATH, help="kept nights; history/ here and next to FOLDER if left out")
def prune_command(folder: Path, *, keep: str, yes: bool, baselines: Path | None, history: Path | None) -> int:
    """List the studies in FOLDER (runs/) that are older than --keep, and remove them with --yes.

    A study that a baseline or a night was made from stays, and so does one that works, has a live job or has
    checkpoints of training. A paired comparison (ab-TIME) goes or stays with all of its studies.
    """
    return prune(folder, keep, yes=yes, baselines=baselines, history=history)
