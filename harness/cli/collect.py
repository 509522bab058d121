"""`bench collect`: derive all results again from the rank records."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="collect")
@click.argument("study")
def command(study: str) -> int:
    """Delete what was derived in STUDY and derive it anew from the rank records, which are never touched.

    Jobs that have ended without a word are closed first, in the scheduler's words.
    """
    from harness.launchers.study_jobs import job_statuses
    from harness.reporting.studies import warn_of_losses
    from harness.terminal.console import Console
    from reports.text import count
    from results.errors import SchedulerError
    from results.lock import study_lock
    from results.store import Study

    folder, console = Study.existing(Path(study)), Console()
    with study_lock(folder.root):
        try:
            job_statuses(folder)
        except SchedulerError as error:
            # A study that was copied here has jobs that this machine cannot ask about.
            console.warn(f"the scheduler was not asked: {error}")
        warn_of_losses(folder, console)
        folder.forget_derived()
        results = folder.collect()
    console.result(f"{count(len(results), 'run')} in {folder.root / 'index.jsonl'}")
    return 0
