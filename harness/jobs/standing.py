"""Where the jobs of a study stand: what the scheduler says, and what the jobs themselves have written."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.jobs.closing import close_launches, open_launches
from harness.launch.ending import Stopped
from harness.launch.kubernetes.pods import is_over
from results import files
from results.errors import StoreError
from results.job import Job, JobEnd, Submission
from results.job_store import JobStore
from results.outcome import Outcome
from results.store import Study, utc_now
from slurm.client import Client
from slurm.job_view import JobView
from slurm.runner import SlurmError
from slurm.script import log_path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStanding:
    """One job at the moment of asking."""

    job: Job
    submission: Submission | None
    view: JobView | None
    """What the scheduler says; None if it does not know the job, or was not asked."""
    ended: JobEnd | None
    """How it ended for good."""

    @property
    def is_live(self) -> bool:
        """Whether it runs or may still run: its cells are not to be submitted again."""
        if self.job.launcher == "kubernetes":
            # Its manifest may be applied by hand at any time.
            return self.ended is None
        return self.ended is None and self.submission is not None

    @property
    def slurm_id(self) -> int | None:
        """Slurm's number of it; None if it has none, or is for Kubernetes."""
        if self.submission is None or self.job.launcher != "slurm":
            return None
        return int(self.submission.scheduler_id)

    @property
    def is_waiting(self) -> bool:
        """Whether it is written and was not handed over yet."""
        return self.is_live and self.submission is None

    @property
    def state(self) -> str:
        """In a word or two."""
        if self.ended is not None:
            return str(self.ended.outcome)
        if self.submission is None:
            return "not submitted"
        if self.job.launcher == "kubernetes":
            return "applied"
        return "unknown" if self.view is None else str(self.view.phase)

    @property
    def words(self) -> str:
        """Why it is there, in the scheduler's words or its own."""
        if self.ended is not None:
            return self.ended.reason or ""
        if self.view is None:
            return ""
        held = "held: it will not start by itself; " if self.view.is_held else ""
        return held + self.view.words


def standings(study: Study, client: Client) -> list[JobStanding]:
    """All jobs of a study, oldest first. Asks the scheduler once, about those that have not ended.

    A job that has ended is written down, with the launches that it left open: the scheduler will forget
    it. Raises SlurmError if the scheduler does not answer, or is not the one that has the jobs.
    """
    found = kept_standings(study)
    waiting = {
        standing.slurm_id: standing
        for standing in found
        if standing.ended is None and standing.slurm_id is not None
    }
    if not waiting:
        return found
    _require_cluster(client, waiting.values())
    views = client.query(list(waiting))
    news = {
        standing.job.job_id: _with_view(study, standing, views.get(slurm_id))
        for slurm_id, standing in waiting.items()
    }
    return [news.get(standing.job.job_id, standing) for standing in found]


def kept_standings(study: Study) -> list[JobStanding]:
    """All jobs of a study as they have been written down, oldest first: nobody is asked."""
    store = JobStore(study.root)
    return [_kept(study, store, job) for job in store.jobs()]


def _require_cluster(client: Client, waiting: Collection[JobStanding]) -> None:
    """Raises SlurmError if jobs were submitted to another cluster: it has jobs of the same numbers."""
    names = {standing.submission.cluster for standing in waiting if standing.submission is not None}
    elsewhere = sorted(name for name in names if name not in (None, client.cluster_name))
    if elsewhere:
        raise SlurmError(
            f"jobs of the study are on the cluster {', '.join(map(str, elsewhere))}, and this is "
            f"{client.cluster_name}: ask there"
        )


def recover(study: Study, client: Client, found: Sequence[JobStanding]) -> list[JobStanding]:
    """Find out about jobs of which it is not known whether they were submitted, by their names.

    Under the study's lock: another process may be about to submit. One that the queue does not have was
    not taken, and is closed.
    """
    lost = [
        standing
        for standing in found
        if standing.submission is None and standing.ended is None and standing.job.launcher == "slurm"
    ]
    if not lost:
        return list(found)
    by_name = {view.name: view for view in client.own_jobs()}
    news = {
        standing.job.job_id: _recovered(study, standing, by_name, client.cluster_name) for standing in lost
    }
    return [news.get(standing.job.job_id, standing) for standing in found]


def cancel(study: Study, client: Client) -> tuple[list[int], list[str]]:
    """End the live jobs of a study, under its lock.

    Returns the numbers of those that Slurm was told to end, and the ids of those that are for Kubernetes:
    these are closed here, and whatever runs of them has to be deleted there. So are those that the queue
    does not have, whatever the accounting says of them.
    """
    live = [job for job in recover(study, client, standings(study, client)) if job.is_live]
    numbers = [job.slurm_id for job in live if job.slurm_id is not None]
    client.cancel(numbers)
    pods = [job for job in live if job.job.launcher == "kubernetes"]
    runaways = [job for job in live if job.view is not None and job.view.source != "squeue"]
    for job in (*pods, *runaways):
        _close(study, job, Stopped(outcome=Outcome.CANCELLED, reason="cancelled by the user"))
    return numbers, [job.job.job_id for job in pods]


def forget(study: Study) -> int:
    """Close the live jobs of a study without asking anybody, under its lock. Returns how many there were."""
    stopped = Stopped(outcome=Outcome.CANCELLED, reason="given up by the user")
    live = [job for job in kept_standings(study) if job.ended is None]
    for job in live:
        _close(study, job, stopped)
    return len(live)


