"""Comparison of several studies: the cells that do the same work in more than one of them.

Two cells do the same work if all their fields are equal except how long is measured (`steps`). Other cells
are not compared, and the fields that differ are named. Conditions may differ, because studies are made to
compare them: the report names them with the ratio, which may be due to any of them. It also says, for each
side, how many runs were disturbed by other processes on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

from reports.analysis.effect import SMALLEST_EFFECT, sides
from reports.analysis.exchange import FEW_RUNS, FEWEST_RUNS, unlike_kinds
from reports.analysis.figures import CellFigures, OfCell
from reports.analysis.pooling import differing
from reports.analysis.scaling import Efficiency, Piece, pieces
from reports.analysis.study import StudyFigures
from reports.text import count, number
from results.cell import Cell, Names, label
from results.grouping import grouped
from results.statistics import Metric, ratio_of_runs

Change = Literal["faster", "slower", "no difference shown"]
CHANGES: tuple[Change, ...] = ("faster", "slower", "no difference shown")
NO_ENVIRONMENT = "the environment is unknown"
_POINT = (*Names.__struct_fields__, "gpus")
"""Fields by which a reader identifies a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """The number of runs that other processes disturbed."""

    runs: int
    of: int

    def __str__(self) -> str:
        return f"{self.runs:,} of {count(self.of, 'run')} disturbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellInStudy(OfCell):
    """A cell's figures in one study."""

    study: str
    efficiency: Efficiency | None
    """Its efficiency against the baseline of the same study."""
    disturbed: tuple[Disturbed, Disturbed]
    """How many runs were disturbed in the first study, and in this one."""
    ratio: Metric | None = None
    """Step time of the first study over its own: above 1 it is faster. None for the first study itself."""
    absent: str | None = None
    """Why the ratio is missing or cannot be judged; None for the first study."""
    differs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The conditions that differ from the first study's: there and here, by name."""
    change: Change | None = None
    """Whether its runs are faster or slower than the first study's; None: not judged."""


SharedCell = tuple[CellInStudy, ...]
"""The same work in two studies or more, in their order; the others are compared with the first."""
SharedPiece = tuple[tuple[str, Piece], ...]
"""Curves of equal work of several studies, with the name of each study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The cells that several studies share, and the cells whose work differs."""

    studies: tuple[str, ...]
    cells: tuple[SharedCell, ...]
    unlike: tuple[str, ...]
    """Points that two studies seem to share and whose work differs, with the fields."""
    findings: tuple[str, ...]
    pieces: tuple[SharedPiece, ...] = ()
    """The pieces whose curves may share axes."""
    smallest_effect: float = SMALLEST_EFFECT
    """Share from which on a difference is reported."""

    def ratio(self, study: str, cell_id: str) -> CellInStudy | None:
        """A cell compared with the first study that has it; None if no other study has it."""
        others = (entry for shared in self.cells for entry in shared[1:])
        return next((one for one in others if (one.study, one.figures.cell.id) == (study, cell_id)), None)


def side_by_side(studies: Sequence[StudyFigures]) -> SideBySide:
    """Compare studies. For each cell, the others are compared with the first study that has it."""
    pieces_of = grouped(
        (piece.work, (study.name, piece)) for study in studies for piece in pieces(study.curves)
    )
    works: dict[tuple[object, ...], dict[str, tuple[StudyFigures, CellFigures]]] = {}
    for study in studies:
        for one in study.cells.values():
            work = tuple(_work(one.cell).values())
            works.setdefault(work, {}).setdefault(study.name, (study, one))
    smallest = studies[0].assumptions.smallest_effect
    shared = _judged([_shared(list(those.values())) for those in works.values() if len(those) > 1], smallest)
    return SideBySide(
        studies=tuple(study.name for study in studies),
        cells=shared,
        unlike=tuple(text for pair in combinations(studies, 2) for text in _unlike(*pair)),
        findings=tuple(_findings(studies, shared)),
        pieces=tuple(tuple(those) for those in pieces_of.values() if len(those) > 1),
        smallest_effect=smallest,
    )


def _judged(shared: Sequence[SharedCell], smallest: float) -> tuple[SharedCell, ...]:
    """The cells with their changes, which are judged together."""
    pairs = [
        (first, entry)
        for first, *others in shared
        for entry in others
        if entry.ratio is not None and entry.absent is None
    ]
    found = sides([(first.figures.run_step_ns, one.figures.run_step_ns) for first, one in pairs], smallest)
    changes = {id(one): told or "no difference shown" for (_, one), told in zip(pairs, found, strict=True)}
    return tuple(tuple(replace(one, change=changes.get(id(one))) for one in cell) for cell in shared)


def _work(cell: Cell) -> dict[str, object]:
    """The fields that define the work of a cell."""
    return {name: getattr(cell, name) for name in cell.__struct_fields__ if name != "steps"}


def _shared(found: Sequence[tuple[StudyFigures, CellFigures]]) -> SharedCell:
    first = found[0][1]
    entries = [_entry(study, one, first) for study, one in found]
    return (entries[0], *(_compared(entry, first) for entry in entries[1:]))


