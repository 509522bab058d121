"""How a run can end: a closed list, so that nothing ends without a name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    PROOF_FAILED = "proof_failed"
    """The cell does not train as its reference does. Older records call that crashed."""
    HUNG = "hung"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"
    DIVERGED = "diverged"
    MISSING_RANKS = "missing_ranks"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"

    @property
    def runs_again(self) -> bool:
        """Whether the same command runs the cell again: what broke was not the program."""
        return self in _INTERRUPTED


_INTERRUPTED = {
    Outcome.TIMED_OUT,
    Outcome.CANCELLED,
    Outcome.PREEMPTED,
    Outcome.NODE_FAILED,
    Outcome.MISSING_RANKS,
    Outcome.UNKNOWN,
}


class Evidence(StrEnum):
    """What kind of number a figure is; the kinds are never mixed silently."""

    MEASURED = "measured"
    EMULATED = "emulated"
    """Real code on a stand-in: more ranks than cores or devices, virtual nodes, a shaped network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Why the supervisor ended a launch."""

    outcome: Outcome
    reason: str
