"""Launches, jobs and their ends that tests start from, and a shell command that replaces torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from harness.launch.starter import LocalStarter, LogWords
from results.environment import CodeVersion
from results.job import Job, JobEnd, RunOptions, Submission
from results.job_store import JobStore
from results.launch import Attempt, Launch, Slot
from results.outcome import Evidence, Outcome
from results.plan import Placement, Plan, Request
from results.run import RunResult
from results.store import Study
from slurm import notices

AT = "2026-01-01T00:00:00.000Z"
CODE = CodeVersion(code_hash="c0de")
EMPTY_PLAN = Plan(
    study="s",
    created_at="",
    request=Request(workloads=("mlp",), gpus=(1,), strategies=("single",)),
    cells=(),
    series=(),
    skips=(),
)
_LAUNCH = Launch(
    launch_id="20260102T030405Z-abcdef",
    placement=Placement(nodes=1, gpus_per_node=2),
    device="cpu",
    backend="gloo",
    evidence=Evidence.MEASURED,
    slots=(Slot(cell_id="c", run_id="r", repeat=1),),
    code=CODE,
)
_ATTEMPT = Attempt(
    launch_id=_LAUNCH.launch_id,
    command=(),
    started_at=None,
    ended_at=AT,
    exit_code=0,
    stopped_by=None,
    outcomes={},
    reasons={},
    ranks=(),
    startup_ns=None,
)
_RESULT = RunResult(
    cell_id="c",
    run_id="r",
    launch_id="l",
    repeat=1,
    outcome=Outcome.OK,
    reason=None,
    evidence=Evidence.MEASURED,
    started_at=None,
    ranks_expected=1,
    ranks_present=1,
)
_JOB = Job(
    job_id="0001-1x1",
    name="name-0001-1x1",
    launcher="slurm",
    placement=Placement(nodes=1, gpus_per_node=1),
    plan=1,
    cells=("cell-a",),
    baseline=None,
    options=RunOptions(retries=2),
    code=CODE,
    estimate_s=1.0,
    time_limit_s=60.0,
    billed_gpus=0,
    site={},
)
_END = JobEnd(
    job_id=_JOB.job_id,
    scheduler_id=None,
    start=0,
    told_by="job",
    nodes=("n1",),
    started_at=None,
    ended_at=AT,
    outcome=Outcome.OK,
    reason=None,
)


def a_launch(nodes: int = 1, gpus_per_node: int = 2, **facts: Any) -> Launch:
    """A launch of one slot on CPU, or what `facts` make of it."""
    placement = Placement(nodes=nodes, gpus_per_node=gpus_per_node)
    return msgspec.structs.replace(_LAUNCH, placement=placement, **facts)


def an_attempt(**facts: Any) -> Attempt:
    return msgspec.structs.replace(_ATTEMPT, **facts)


def a_result(**facts: Any) -> RunResult:
    """A good run on one rank, or what `facts` make of it."""
    return msgspec.structs.replace(_RESULT, **facts)


def a_job(job_id: str = _JOB.job_id, **facts: Any) -> Job:
    """A job of Slurm with one cell, or what `facts` make of it."""
    return msgspec.structs.replace(_JOB, **{"job_id": job_id, "name": f"name-{job_id}"} | facts)


def a_job_end(outcome: Outcome, **facts: Any) -> JobEnd:
    """The end of a job's first start, as the job itself writes it."""
    return msgspec.structs.replace(_END, outcome=outcome, **facts)


def submitted(
    folder: Path, job: Job, scheduler_id: str | None = "17", *, cluster: str | None = "lab"
) -> Study:
    """The study in a folder with a job that a scheduler took; None: nobody knows whether it did."""
    store = JobStore(folder)
    store.add(job, document="#!/bin/bash\n", name="script.sh")
    if scheduler_id is not None:
        at = "2026-01-01T00:00:00Z"
        store.add_submission(
            Submission(job_id=job.job_id, scheduler_id=scheduler_id, submitted_at=at, cluster=cluster)
        )
    return Study(folder)


def a_launch_of(slots: tuple[Slot, ...]) -> Launch:
    """A launch of that job on one device."""
    return a_launch(gpus_per_node=1, launch_id="l", slots=slots, job_id="0001-1x1")


def end_of(job: Job, outcome: Outcome, *, start: int = 0) -> JobEnd:
    """The end of a start of a submitted job, as the job itself writes it."""
    return a_job_end(outcome, job_id=job.job_id, scheduler_id="17", start=start, reason="its own word")


SLURM_WORDS = LogWords(
    agent_killed=notices.SRUN_KILLED,
    node_failed=notices.NODE_FAILED,
    out_of_memory=notices.OUT_OF_MEMORY_KILLS,
    scheduler_away=notices.CONTROLLER_AWAY,
    allocation_over=notices.ALLOCATION_OVER,
    start_delayed=notices.STEP_PENDING,
    agent_logs="agent-*.log",
)
"""The words of a real scheduler, for launches that print them."""


class Shell(LocalStarter):
    """Starts a shell command instead of every torchrun."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self._script = script

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        return ("bash", "-c", self._script)


def until(condition: Callable[[], object], seconds: float = 600) -> None:
    """Wait for a condition. Fails when it does not hold in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
