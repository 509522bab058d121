"""The environment of a job's program in its pods."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from harness.launch.ending import Stopped
from harness.launch.tally import Conditions
from harness.launchers.kubernetes.manifest import pod_address
from harness.launchers.kubernetes.pods import Meeting, PodStarter
from harness.launchers.kubernetes.profile import PROFILE_FILE
from results.environment import CodeVersion
from results.errors import MachineError
from results.job import Job
from results.job_store import JobStore


class PodEnvironment:
    """The first pod of a job on Kubernetes; the others follow it."""

    scheduler_id: str | None = None
    notice_s: float | None = None

    def __init__(self, job: Job, store: JobStore) -> None:
        # A pod does not know how many it replaces; each of them has left a word, or its launches open.
        self.start = len(store.starts(job.job_id))
        self.nodes = (platform.node(),)
        self.starter = PodStarter(meeting_of(job))

    def left_s(self) -> float | None:
        return None

    def conditions(self, code: CodeVersion) -> Conditions:
        return Conditions.here(code)

    def earlier_notice(self) -> Stopped | None:
        return None

    def obstacle(self, job: Job) -> str | None:
        return None


def meeting_of(job: Job) -> Meeting:
    """Where the pods of a job meet."""
    profile = PROFILE_FILE.converted(job.site, f"the profile of {job.name}")
    return Meeting(address=pod_address(profile, job), first_port=profile.port)


def pod_number(variables: Mapping[str, str] = os.environ) -> int:
    """Which pod of its job this is. Raises MachineError outside of one."""
    text = variables.get("JOB_COMPLETION_INDEX", "")
    if not text.isdecimal():
        raise MachineError("JOB_COMPLETION_INDEX does not say which pod of the job this is")
    return int(text)
