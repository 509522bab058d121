"""The environment of a job's program in an allocation of Slurm."""

from __future__ import annotations

import time

from harness.launch.ending import Stopped
from harness.launch.tally import Conditions
from harness.launchers.slurm.allocation import Allocation
from harness.launchers.slurm.starter import SlurmStarter
from results.environment import CodeVersion
from results.errors import MachineError
from results.job import Job
from results.job_store import JobStore
from slurm.client import Client
from slurm.runner import SlurmError
from slurm.site import SITE_FILE

ANSWER_S = 10.0
"""How long Slurm may take to say when the job ends: less than it has by its own notice."""


class SlurmEnvironment:
    """An allocation of Slurm."""

    def __init__(self, job: Job, store: JobStore) -> None:
        allocation = Allocation.here()
        if allocation is None:
            raise MachineError(f"{job.name} is for an allocation of Slurm, and this is none")
        site = SITE_FILE.converted(job.site, f"the profile of {job.name}")
        self._allocation = allocation
        self._in_container = site.container is not None
        self.scheduler_id: str | None = str(allocation.slurm_id)
        self.start = allocation.start
        self.nodes = allocation.nodes
        self.notice_s: float | None = float(site.time.signal_s(job.time_limit_s))
        self.starter = SlurmStarter(site, allocation, store.folder(job.job_id))

    def left_s(self) -> float | None:
        number = self._allocation.slurm_id
        try:
            view = Client(timeout_s=ANSWER_S).query([number]).get(number)
        except SlurmError:
            return None
        return None if view is None else view.left_s(time.time())

    def conditions(self, code: CodeVersion) -> Conditions:
        # What is in the image is not seen from outside of it.
        return Conditions.elsewhere(code) if self._in_container else Conditions.here(code)

    def earlier_notice(self) -> Stopped | None:
        return self.starter.earlier_notice()

    def obstacle(self, job: Job) -> str | None:
        return self._allocation.obstacle(job)
