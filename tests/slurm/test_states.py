"""Every state that Slurm documents has a phase, every final one an outcome, and nothing else counts."""

from __future__ import annotations

import pytest

from results.outcome import Outcome
from slurm.job_view import JobPhase, outcome_of, phase_of, waits_for_somebody

# The tables of https://slurm.schedmd.com/job_state_codes.html, version 26.11.
BASE = {
    "BOOT_FAIL": (JobPhase.ENDED_BADLY, Outcome.NODE_FAILED),
    "CANCELLED": (JobPhase.ENDED_BADLY, Outcome.CANCELLED),
    "COMPLETED": (JobPhase.ENDED_WELL, Outcome.OK),
    "DEADLINE": (JobPhase.ENDED_BADLY, Outcome.TIMED_OUT),
    "FAILED": (JobPhase.ENDED_BADLY, Outcome.CRASHED),
    "NODE_FAIL": (JobPhase.ENDED_BADLY, Outcome.NODE_FAILED),
    "OUT_OF_MEMORY": (JobPhase.ENDED_BADLY, Outcome.OUT_OF_MEMORY),
    "PENDING": (JobPhase.WAITING, Outcome.UNKNOWN),
    "PREEMPTED": (JobPhase.ENDED_BADLY, Outcome.PREEMPTED),
    "RUNNING": (JobPhase.RUNNING, Outcome.UNKNOWN),
    "SUSPENDED": (JobPhase.RUNNING, Outcome.UNKNOWN),
    "TIMEOUT": (JobPhase.ENDED_BADLY, Outcome.TIMED_OUT),
}
FLAGS = {
    "COMPLETING": JobPhase.RUNNING,
    "CONFIGURING": JobPhase.WAITING,
    "EXPEDITING": JobPhase.WAITING,
    "LAUNCH_FAILED": JobPhase.WAITING,
    "POWER_UP_NODE": JobPhase.WAITING,
    "RECONFIG_FAIL": JobPhase.WAITING,
    "REQUEUED": JobPhase.WAITING,
    "REQUEUE_FED": JobPhase.WAITING,
    "REQUEUE_HOLD": JobPhase.WAITING,
    "RESIZING": JobPhase.RUNNING,
    "RESV_DEL_HOLD": JobPhase.WAITING,
    "REVOKED": JobPhase.ENDED_BADLY,
    "SIGNALING": JobPhase.RUNNING,
    "SPECIAL_EXIT": JobPhase.WAITING,
    "STAGE_OUT": JobPhase.RUNNING,
    "STOPPED": JobPhase.RUNNING,
    "UPDATE_DB": JobPhase.RUNNING,
}


@pytest.mark.parametrize("state", BASE)
def test_base_states(state) -> None:
    assert (phase_of(state), outcome_of(state)) == BASE[state]


@pytest.mark.parametrize("state", FLAGS)
def test_flags(state) -> None:
    assert phase_of(state) is FLAGS[state]
    assert outcome_of(state) is Outcome.UNKNOWN


@pytest.mark.parametrize("state", ["", "?", "completed", "COMPLETED+", "DONE", "CANCELLED by 0", "None"])
def test_what_is_not_listed_never_counts_as_an_end(state) -> None:
    assert phase_of(state) is JobPhase.UNKNOWN
    assert not phase_of(state).ended
    assert outcome_of(state) is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("NonZeroExitCode", Outcome.CRASHED),
        # What Slurm 22.05 says of a script that a signal ended: see the recorded list.
        ("JobLaunchFailure", Outcome.CRASHED),
        ("RaisedSignal:9(Killed)", Outcome.CRASHED),
        ("OutOfMemory", Outcome.OUT_OF_MEMORY),
        ("TimeLimit", Outcome.TIMED_OUT),
        ("NodeDown", Outcome.NODE_FAILED),
        ("SystemFailure", Outcome.NODE_FAILED),
        ("never heard of", Outcome.CRASHED),
        (None, Outcome.CRASHED),
    ],
)
def test_reasons_tell_failures_apart(reason, expected) -> None:
    assert outcome_of("FAILED", reason) is expected


def test_a_reason_changes_no_other_state() -> None:
    assert outcome_of("COMPLETED", "NodeDown", 0) is Outcome.OK
    assert outcome_of("CANCELLED", "TimeLimit") is Outcome.CANCELLED


def test_a_job_that_completed_with_an_error_is_not_done() -> None:
    assert outcome_of("COMPLETED", None, 1) is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("reason", "held"),
    [
        ("JobHeldUser", True),
        ("JobHeldAdmin", True),
        ("job requeued in held state", True),
        ("DependencyNeverSatisfied", True),
        ("Resources", False),
        ("Priority", False),
        ("Dependency", False),
        ("BeginTime", False),
        (None, False),
    ],
)
def test_held(reason, held) -> None:
    assert waits_for_somebody(reason) is held
