"""A paired comparison: blocks of two runs that alternated on the same devices, as its driver kept them.

A pair is two fresh process groups, and the independent sample. Its file is kept with the studies of its two
sides, so that the decision can be computed again from them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from results.schema import Schema

CALL = "call.json"
"""The file in the folder of a comparison that says what is compared (`PairedCall`)."""
Side = Literal["base", "new"]
Alternation = Literal["blocks", "launches"]
"""The unit that alternates: blocks of two runs that live at the same time, or launches."""


class PairedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One timed block of one side."""

    side: Side
    steps: int
    ns: int
    """Wall time until the last rank has finished."""
    foreign: float | None = None
    """The share of the launch's cores that neither side used in its quad; None: not known."""

    @property
    def step_ns(self) -> float:
        return self.ns / self.steps


class PairedCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of BASE and the cell of NEW that it was compared with, with their runs."""

    base_cell: str
    base_run: str
    new_cell: str
    new_run: str
    blocks: tuple[PairedBlock, ...] = ()
    """The blocks in the order of time; four consecutive ones are a quad, A B B A. Empty if a run failed."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two fresh process groups for each cell, from separate launches or forked from the same ones."""

    number: int
    first: Side
    """The side that begins each quad; it alternates from pair to pair."""
    alternation: Alternation
    started_at: str
    ended_at: str
    cells: tuple[PairedCell, ...]
    launched_with: int | None = None
    """The pair whose folder has the studies with this one's runs; None: this one."""
    repeat: int = 1
    """The repeat of its runs in these studies."""
    forked: bool = False
    """Whether each rank is a separate process, forked from one that has imported what it needs."""


class PairedSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: its code and its options."""

    revision: str
    """The revision as the user gave it; `.` is the working tree."""
    commit: str | None
    python: str
    options: tuple[str, ...]
    """Options of its `bench matrix`."""
    files: str | None = None
    """A hash of the files of a working tree; None for a commit, and where it was not kept."""


class PairedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The sides of a comparison, which all pairs of a folder share, and how the last call judged them."""

    base: PairedSide
    new: PairedSide
    changes: dict[str, str] = {}
    """The reason why the change of a metric is accepted."""
    fail_above: dict[str, float] = {}
    """Margins by metric, as shares, that differ from the metric's own."""
    across: tuple[str, ...] = ()
    """Facts that may differ."""
    looks: int = 4
    others_above: float = 0.25
    """The share of the cores that others may take in a quad that counts."""


PAIR = Schema("pair", 1, Pair)
PAIRED_CALL = Schema("paired-call", 1, PairedCall)
# Version 1 of both is unreleased. Optional fields that came later: changes, fail_above, across, looks and
# others_above of the call, files of a side.
