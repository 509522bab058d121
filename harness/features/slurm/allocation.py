"""A job in an allocation of Slurm: whether it can be run there, and how its launches are started and ended.

srun starts an agent on each node, and each agent a torchrun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from harness.jobs.start import AGAIN, JobStarter
from harness.launch.starter import LogWords
from harness.launch.tally import Conditions
from reports.text import count
from results import files
from results.environment import CodeVersion
from results.errors import MachineError
from results.job import Job
from results.job_store import JobStore
from results.launch import Launch
from results.outcome import Ending, Outcome
from results.site import seconds
from slurm.client import Client
from slurm.notices import (
    ALLOCATION_OVER,
    CONTROLLER_AWAY,
    NODE_FAILED,
    OUT_OF_MEMORY_KILLS,
    SRUN_KILLED,
    STEP_PENDING,
    read_notice,
)
from slurm.runner import SlurmError
from slurm.script import HOSTS, agent_command, log_path, rendezvous_port
from slurm.site import SITE_FILE, SiteProfile

LOG = "agent"
"""Logs of agents are agent-0.log, agent-1.log and so on."""
NOTICE_S = 1.0
"""Time that Slurm's notice may take to reach the log after its signal."""
ANSWER_S = 10.0
"""Time that Slurm may take to answer a job: less than the notice before the end of the job."""
LEAST_DELAY_S = 120.0
"""The shortest time for which a step may wait for its creation, unless the profile has another."""


class SlurmStarter(JobStarter):
    """Starts the launches of one start of a job, in the allocation of this process."""

    tells_kills = True
    log_words = LogWords(
        agent_killed=SRUN_KILLED,
        node_failed=NODE_FAILED,
        out_of_memory=OUT_OF_MEMORY_KILLS,
        scheduler_away=CONTROLLER_AWAY,
        allocation_over=ALLOCATION_OVER,
        start_delayed=STEP_PENDING,
        agent_logs=f"{LOG}-*.log",
    )

    def __init__(self, job: Job, store: JobStore, variables: Mapping[str, str] = os.environ) -> None:
        """Raises MachineError outside of an allocation."""
        if "SLURM_JOB_ID" not in variables:
            raise MachineError(f"{job.name} is for an allocation of Slurm, and runs outside of one")
        self._site = site = SITE_FILE.converted(job.site, f"the profile of {job.name}")
        self.scheduler_id = variables["SLURM_JOB_ID"]
        self._number = int(self.scheduler_id)
        self.start = int(variables.get("SLURM_RESTART_COUNT", "0"))
        self.nodes = tuple(variables[HOSTS].split())
        # A job that asks for no GPUs lacks the variable, and some clusters do not count them.
        gpus = variables.get("SLURM_GPUS_ON_NODE", "")
        self._gpus_per_node = int(gpus) if gpus.isdecimal() else None
        self._address = variables["MASTER_ADDR"]
        self.notice_s = float(site.time.signal_s(job.time_limit_s))
        self._log = log_path(store.folder(job.job_id), self._number)
        self._begins_at = self._log.stat().st_size if self._log.exists() else 0
        self._earlier = _text(self._log, 0)
        self._launches = 0
        # The job's program sees all cores of the node, a rank those that srun gives it.
        self.threads = site.cpus_per_gpu
        # Ranks may be pinned if no other job is on the node, or if no other job can use this job's cores.
        confined = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
        self.pins = site.exclusive or confined

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        port = rendezvous_port(self._number, self._launches)
        self._launches += 1
        program = (python(self._site), "-m", "harness.features.slurm.agent")
        agent = (*program, str(path), f"{self._address}:{port}")
        return agent_command(self._site, launch.placement, agent, path.parent / LOG)

    def left_s(self) -> float | None:
        try:
            view = Client(timeout_s=ANSWER_S).query([self._number]).get(self._number)
        except SlurmError:
            return None
        return None if view is None else view.left_s(time.time())

    def conditions(self, code: CodeVersion) -> Conditions:
        # The software inside a container image is not visible from outside.
        return Conditions.elsewhere(code) if self._site.container else Conditions.here(code)

    def obstacle(self, job: Job) -> str | None:
        placement = job.placement
        if len(self.nodes) != placement.nodes:
            why = f"the allocation has {count(len(self.nodes), 'node')} and the job is for {placement.nodes}"
        elif self._gpus_per_node is not None and self._gpus_per_node < placement.gpus_per_node:
            why = f"a node has {self._gpus_per_node} GPUs here and the job needs {placement.gpus_per_node}"
        else:
            return None
        return f"{why}: its script was edited; {AGAIN}"

    @cached_property
    def most_delay_s(self) -> float:
        """Slurm may hold a node for the processes of an earlier step until it gives them up."""
        if self._site.step_creation is not None:
            return seconds(self._site.step_creation)
        try:
            unkillable_s = Client(timeout_s=ANSWER_S).unkillable_step_s
        except SlurmError:
            unkillable_s = None
        return max(LEAST_DELAY_S, 0.0 if unkillable_s is None else unkillable_s + 60.0)

    def interruption(self) -> Ending:
        words = "the job's program got SIGTERM, and Slurm has not said why"
        return self.notice() or Ending(Outcome.CANCELLED, words)

    def earlier_notice(self) -> Ending | None:
        # All starts write to one log.
        notice = read_notice(self._earlier, self._number)
        return None if notice is None else Ending(notice.outcome, f"before: {notice.reason}")

    def notice(self) -> Ending | None:
        """Read the ending that Slurm has written into the job's log, or writes within a moment."""
        end = time.monotonic() + NOTICE_S
        while True:
            notice = read_notice(_text(self._log, self._begins_at), self._number)
            if notice is not None:
                return Ending(notice.outcome, f"the job was asked to end: {notice.reason}")
            if time.monotonic() > end:
                return None
            time.sleep(0.05)


def _text(path: Path, offset: int) -> str:
    """Read a log from `offset` on; before it is the notice of an earlier start of the job."""
    if not path.exists():
        return ""
    return files.read(path, begin=offset).text


def python(site: SiteProfile) -> str:
    """The interpreter of the ranks."""
    if site.container is not None:
        return site.container.python
    return site.python or sys.executable
