"""Ends of jobs, and attempts of launches whose supervisor is gone, written by the process that finds out."""

from __future__ import annotations

import os
from dataclasses import replace

from harness.jobs.job_status import JobStatus
from harness.launch.ending import rank_exits, unless_disk_full
from results import files
from results.errors import StoreError
from results.job import Job, JobEnd, Submission
from results.job_store import JobStore
from results.launch import Attempt, Launch
from results.outcome import Ending, Outcome
from results.store import Study, utc_now

FORGOTTEN = Ending(
    Outcome.UNKNOWN, "the scheduler no longer knows the job, and the job did not record its end"
)
LOST = Ending(
    Outcome.NODE_FAILED,
    "its job has ended, and the end of the launch was not recorded: probably the job's program was killed, "
    "or its node failed",
)


def close_launches(study: Study, job_id: str, stopped: Ending, *, scheduler: str | None = None) -> int:
    """Write an attempt for each launch of a job that lacks one. Returns the number of these launches.

    Call this only when no process of the job runs any more: an attempt is written once.
    """
    return _close(study, open_launches(study, job_id), stopped, scheduler=scheduler)


def close_lost_launches(study: Study) -> int:
    """Write an attempt for each launch of a bench that is gone. Returns the number of these launches.

    Call this only under the study's lock, which a bench holds while it supervises a launch, and its workers
    as long as they live. A launch that a person starts by hand has no supervisor, and stays as it is.
    """
    lost = [launch for launch in open_launches(study, None) if launch.supervisor_pid is not None]
    for launch in lost:
        gone = f"bench (process {launch.supervisor_pid}) is gone, and has not recorded the end of the launch"
        reason = f"{gone}: probably it was killed, or its machine stopped"
        _close(study, [launch], Ending(Outcome.MISSING_RANKS, reason))
    return len(lost)


def _close(study: Study, found: list[Launch], stopped: Ending, *, scheduler: str | None = None) -> int:
    for launch in found:
        folder, ranks = study.launch_folder(launch.launch_id), range(launch.placement.gpus)
        unfinished = [
            slot.run_id
            for slot in study.begun_slots(launch)
            if not all(study.rank_path(slot.cell_id, slot.run_id, rank).exists() for rank in ranks)
        ]
        ending = unless_disk_full(folder, stopped)
        attempt = Attempt(
            launch_id=launch.launch_id,
            command=(),
            # Only the supervisor, which is lost, knew the start time.
            started_at=None,
            ended_at=utc_now(),
            exit_code=None,
            stopped_by=ending.reason,
            outcomes=dict.fromkeys(unfinished, ending.outcome),
            reasons=dict.fromkeys(unfinished, ending.reason),
            ranks=rank_exits(folder),
            startup_ns=None,
            scheduler=scheduler,
        )
        try:
            study.add_attempt(attempt)
        except StoreError:
            # Another process found out at the same time, and has written the same.
            if not study.has_attempt(launch.launch_id):
                raise
    return len(found)


def open_launches(study: Study, job_id: str | None) -> list[Launch]:
    """The launches of a job that have no attempt yet; with None, launches that no job started."""
    own = [launch for launch in study.launches() if launch.job_id == job_id]
    for launch in own:
        if not study.has_attempt(launch.launch_id):
            files.refresh(study.launch_folder(launch.launch_id))
    return [launch for launch in own if not study.has_attempt(launch.launch_id)]


def kept_status(store: JobStore, job: Job) -> JobStatus:
    """The status of a job by its records."""
    return JobStatus(job=job, submission=store.submission(job.job_id), ended=store.ended(job.job_id))


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
