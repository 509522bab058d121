"""What Slurm calls the states of a job, and what each means: positive lists, nothing counts by default.

Source: Slurm's page on job state codes and job_state_string() in slurm_protocol_defs.c, up to version 26.11.
"""

from __future__ import annotations

from enum import StrEnum

from results.outcome import Outcome


class JobPhase(StrEnum):
    """Where a job is between its submission and its end."""

    WAITING = "waiting"
    """It waits for nodes, for its first start or a later one."""
    RUNNING = "running"
    """It has nodes; while Slurm cleans up after its end, it still has them."""
    ENDED_WELL = "ended well"
    ENDED_BADLY = "ended badly"
    UNKNOWN = "unknown"
    """No state that is listed here. Never taken for an end."""

    @property
    def ended(self) -> bool:
        return self in (JobPhase.ENDED_WELL, JobPhase.ENDED_BADLY)


_WAITING = {
    "PENDING",
    "CONFIGURING",
    "POWER_UP_NODE",
    "EXPEDITING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    # Flags of a job that goes back to the queue because it could not be started.
    "LAUNCH_FAILED",
    "RECONFIG_FAIL",
}
_RUNNING = {
    "RUNNING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "RESIZING",
    "COMPLETING",
    "STAGE_OUT",
    "UPDATE_DB",
}
_OUTCOMES = {
    "COMPLETED": Outcome.OK,
    "FAILED": Outcome.CRASHED,
    "OUT_OF_MEMORY": Outcome.OUT_OF_MEMORY,
    "TIMEOUT": Outcome.TIMED_OUT,
    "DEADLINE": Outcome.TIMED_OUT,
    "CANCELLED": Outcome.CANCELLED,
    "PREEMPTED": Outcome.PREEMPTED,
    "NODE_FAIL": Outcome.NODE_FAILED,
    "BOOT_FAIL": Outcome.NODE_FAILED,
    # Another cluster of the federation took the job: how it ended is not known here.
    "REVOKED": Outcome.UNKNOWN,
}
"""By final state."""

_REASONS = {
    "OutOfMemory": Outcome.OUT_OF_MEMORY,
    "TimeLimit": Outcome.TIMED_OUT,
    "NodeDown": Outcome.NODE_FAILED,
    "SystemFailure": Outcome.NODE_FAILED,
}
"""Reasons that say more than FAILED. JobLaunchFailure does not: Slurm before 23.02 gives it to any signal."""

_HELD = {
    "JobHeldUser",
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "job requeued in held state",
    "launch failed requeued held",
    "launch failure limit exceeded requeued held",
    "user env retrieval failed requeued held",
    "DependencyNeverSatisfied",
    "ReservationDeleted",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
}


def phase(state: str) -> JobPhase:
    """The phase of a job in `state`, one word as squeue and sacct print it."""
    if state in _WAITING:
        return JobPhase.WAITING
    if state in _RUNNING:
        return JobPhase.RUNNING
    if state in _OUTCOMES:
        return JobPhase.ENDED_WELL if state == "COMPLETED" else JobPhase.ENDED_BADLY
    return JobPhase.UNKNOWN


def outcome(state: str, reason: str | None = None, exit_code: int | None = None) -> Outcome:
    """How a job ended, as far as the scheduler can tell: it sees one exit code of one script.

    A state that is not final, or not listed, is `unknown`.
    """
    ended = _OUTCOMES.get(state, Outcome.UNKNOWN)
    if state == "FAILED":
        return _REASONS.get(reason or "", ended)
    # State and exit code contradict each other: a job is done only if both say so.
    if state == "COMPLETED" and exit_code:
        return Outcome.UNKNOWN
    return ended


def is_held(reason: str | None) -> bool:
    """Whether a waiting job with this reason will not start unless somebody acts."""
    return reason in _HELD
