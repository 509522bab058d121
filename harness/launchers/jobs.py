"""The jobs of a study, of all launchers that make jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.jobs.closing import close, kept_status
from harness.jobs.job_status import Cancelled, JobStatus
from harness.launchers.launcher import JobLauncher
from harness.launchers.registry import launcher, launchers
from harness.plan.launchers import launcher_help
from results.errors import SchedulerError
from results.job import Job
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.store import Study


def job_launcher(name: str) -> JobLauncher:
    """The launcher that has made a job. Raises SchedulerError if it is not installed here."""
    found = launcher(name) if name in launcher_help() else None
    if not isinstance(found, JobLauncher):
        makers = [each.name for each in launchers() if isinstance(each, JobLauncher)]
        raise SchedulerError(
            f"a job of the study was made by the launcher {name!r}, which is not installed here (launchers "
            f"that make jobs: {', '.join(makers)}): install it, or close the jobs: bench cancel --forget"
        )
    return found


def job_statuses(study: Study, *, settle: bool = False) -> list[JobStatus]:
    """All jobs, oldest first. Each scheduler is asked once, about those that have not ended.

    The end of a job is recorded, with the launches that it left open: its scheduler will forget it. With
    `settle`, under the study's lock, jobs without a recorded submission are looked up by name. Raises
    SchedulerError if a scheduler does not answer, or is not the one that has the jobs.
    """
    return _of_each(study, lambda name, jobs: job_launcher(name).asked(study, jobs, settle=settle))


def kept_job_statuses(study: Study) -> list[JobStatus]:
    """All jobs by their records, oldest first. No scheduler is asked."""

    store = JobStore(study.root)

    def kept(name: str, jobs: Sequence[Job]) -> Sequence[JobStatus]:
        try:
            return job_launcher(name).kept(study, jobs)
        except SchedulerError:
            # The launcher would know more, but the records can be read without it.
            return [kept_status(store, job) for job in jobs]

    return _of_each(study, kept)


def cancel(study: Study) -> Cancelled:
    """End the live jobs of a study, under its lock. Raises SchedulerError if a scheduler does not answer."""
    live = [status for status in job_statuses(study, settle=True) if status.is_live]
    done = [
        job_launcher(name).cancel(study, [status for status in live if status.job.launcher == name])
        for name in dict.fromkeys(status.job.launcher for status in live)
    ]
    return Cancelled(
        told=tuple(name for each in done for name in each.told),
        by_hand=tuple(line for each in done for line in each.by_hand),
    )


def forget(study: Study) -> int:
    """Close the live jobs of a study without asking anybody, under its lock. Returns how many there were."""
    stopped = Ending(Outcome.CANCELLED, "given up by the user")
    live = [status for status in kept_job_statuses(study) if status.ended is None]
    for status in live:
        close(study, status, stopped)
    return len(live)


def _of_each(study: Study, find: Callable[[str, Sequence[Job]], Sequence[JobStatus]]) -> list[JobStatus]:
    """Find the jobs of each launcher. Returns them in the order of the jobs."""
    jobs = JobStore(study.root).jobs()
    found: dict[str, JobStatus] = {}
    for name in dict.fromkeys(job.launcher for job in jobs):
        for status in find(name, [job for job in jobs if job.launcher == name]):
            found[status.job.job_id] = status
    return [found[job.job_id] for job in jobs]
