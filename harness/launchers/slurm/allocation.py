"""The allocation that this process runs in, as Slurm tells it, and whether its job can be run in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from harness.jobs.job_environment import AGAIN
from reports.text import count
from results.job import Job
from slurm.hosts import expand_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What Slurm gave."""

    slurm_id: int
    start: int
    """0, and one more each time that Slurm put the job back into the queue."""
    nodes: tuple[str, ...]
    gpus_per_node: int | None
    """None: the job asked for no GPUs, or Slurm does not count them."""
    address: str
    """Of the first node."""

    @classmethod
    def here(cls, variables: Mapping[str, str] = os.environ) -> Allocation | None:
        """This process's; None outside of one."""
        if "SLURM_JOB_ID" not in variables:
            return None
        gpus = variables.get("SLURM_GPUS_ON_NODE")
        return cls(
            slurm_id=int(variables["SLURM_JOB_ID"]),
            start=int(variables.get("SLURM_RESTART_COUNT", "0")),
            nodes=expand_hosts(variables["SLURM_JOB_NODELIST"]),
            gpus_per_node=int(gpus) if gpus is not None and gpus.isdecimal() else None,
            address=variables["MASTER_ADDR"],
        )

    def obstacle(self, job: Job) -> str | None:
        """Why the allocation is not the job's; None if it is."""
        placement = job.placement
        if len(self.nodes) != placement.nodes:
            return (
                f"the allocation has {count(len(self.nodes), 'node')} and the job is for {placement.nodes}: "
                f"its script was edited; {AGAIN}"
            )
        if self.gpus_per_node is not None and self.gpus_per_node < placement.gpus_per_node:
            return (
                f"a node has {self.gpus_per_node} GPUs here and the job needs {placement.gpus_per_node}: "
                f"its script was edited; {AGAIN}"
            )
        return None
