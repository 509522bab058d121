"""Launches in an allocation of Slurm: srun starts an agent on each node, and each a torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness.jobs.allocation import Allocation
from harness.launch.ending import Stopped
from results.launch import Launch
from results.outcome import Outcome
from slurm.client import Client
from slurm.job_view import JobView
from slurm.runner import SlurmError
from slurm.script import agent_command, rendezvous_port
from slurm.site import SiteProfile
from slurm.states import Phase

LOG = "agent"
"""Logs of agents are agent-0.log, agent-1.log and so on."""
ANSWER_S = 5.0
"""The scheduler kills soon after it has asked to end."""


class SlurmStarter:
    """Starts the launches of one job."""

    hosts = True
    supervisor_pid: int | None = None
    """The scheduler ends what is left when this process ends."""

    def __init__(self, site: SiteProfile, allocation: Allocation) -> None:
        self._site = site
        self._allocation = allocation
        self._launches = 0
        # Nobody else's ranks are on the node, or nobody else's can be on its cores.
        confined = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
        self.pins = site.exclusive or confined

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        port = rendezvous_port(self._allocation.slurm_id, self._launches)
        self._launches += 1
        agent = (
            *(python(self._site), "-m", "harness.launch.agent"),
            *(str(path), f"{self._allocation.address}:{port}"),
        )
        return agent_command(self._site, launch.placement, agent, path.parent / LOG)

    def interruption(self) -> Stopped:
        slurm_id = self._allocation.slurm_id
        try:
            view = Client(timeout_s=ANSWER_S).query([slurm_id]).get(slurm_id)
        except SlurmError as error:
            words = f"the job was asked to end, and the scheduler does not say why: {error}"
            return Stopped(outcome=Outcome.CANCELLED, reason=words)
        return why_ended(view)


def why_ended(view: JobView | None) -> Stopped:
    """How to read the scheduler's word for a job that has just been asked to end."""
    if view is None:
        return Stopped(outcome=Outcome.UNKNOWN, reason="the job was asked to end; the scheduler forgot it")
    words = f"the job was asked to end: {view.words}"
    if view.phase.ended and view.outcome is not None:
        return Stopped(outcome=view.outcome, reason=words)
    if view.phase is Phase.WAITING:
        # It goes back to the queue: others took its nodes, or somebody requeued it.
        return Stopped(outcome=Outcome.PREEMPTED, reason=words)
    return Stopped(outcome=Outcome.CANCELLED, reason=words)


def python(site: SiteProfile) -> str:
    """The interpreter of the ranks."""
    if site.container is not None:
        return site.container.python
    return site.python or sys.executable