def _recovered(study: Study, lost: JobStanding, by_name: dict[str, JobView], cluster: str) -> JobStanding:
    view, job_id = by_name.get(lost.job.name), lost.job.job_id
    if view is None and not _has_begun(study, job_id):
        return _close(study, lost, Stopped(outcome=Outcome.CANCELLED, reason="the scheduler never took it"))
    if view is None:
        # It was taken, has run, and the scheduler has forgotten it.
        return _with_view(study, lost, None)
    submission = Submission(
        job_id=job_id, scheduler_id=str(view.job_id), submitted_at=utc_now(), cluster=cluster
    )
    JobStore(study.root).add_submission(submission)
    return _with_view(study, JobStanding(job=lost.job, submission=submission, view=None, ended=None), view)


def _has_begun(study: Study, job_id: str) -> bool:
    """Whether a job has left anything."""
    if JobStore(study.root).starts(job_id):
        return True
    return any(launch.job_id == job_id for launch in study.launches())


def _kept(study: Study, store: JobStore, job: Job) -> JobStanding:
    ended = store.ended(job.job_id)
    standing = JobStanding(job=job, submission=store.submission(job.job_id), view=None, ended=ended)
    if job.launcher == "kubernetes" and ended is None and is_over(store, job.job_id):
        # Nobody asks Kubernetes: the job's own word is all that is known.
        return _with_view(study, standing, None)
    return standing


def _with_view(study: Study, standing: JobStanding, view: JobView | None) -> JobStanding:
    if view is not None and view.name != standing.job.name:
        raise SlurmError(
            f"job {view.job_id} is {view.name!r} here, and was {standing.job.name!r}: the scheduler counts "
            f"anew, or is another one; ask the right one, or close the study's jobs: bench cancel --forget"
        )
    if view is not None and not view.phase.ended:
        return _replaced(standing, view=view)
    stopped = _how_it_ended(study, standing.job, view)
    return _close(study, standing, stopped, view=view)


def _how_it_ended(study: Study, job: Job, view: JobView | None) -> Stopped:
    """The job's own word where it left one for its last start; else the scheduler's."""
    store = JobStore(study.root)
    files.refresh(store.folder(job.job_id))
    starts = store.starts(job.job_id)
    last = starts[-1] if starts else None
    restarts = view.restarts if view is not None else None
    # Where nobody counts the starts, a launch that is still open is of a later one.
    is_last = not open_launches(study, job.job_id) if restarts is None else last and last.start == restarts
    if last is not None and is_last:
        return Stopped(outcome=last.outcome, reason=last.reason or "")
    if view is None:
        words = "the scheduler has forgotten the job, and it left no word"
        return Stopped(outcome=Outcome.UNKNOWN, reason=words)
    outcome = view.outcome or Outcome.UNKNOWN
    if outcome is Outcome.CRASHED and view.signal is not None:
        # Somebody ended the job's own program, and that is no fault of a cell: it is run again.
        words = f"the job's program was killed: the scheduler says {view.words}"
        return Stopped(outcome=Outcome.CANCELLED, reason=words)
    if outcome is Outcome.OK and job.purpose == "run":
        # A job that has run its cells says so.
        outcome = Outcome.UNKNOWN
    log = log_path(store.folder(job.job_id), view.job_id)
    return Stopped(outcome=outcome, reason=f"the scheduler says {view.words}; see {log}")


def _close(
    study: Study, standing: JobStanding, stopped: Stopped, *, view: JobView | None = None
) -> JobStanding:
    """Write down that a job has ended, with the launches that it left open, where one may write."""
    end = end_of_job(standing.job, standing.submission, stopped.outcome, stopped.reason)
    if not os.access(study.root, os.W_OK):
        return _replaced(standing, view=view, ended=end)
    close_launches(study, standing.job.job_id, stopped, scheduler=view.words if view else None)
    return _replaced(standing, view=view, ended=_written(JobStore(study.root), end))


def end_of_job(job: Job, submission: Submission | None, outcome: Outcome, reason: str) -> JobEnd:
    """The end of a whole job, as whoever finds out writes it down."""
    return JobEnd(
        job_id=job.job_id,
        scheduler_id=None if submission is None else submission.scheduler_id,
        start=None,
        told_by="scheduler",
        nodes=(),
        started_at=None,
        ended_at=utc_now(),
        outcome=outcome,
        reason=reason,
    )


def _written(store: JobStore, end: JobEnd) -> JobEnd:
    try:
        store.add_end(end)
    except StoreError:
        # Somebody else asked at the same time; the first word stays.
        kept = store.ended(end.job_id)
        if kept is None:
            raise
        return kept
    return end


def _replaced(
    standing: JobStanding, *, view: JobView | None = None, ended: JobEnd | None = None
) -> JobStanding:
    return JobStanding(job=standing.job, submission=standing.submission, view=view, ended=ended)


def cells_of_live_jobs(study: Study) -> set[str]:
    """Ids of the cells that a scheduler's jobs are about to run, or run. Asks it only if there may be any.

    Under the study's lock. Raises SlurmError if it does not answer: they are not to be run twice.
    """
    store = JobStore(study.root)
    if all(store.ended(job.job_id) is not None for job in store.jobs()):
        return set()
    client = Client()
    return held_by_jobs(recover(study, client, standings(study, client)))


def held_by_jobs(standings: Sequence[JobStanding]) -> set[str]:
    """Ids of the cells that live jobs are about to run, or run."""
    return {cell for standing in standings if standing.is_live for cell in standing.job.cells}
