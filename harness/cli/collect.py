"""`bench collect`: from rank records to results, all anew."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="collect")
@click.argument("study")
def command(study: str) -> int:
    """Delete what was derived in STUDY and derive it anew from the rank records, which are never touched."""
    from harness.console import Console
    from reports.text import count
    from results.lock import study_lock
    from results.store import Study

    folder = Study.existing(Path(study))
    with study_lock(folder.root):
        folder.forget_derived()
        results = folder.collect()
    Console().result(f"{count(len(results), 'run')} in {folder.root / 'index.jsonl'}")
    return 0
