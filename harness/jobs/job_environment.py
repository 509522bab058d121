"""Where a job runs: what its scheduler has given it, and how launches are started there."""

from __future__ import annotations

from typing import Protocol

from harness.launch.ending import Stopped
from harness.launch.starter import Starter
from harness.launch.tally import Conditions
from harness.machine.code import checkout, code_hash
from results.environment import CodeVersion
from results.job import Job, JobEnd, Submission

AGAIN = "run the same bench matrix command again"


class JobEnvironment(Protocol):
    """One start of a job."""

    @property
    def scheduler_id(self) -> str | None: ...

    @property
    def start(self) -> int:
        """0 for the first start; one more each time that the scheduler requeues the job."""

    @property
    def nodes(self) -> tuple[str, ...]: ...

    @property
    def notice_s(self) -> float | None:
        """Between SIGUSR1 and the end of the job's time, at least; None: there is no SIGUSR1 before it."""

    def left_s(self) -> float | None:
        """Seconds to the end of the job, as the scheduler says now; None if it does not say."""

    @property
    def starter(self) -> Starter: ...

    def conditions(self, code: CodeVersion) -> Conditions:
        """Code, versions and settings that an earlier run must share to be pooled with runs of this start."""

    def earlier_notice(self) -> Stopped | None:
        """Why the scheduler ended the start before this one; None if it did not say."""

    def obstacle(self, job: Job) -> str | None:
        """Why the job cannot run in what the scheduler gave it; None if it can."""


def stranger_to(submission: Submission | None, environment: JobEnvironment) -> str | None:
    """Why this environment is not that of the job: its script was submitted by hand. None if it may be."""
    if submission is None or environment.scheduler_id in (None, submission.scheduler_id):
        return None
    return (
        f"it was submitted as job {submission.scheduler_id}, and this is job {environment.scheduler_id}: "
        f"a script is not submitted by hand; {AGAIN}"
    )


def obstacle(job: Job, environment: JobEnvironment, ended: JobEnd | None) -> str | None:
    """Why the job must not be run here and now; None if it may."""
    if ended is not None:
        return f"it was closed before ({ended.outcome}: {ended.reason}), and other jobs have its cells"
    if code_hash(checkout()) != job.code.code_hash:
        return f"the code of bench was edited after the job was submitted: {AGAIN}"
    if environment.start > job.options.retries:
        return f"it was requeued {environment.start} times (--retries {job.options.retries}): {AGAIN}"
    return environment.obstacle(job)
