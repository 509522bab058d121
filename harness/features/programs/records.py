"""The file that each rank writes about a run of a program, in addition to its rank record."""

from __future__ import annotations

import msgspec

from results.schema import Schema


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a traced step of one rank, in ns."""

    steps: int
    compute_ns: int
    exposed_ns: int
    """Communication while nothing computed."""
    idle_ns: int


class ProgramRun(msgspec.Struct, frozen=True, kw_only=True):
    """How long one rank waited for others, and what was noted of its program."""

    rank: int
    waits_ns: list[int] | None
    """Time of a step inside of collectives: the mean of each measured block. None: not known."""
    waits_by: str | None
    """How it was taken."""
    why_no_waits: str | None = None
    notes: list[str] = []
    steps_seen: int
    """All steps of the program."""
    traced: Traced | None = None
    """Its last steps under torch's profiler; None: this rank kept no trace."""


# History: version, bench, what came.
PROGRAM_RUN = Schema("program-run", 1, ProgramRun, measured=True)
