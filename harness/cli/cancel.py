"""`bench cancel`: end the jobs of a study."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="cancel")
@click.argument("study")
@click.option("--forget", is_flag=True, help="close the jobs without asking the scheduler: it has lost them")
def command(study: str, *, forget: bool) -> int:
    """End all jobs of STUDY that wait or run. What they have measured stays; `bench matrix` goes on later."""
    from harness.console import Console
    from harness.jobs import standing
    from harness.jobs.documents import MANIFEST
    from reports.text import count
    from results.job_store import JobStore
    from results.lock import study_lock
    from results.store import Study
    from slurm.client import Client

    folder, console = Study.existing(Path(study)), Console()
    with study_lock(folder.root):
        if forget:
            console.result(f"{count(standing.forget(folder), 'job')} closed")
            return 0
        numbers, pods = standing.cancel(folder, Client())
    told = ", ".join(map(str, numbers))
    console.result(f"{count(len(numbers) + len(pods), 'job')} cancelled{': ' if told else ''}{told}")
    for job_id in pods:
        console.result(f"kubectl delete -f {JobStore(folder.root).folder(job_id) / MANIFEST}")
    return 0