def _entry(study: StudyFigures, one: CellFigures, first: CellFigures) -> CellInStudy:
    points = (point for curve in study.curves for point in curve.points)
    return CellInStudy(
        study=study.name,
        figures=one,
        efficiency=next((p.efficiency for p in points if p.figures.cell.id == one.cell.id), None),
        disturbed=(_disturbed(first), _disturbed(one)),
    )


def _compared(entry: CellInStudy, first: CellFigures) -> CellInStudy:
    """Return the entry with its ratio, or the reason for a missing one, and the conditions that differ."""
    one = entry.figures
    there, here = first.newest.environment, one.newest.environment
    unlike = unlike_kinds(one, first)
    if there is None or here is None:
        return replace(entry, absent=unlike or NO_ENVIRONMENT)
    differs = differing(there.pooling_facts(), here.pooling_facts())
    if unlike is not None:
        return replace(entry, absent=unlike, differs=differs)
    ratio = ratio_of_runs(first.run_step_ns, one.run_step_ns, "x")
    few = FEW_RUNS if ratio.samples < FEWEST_RUNS else None
    return replace(entry, ratio=ratio, absent=few, differs=differs)


def _disturbed(one: CellFigures) -> Disturbed:
    return Disturbed(runs=sum(run.disturbed for run in one.runs), of=len(one.runs))


def _unlike(one: StudyFigures, other: StudyFigures) -> Iterator[str]:
    """Points of both studies without equal work: a string for all sizes at which the same fields differ."""
    found, theirs = [], _by_point(other)
    for point, cells in _by_point(one).items():
        # The fields in which the work differs; empty for equal work.
        pairs = [differing(_work(here), _work(there)) for here in cells for there in theirs.get(point, ())]
        if pairs and all(pairs):
            nearest = min(pairs, key=len)
            texts = [f"{name} {a} in {one.name}, {b} in {other.name}" for name, (a, b) in nearest.items()]
            found.append(((f"{cells[0].workload}, {label(cells[0])}", "; ".join(texts)), cells[0].gpus))
    for (name, difference), sizes in grouped(found).items():
        yield f"{name} on {', '.join(f'{gpus:,}' for gpus in sorted(sizes))}: {difference}"


def _by_point(study: StudyFigures) -> dict[tuple[object, ...], list[Cell]]:
    cells = [one.cell for one in study.cells.values()]
    return grouped((tuple(getattr(cell, name) for name in _POINT), cell) for cell in cells)


def _findings(studies: Sequence[StudyFigures], shared: Sequence[SharedCell]) -> Iterator[str]:
    if not shared:
        yield "No cell of one study does the same work as a cell of another."
        return
    pairs = grouped(((cell[0].study, entry.study), entry) for cell in shared for entry in cell[1:])
    for (first, other), entries in pairs.items():
        told = _told(entries, first, other)
        yield f"{other} against {first}, {count(len(entries), 'shared cell')}: {told}."
    in_several = Counter(entry.study for cell in shared for entry in cell)
    alone = {study.name: len(study.cells) - in_several[study.name] for study in studies}
    texts = [f"{cells:,} of {name}" for name, cells in alone.items() if cells]
    if texts:
        yield f"Cells that no other study has: {', '.join(texts)}."


def _told(entries: Sequence[CellInStudy], first: str, other: str) -> str:
    """`faster in 2 (1.1 to 1.3 times as fast); they differ in torch (2.12 in before, 2.13 in after)`."""
    parts = [text for change in CHANGES if (text := _changed(entries, change))]
    absent = dict.fromkeys(entry.absent for entry in entries if entry.change is None and entry.absent)
    if absent:
        unjudged = sum(entry.change is None for entry in entries)
        parts.append(f"not judged in {unjudged:,} ({'; '.join(absent)})")
    conditions = list(_differing(entries, first, other)) or ["under equal conditions"]
    return f"{', '.join(parts)}; {'; '.join(conditions)}"


def _differing(entries: Sequence[CellInStudy], first: str, other: str) -> Iterator[str]:
    """The conditions that differ, and how many runs of each side other processes disturbed."""
    differs = dict.fromkeys(
        f"{name} ({there} in {first}, {here} in {other})"
        for entry in entries
        for name, (there, here) in entry.differs.items()
    )
    if differs:
        yield f"they differ in {', '.join(differs)}"
    there, here = (
        Disturbed(runs=sum(one.runs for one in side), of=sum(one.of for one in side))
        for side in zip(*(entry.disturbed for entry in entries), strict=True)
    )
    if there.runs or here.runs:
        yield f"{there} in {first}, {here} in {other}"


def _changed(entries: Sequence[CellInStudy], change: Change) -> str:
    factors = sorted(entry.ratio.value for entry in entries if entry.change == change and entry.ratio)
    if not factors:
        return ""
    if change == "no difference shown":
        return f"{change} in {len(factors):,}"
    low, high = number(factors[0]), number(factors[-1])
    return f"{change} in {len(factors):,} ({low if low == high else f'{low} to {high}'} times as fast)"
