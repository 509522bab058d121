"""The status of a study's jobs: by their records, and by the answers of a scheduler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.jobs.closing import close_launches, open_launches
from results import files
from results.errors import StoreError
from results.job import Job, JobEnd, Submission
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.plan import Placement
from results.store import Study, utc_now

FORGOTTEN = Ending(
    Outcome.UNKNOWN,
    "the scheduler no longer knows the job, and the job did not record its end",
)
STATUS_HEADS = ("job", "id", "nodes x GPUs", "state", "cells", "words")
STATUS_NUMERIC = (False, True, False, False, True, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job by its records, to which a launcher adds what it knows."""

    job: Job
    submission: Submission | None
    ended: JobEnd | None
    """The end of the job, if it will not start again."""
    is_running: bool = False
    """Whether the job runs now."""
    is_queued: bool = True
    """False if the scheduler's queue no longer has the job."""
    by_hand: bool = False
    """Whether the job may start although no submission is recorded, as a user may apply its manifest."""
    submitted_state: str = "unknown"
    """The state of a job that was submitted and has not ended."""
    scheduler_words: str = ""
    """The scheduler's words about a job that has not ended."""

    @property
    def is_live(self) -> bool:
        """Whether the job runs or may still run, so that its cells must not be submitted again."""
        return self.ended is None and (self.submission is not None or self.by_hand)

    @property
    def state(self) -> str:
        """The state as one or two words for a table."""
        if self.ended is not None:
            return str(self.ended.outcome)
        return "not submitted" if self.submission is None else self.submitted_state

    @property
    def words(self) -> str:
        """The reason of this state, in the scheduler's words or the job's own."""
        return self.scheduler_words if self.ended is None else self.ended.reason or ""


def kept_status(store: JobStore, job: Job) -> JobStatus:
    """The status of a job by its records."""
    return JobStatus(job=job, submission=store.submission(job.job_id), ended=store.ended(job.job_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The live jobs that a call of `bench cancel` ended."""

    told: tuple[str, ...] = ()
    """The names of the jobs that a scheduler has been asked to end."""
    by_hand: tuple[str, ...] = ()
    """For each of the other jobs, the command by which the user ends its processes."""


def own_word(study: Study, job: Job, restarts: int | None) -> Ending | None:
    """The ending of the last start of a job by the job's own record; None if it left no record.

    `restarts` is the number of times that the scheduler has requeued it; None if the scheduler does not
    count them.
    """
    store = JobStore(study.root)
    files.refresh(store.folder(job.job_id))
    starts = store.starts(job.job_id)
    if not starts:
        return None
    last = starts[-1]
    # Where the scheduler does not count starts, an open launch belongs to a later start.
    is_last = not open_launches(study, job.job_id) if restarts is None else last.start == restarts
    return Ending(last.outcome, last.reason or "") if is_last else None


def close(
    study: Study,
    status: JobStatus,
    stopped: Ending,
    *,
    runs: Ending | None = None,
    scheduler: str | None = None,
) -> JobStatus:
    """Record the end of a job and of the launches that it left open, if the study may be written.

    `runs` is how the runs of these launches ended (None: as the job did), `scheduler` what its scheduler says
    of the end, for their attempts.
    """
    end = end_of_job(status.job, status.submission, stopped)
    if os.access(study.root, os.W_OK):
        close_launches(study, status.job.job_id, runs or stopped, scheduler=scheduler)
        store = JobStore(study.root)
        try:
            store.add_end(end)
        except StoreError:
            # Another process found out at the same time; what was written first stays.
            kept = store.ended(end.job_id)
            if kept is None:
                raise
            end = kept
    return replace(status, ended=end, is_running=False)


def end_of_job(job: Job, submission: Submission | None, ending: Ending) -> JobEnd:
    """The record that ends a job for good, written by the process that notices the end."""
    return JobEnd(
        job_id=job.job_id,
        scheduler_id=None if submission is None else submission.scheduler_id,
        start=None,
        told_by="scheduler",
        nodes=(),
        started_at=None,
        ended_at=utc_now(),
        outcome=ending.outcome,
        reason=ending.reason,
    )


def held_by_jobs(statuses: Sequence[JobStatus]) -> set[str]:
    """Ids of the cells of live jobs."""
    return {cell for status in statuses if status.is_live for cell in status.job.cells}


def status_rows(statuses: Sequence[JobStatus]) -> list[list[str]]:
    """The rows of a table under STATUS_HEADS, one for each job."""
    return [
        [
            status.job.job_id,
            "" if status.submission is None else status.submission.scheduler_id,
            place(status.job.placement) if status.job.purpose == "run" else "",
            status.state,
            str(len(status.job.cells)) if status.job.purpose == "run" else "",
            status.words,
        ]
        for status in statuses
    ]


def place(placement: Placement) -> str:
    return f"{placement.nodes} x {placement.gpus_per_node}"
