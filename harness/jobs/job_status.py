"""The status of a job, as its records and its scheduler say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from results.job import Job, JobEnd, Submission


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The live jobs that a call of `bench cancel` ended."""

    told: tuple[str, ...] = ()
    """The names of the jobs that a scheduler has been asked to end."""
    by_hand: tuple[str, ...] = ()
    """For each of the other jobs, the command by which the user ends its processes."""


def held_by_jobs(statuses: Sequence[JobStatus]) -> set[str]:
    """Ids of the cells of live jobs."""
    return {cell for status in statuses if status.is_live for cell in status.job.cells}
