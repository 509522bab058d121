"""`bench prune`: remove old studies."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="prune")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--keep", required=True, metavar="TIME", help="studies younger than this stay, such as 30d")
@click.option("--yes", is_flag=True, help="remove them; without it they are only listed")
@click.option(
    "--baselines",
    type=click.Path(path_type=Path),
    help="kept baselines; baselines/ here and beside FOLDER if left out",
)
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    help="kept nights; history/ here and beside FOLDER if left out",
)
def command(folder: Path, *, keep: str, yes: bool, baselines: Path | None, history: Path | None) -> int:
    """List the studies in FOLDER (runs/) that are older than --keep, and remove them with --yes.

    A study that a baseline or a night was made from stays, and so does one that works, has a live job or has
    checkpoints of training. A paired comparison (ab-TIME) goes or stays with all of its studies.
    """
    from harness.gate.prune import (
        DAY_S,
        candidates,
        finish_removals,
        kept_folders,
        named_studies,
        remove,
    )
    from harness.plan.options import read_duration_s
    from harness.terminal.console import Console
    from reports.text import size

    console = Console()
    named = named_studies(
        kept_folders(baselines, "baselines", folder), kept_folders(history, "history", folder)
    )
    keep_s = read_duration_s(keep, "--keep", readings="d")
    if yes:
        finish_removals(folder)
    found = candidates(folder, keep_s=keep_s, named=named)
    rows = []
    for one in found:
        if one.kept is None and yes:
            remove(one.root)
        fate = f"stays: {one.kept}" if one.kept else "removed" if yes else "would be removed"
        rows.append((one.root.name, f"{one.age_s / DAY_S:.1f}", size(one.size_bytes), fate))
    console.table(("study", "days", "size", "what"), rows, numeric=[False, True, True, False])
    going = [one for one in found if one.kept is None]
    if not going:
        console.result(f"nothing goes: each is younger than {keep.strip()}, or is needed")
    if going and not yes:
        freed = size(sum(one.size_bytes for one in going))
        console.result(
            f"{len(going)} of {len(found)} studies would go, older than {keep.strip()}, {freed}: add --yes "
            f"to remove them"
        )
    return 0
