"""Launches in an allocation of Slurm: srun starts an agent on each node, and each a torchrun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from harness.launch.ending import Stopped
from harness.launch.starter import LogWords, Starter
from harness.launchers.slurm.allocation import Allocation
from results.launch import Launch
from results.outcome import Outcome
from slurm.notices import (
    ALLOCATION_OVER,
    CONTROLLER_AWAY,
    NODE_FAILED,
    OUT_OF_MEMORY_KILLS,
    SRUN_KILLED,
    STEP_PENDING,
    read_notice,
)
from slurm.script import agent_command, log_path, rendezvous_port
from slurm.site import SiteProfile

LOG = "agent"
"""Logs of agents are agent-0.log, agent-1.log and so on."""
NOTICE_S = 1.0
"""How long Slurm's notice may take to come to the log after its signal."""


class SlurmStarter(Starter):
    """Starts the launches of one job."""

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

    def __init__(self, site: SiteProfile, allocation: Allocation, job_folder: Path) -> None:
        self._site = site
        self._allocation = allocation
        self._log = log_path(job_folder, allocation.slurm_id)
        self._begins_at = self._log.stat().st_size if self._log.exists() else 0
        self._earlier = _text(self._log, 0)
        self._launches = 0
        # The job's program sees all cores of the node, a rank those that srun gives it.
        self.threads = site.cpus_per_gpu
        # Nobody else's ranks are on the node, or nobody else's can be on its cores.
        confined = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
        self.pins = site.exclusive or confined

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        port = rendezvous_port(self._allocation.slurm_id, self._launches)
        self._launches += 1
        agent = (
            *(python(self._site), "-m", "harness.launchers.slurm.agent"),
            *(str(path), f"{self._allocation.address}:{port}"),
        )
        return agent_command(self._site, launch.placement, agent, path.parent / LOG)

    def interruption(self) -> Stopped:
        words = "the job's program got SIGTERM, and Slurm has not said why"
        return self.notice() or Stopped(outcome=Outcome.CANCELLED, reason=words)

    def earlier_notice(self) -> Stopped | None:
        """Why Slurm ended the start before this one: the log goes on from start to start."""
        notice = read_notice(self._earlier, self._allocation.slurm_id)
        return None if notice is None else Stopped(outcome=notice[0], reason=f"before: {notice[1]}")

    def notice(self) -> Stopped | None:
        """What Slurm has written into the job's log, or does so within a moment."""
        end = time.monotonic() + NOTICE_S
        while True:
            notice = read_notice(_text(self._log, self._begins_at), self._allocation.slurm_id)
            if notice is not None:
                return Stopped(outcome=notice[0], reason=f"the job was asked to end: {notice[1]}")
            if time.monotonic() > end:
                return None
            time.sleep(0.05)


def _text(path: Path, offset: int) -> str:
    """What a log has from `offset` on: an earlier start of the job has its own notice there."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def python(site: SiteProfile) -> str:
    """The interpreter of the ranks."""
    if site.container is not None:
        return site.container.python
    return site.python or sys.executable
