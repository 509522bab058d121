"""Reads how long the ranks of programs waited for each other, from the files that they have kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

from harness.features.programs.records import PROGRAM_RUN, ProgramRun, Traced
from harness.reporting.reading import Reading
from results.cell import Cell
from results.errors import SchemaError
from results.run import RunResult
from results.statistics import differences

SLOW_ABOVE = 0.05
"""A rank is slow if it waits less than each other rank by more than this share of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long the ranks of one run waited inside of collectives in a step, and their traced steps."""

    by_rank_ns: tuple[float, ...] | None
    """None: it is not known of all ranks."""
    slow: int | None = None
    """The rank that the others wait for; None: no rank is, or no one knows it."""
    by: str = ""
    """How it was taken."""
    why_not: str = ""
    """Why it is not known."""
    notes: tuple[str, ...] = ()
    traced: Mapping[int, Traced] = field(default_factory=dict)
    """The parts of a traced step, by rank."""


def read_waits(reading: Reading) -> Mapping[str, Waits]:
    """The waits of the newest run of each program that counts, by cell."""
    if reading.figures.kind.name != "program":
        return {}
    found = {}
    for cell_id, figures in reading.figures.cells.items():
        run = figures.newest
        folder, kept = reading.study.run_folder(cell_id, run.run_id), []
        with suppress(SchemaError):
            kept = [PROGRAM_RUN.read(path) for path in sorted(folder.glob("program-*.json"))]
        assert run.step_ns is not None
        waits = waits_of(kept, ranks=run.ranks_expected, step_ns=run.step_ns.value)
        traced = {rank.rank: rank.traced for rank in kept if rank.traced is not None}
        found[cell_id] = replace(waits, traced=traced)
    return found


def waits_of(kept: Sequence[ProgramRun], *, ranks: int, step_ns: float) -> Waits:
    """The waits of a run of `ranks` ranks, with the slow rank: it waits less than each other one."""
    notes = tuple(dict.fromkeys(chain.from_iterable(rank.notes for rank in kept)))
    rows = [rank.waits_ns for rank in sorted(kept, key=lambda rank: rank.rank) if rank.waits_ns]
    if len(rows) < ranks:
        why = next(filter(None, (rank.why_no_waits for rank in kept)), "a rank left no file")
        return Waits(by_rank_ns=None, why_not=why, notes=notes)
    means = tuple(map(fmean, rows))
    least = means.index(min(means))
    others = [row for rank, row in enumerate(rows) if rank != least]
    slow = bool(others) and all(_waits_more(row, rows[least], SLOW_ABOVE * step_ns) for row in others)
    return Waits(by_rank_ns=means, slow=least if slow else None, by=kept[0].waits_by or "", notes=notes)


def _waits_more(row: Sequence[int], least: Sequence[int], needed_ns: float) -> bool:
    """Whether a rank waits longer than another by more than `needed_ns`, and surely longer in each block."""
    apart = differences([other - own for other, own in zip(row, least, strict=True)], "ns")
    return apart.value > needed_ns and (apart.low or 0.0) > 0


def slow_words(cell: Cell, waits: Waits) -> str:
    """The slow rank of a cell in words."""
    if cell.gpus == 1:
        return "one rank"
    if waits.by_rank_ns is None:
        return "not known"
    return "none" if waits.slow is None else f"rank {waits.slow}"


def interpreter_words(run: RunResult) -> str:
    """The versions of Python and torch that ran a program."""
    program = None if run.environment is None else run.environment.program
    versions = {} if program is None else program.distributions
    return ", ".join(f"{name} {versions[name]}" for name in ("Python", "torch") if name in versions)
