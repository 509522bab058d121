"""`bench cancel`: end the jobs of a study."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="cancel")
@click.argument("study")
def command(study: str) -> int:
    """End all jobs of STUDY that wait or run. What they have measured stays; `bench matrix` goes on later."""
    from harness.console import Console
    from harness.jobs.standing import recover, standings
    from reports.text import count
    from results.lock import study_lock
    from results.store import Study
    from slurm.client import Client

    folder, client = Study.existing(Path(study)), Client()
    with study_lock(folder.root):
        live = [job for job in recover(folder, client, standings(folder, client)) if job.is_live]
        ids = [int(job.submission.scheduler_id) for job in live if job.submission is not None]
        client.cancel(ids)
    Console().result(f"{count(len(ids), 'job')} cancelled{': ' if ids else ''}{', '.join(map(str, ids))}")
    return 0
