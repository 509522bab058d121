"""`bench cancel`: end the jobs of a study."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="cancel")
@click.argument("study")
@click.option("--forget", is_flag=True, help="close the jobs without asking the scheduler: it has lost them")
def command(study: str, *, forget: bool) -> int:
    """End all jobs of STUDY that wait or run. What they have measured stays; `bench matrix` goes on later."""
    from harness.launchers import study_jobs
    from harness.terminal.console import Console
    from reports.text import count
    from results.lock import study_lock
    from results.store import Study

    folder, console = Study.existing(Path(study)), Console()
    with study_lock(folder.root):
        if forget:
            console.result(f"{count(study_jobs.forget(folder), 'job')} closed")
            return 0
        done = study_jobs.cancel(folder)
    told = f": {', '.join(done.told)}" if done.told else ""
    console.result(f"{count(len(done.told) + len(done.by_hand), 'job')} cancelled{told}")
    for line in done.by_hand:
        console.result(line)
    return 0
