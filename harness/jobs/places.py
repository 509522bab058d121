"""Where a job runs: what its scheduler has given it, and how launches are started there."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Protocol

from harness.code import checkout, code_hash
from harness.jobs.allocation import AGAIN, Allocation
from harness.jobs.slurm_starter import SlurmStarter
from harness.launch.ending import Stopped
from harness.launch.kubernetes.manifest import pod_address
from harness.launch.kubernetes.pods import Meeting, PodStarter
from harness.launch.kubernetes.profile import profile as kubernetes_profile
from harness.launch.starter import Starter
from harness.launch.tally import Conditions
from results.environment import CodeVersion
from results.errors import MachineError
from results.job import Job, JobEnd, Submission
from results.job_store import JobStore
from slurm.site_file import profile as slurm_profile


class Place(Protocol):
    """One start of a job."""

    @property
    def scheduler_id(self) -> str | None: ...

    @property
    def start(self) -> int:
        """0, and one more each time that the job begins again."""

    @property
    def nodes(self) -> tuple[str, ...]: ...

    @property
    def notice_s(self) -> float | None:
        """Between SIGUSR1 and the end of the job's time; None: there is no SIGUSR1 before it."""

    @property
    def starter(self) -> Starter: ...

    def conditions(self, code: CodeVersion) -> Conditions:
        """What earlier runs must have in common with those of this start."""

    def earlier_notice(self) -> Stopped | None:
        """Why the scheduler ended the start before this one; None if it has left no word."""

    def obstacle(self, job: Job) -> str | None:
        """Why what was given is not the job's; None if it is."""


class SlurmPlace:
    """An allocation of Slurm."""

    def __init__(self, job: Job, store: JobStore) -> None:
        allocation = Allocation.here()
        if allocation is None:
            raise MachineError(f"{job.name} is for an allocation of Slurm, and this is none")
        site = slurm_profile(job.site, f"the profile of {job.name}")
        self._allocation = allocation
        self._in_container = site.container is not None
        self.scheduler_id: str | None = str(allocation.slurm_id)
        self.start = allocation.start
        self.nodes = allocation.nodes
        self.notice_s: float | None = float(site.time.signal_s(job.time_limit_s))
        self.starter = SlurmStarter(site, allocation, store.folder(job.job_id))

    def conditions(self, code: CodeVersion) -> Conditions:
        # What is in the image is not seen from outside of it.
        return Conditions.elsewhere(code) if self._in_container else Conditions.here(code)

    def earlier_notice(self) -> Stopped | None:
        return self.starter.earlier_notice()

    def obstacle(self, job: Job) -> str | None:
        return self._allocation.obstacle(job)


class PodPlace:
    """The first pod of a job on Kubernetes; the others follow it."""

    scheduler_id: str | None = None
    notice_s: float | None = None

    def __init__(self, job: Job, store: JobStore) -> None:
        # A pod does not know how many it replaces; each of them has left a word, or its launches open.
        self.start = len(store.starts(job.job_id))
        self.nodes = (platform.node(),)
        self.starter = PodStarter(meeting_of(job))

    def conditions(self, code: CodeVersion) -> Conditions:
        return Conditions.here(code)

    def earlier_notice(self) -> Stopped | None:
        return None

    def obstacle(self, job: Job) -> str | None:
        return None


def meeting_of(job: Job) -> Meeting:
    """Where the pods of a job meet."""
    profile = kubernetes_profile(job.site, f"the profile of {job.name}")
    return Meeting(address=pod_address(profile, job), first_port=profile.port)


def pod_number(variables: Mapping[str, str] = os.environ) -> int:
    """Which pod of its job this is. Raises MachineError outside of one."""
    text = variables.get("JOB_COMPLETION_INDEX", "")
    if not text.isdecimal():
        raise MachineError("JOB_COMPLETION_INDEX does not say which pod of the job this is")
    return int(text)


def stranger_to(submission: Submission | None, place: Place) -> str | None:
    """Why this place is not the job's own, if somebody submitted its script by hand; None if it may be."""
    if submission is None or place.scheduler_id in (None, submission.scheduler_id):
        return None
    return (
        f"it was submitted as job {submission.scheduler_id}, and this is {place.scheduler_id}: "
        f"a script is not submitted by hand; {AGAIN}"
    )


def obstacle(job: Job, place: Place, ended: JobEnd | None) -> str | None:
    """Why the job must not be run here and now; None if it may."""
    if ended is not None:
        return f"it was closed before ({ended.outcome}: {ended.reason}), and its cells are with others"
    if code_hash(checkout()) != job.code.code_hash:
        return f"the code of bench was edited while the job was waiting: {AGAIN}"
    if place.start > job.options.retries:
        return f"it has begun again {place.start} times (--retries {job.options.retries}): {AGAIN}"
    return place.obstacle(job)
