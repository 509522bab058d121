"""The outcomes of a run: a closed list, so that every end has a name."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


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
    """A rank refuses the cell, and would refuse it again. Older records call that crashed."""
    UNKNOWN = "unknown"

    @property
    def runs_again(self) -> bool:
        """Whether the same command runs the cell again, as it was not the program that failed."""
        return self in _INTERRUPTED


_INTERRUPTED = {
    *(Outcome.TIMED_OUT, Outcome.CANCELLED, Outcome.PREEMPTED),
    *(Outcome.NODE_FAILED, Outcome.MISSING_RANKS, Outcome.UNKNOWN),
}


class Evidence(StrEnum):
    """The kind of number that a figure is; kinds are never mixed silently."""

    MEASURED = "measured"
    EMULATED = "emulated"
    """Real code on a stand-in: more ranks than cores or devices, virtual nodes, or a shaped network."""


class Ending(NamedTuple):
    """How a run, a launch or a job ended, and why. All code between a process and its record uses this
    type."""

    outcome: Outcome
    reason: str
