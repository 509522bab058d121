"""A job: one allocation of a cluster, its work, and how it ended."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from results.environment import CodeVersion
from results.outcome import Outcome
from results.plan import Placement

Isolation = Literal["launch", "cell", "fork"]
Purpose = Literal["run", "feed", "report"]
OnFailedProof = Literal["strict", "report"]

SILENCE_S = 900.0
"""Seconds without progress of any rank after which a launch counts as hung."""
RETRIES = 2


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan is run. No option changes the work of a cell."""

    isolation: Isolation = "launch"
    oversubscribe: bool = False
    max_time_s: float | None = None
    rerun_failed: bool = False
    silence_s: float = SILENCE_S
    prune: bool = True
    """Whether a cell is left out whose smaller batch ran out of memory."""
    retries: int = RETRIES
    """How often a launch is repeated after a failure of the cluster (not of the program)."""
    trace: tuple[int, ...] = ()
    """Ranks that keep the profiler's trace of a few steps."""
    tensorboard: bool = False
    """Whether ranks write the scalars of their steps while they run."""
    proof: OnFailedProof = "strict"
    """Whether a run whose proof fails ends, or measures on."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation, and the runs that are to be done in it. Written once, before it is submitted."""

    job_id: str
    purpose: Purpose = "run"
    """`run`: runs its cells; `feed`: submits jobs that exceeded the limit; `report`: writes the page."""
    name: str
    """The name that the scheduler shows, unique among the user's jobs."""
    launcher: str
    """The name of the launcher that has made it."""
    placement: Placement
    plan: int
    """Number of the plan that it is a part of, from 1."""
    cells: tuple[str, ...]
    baseline: str | None
    """Id of the cell that is timed on one device of the allocation, so that allocations can be compared."""
    options: RunOptions
    code: CodeVersion
    estimate_s: float
    time_limit_s: float
    billed_gpus: int | None
    """GPUs that are paid for while it runs; None if that is not known, 0 without GPUs."""
    site: dict[str, Any]
    """The profile of the cluster, as it was when the job was made."""
    arguments: tuple[str, ...] = ()
    """The call of bench that the job makes, without `bench`; empty: it runs its cells."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a scheduler has accepted a job."""

    job_id: str
    scheduler_id: str
    submitted_at: str
    cluster: str | None = None
    """Slurm's name of the cluster whose number it is."""


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a job, or one start of it, ended."""

    job_id: str
    scheduler_id: str | None
    start: int | None
    """Which start it was: 0, and one more each time the scheduler put the job back; None of the whole job."""
    told_by: Literal["job", "scheduler"]
    nodes: tuple[str, ...]
    started_at: str | None
    ended_at: str
    outcome: Outcome
    """`ok`: all of its runs were tried; each of its cells has its own outcome."""
    reason: str | None
