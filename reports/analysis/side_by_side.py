"""Comparison of several studies: the cells that do the same work in more than one of them.

Two cells do the same work if all their fields are equal except how long is measured (`steps`). Other cells
are not compared, and the fields that differ are named. Conditions may differ, because studies are made to
compare them: the report names them with the ratio, which may be due to any of them. It also says, for each
side, how many runs were disturbed by other processes on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from reports.analysis.effect import SMALLEST_EFFECT, Side, sides
from reports.analysis.exchange import FEW_RUNS, FEWEST_RUNS
from reports.analysis.figures import CellFigures
from reports.analysis.pooling import differing
from reports.analysis.scaling import Efficiency, Piece, pieces
from reports.analysis.study import StudyFigures
from reports.text import count, number
from results.cell import Cell, Names, label
from results.grouping import grouped
from results.run import NOT_PROVEN
from results.statistics import Metric, ratio_of_runs

Change = Literal["faster", "slower", "no difference shown"]
CHANGES: tuple[Change, ...] = ("faster", "slower", "no difference shown")
_CHANGES: dict[Side | None, Change] = {"above": "faster", "below": "slower", None: "no difference shown"}
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
class CellInStudy:
    """A cell's figures in one study."""

    study: str
    figures: CellFigures
    efficiency: Efficiency | None
    """Its efficiency against the baseline of the same study."""
    ratio: Metric | None
    """Step time of the first study over its own: above 1 it is faster. None for the first study itself."""
    absent: str | None
    """Why the ratio is missing or cannot be judged; None for the first study."""
    differs: Mapping[str, tuple[str, str]]
    """The conditions that differ from the first study's: there and here, by name."""
    disturbed: tuple[Disturbed, Disturbed]
    """How many runs were disturbed in the first study, and in this one."""
    change: Change | None = None
    """Whether its runs are faster or slower than the first study's; None: not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCell:
    """The same work in two studies or more."""

    entries: tuple[CellInStudy, ...]
    """Entries in the order of the studies; the others are compared with the first."""

    @property
    def cell(self) -> Cell:
        return self.entries[0].figures.cell


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPiece:
    """The curves of one piece of work in one study."""

    study: str
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The cells that several studies share, and the cells whose work differs."""

    studies: tuple[str, ...]
    cells: tuple[SharedCell, ...]
    unlike: tuple[str, ...]
    """Points that two studies seem to share and whose work differs, with the fields."""
    findings: tuple[str, ...]
    pieces: tuple[tuple[StudyPiece, ...], ...] = ()
    """Pieces of equal work of several studies, whose curves may share axes: one of each study."""
    smallest_effect: float = SMALLEST_EFFECT
    """Share from which on a difference is reported."""

    def ratio(self, study: str, cell_id: str) -> CellInStudy | None:
        """A cell compared with the first study that has it; None if no other study has it."""
        return next(
            (
                entry
                for shared in self.cells
                for entry in shared.entries[1:]
                if (entry.study, entry.figures.cell.id) == (study, cell_id)
            ),
            None,
        )


def side_by_side(studies: Sequence[StudyFigures]) -> SideBySide:
    """Compare studies. For each cell, the others are compared with the first study that has it."""
    pieces_of = grouped(
        (piece.work, StudyPiece(study=study.name, piece=piece))
        for study in studies
        for piece in pieces(study.curves)
    )
    works: dict[tuple[object, ...], dict[str, tuple[StudyFigures, CellFigures]]] = {}
    for study in studies:
        for one in study.cells.values():
            work = tuple(_work(one.cell).values())
            works.setdefault(work, {}).setdefault(study.name, (study, one))
    smallest = studies[0].assumptions.smallest_effect
    cells = []
    for found in (list(those.values()) for those in works.values() if len(those) > 1):
        first = found[0][1]
        entries = (_entry(of, one, None if one is first else first) for of, one in found)
        cells.append(SharedCell(entries=tuple(entries)))
    shared = _judged(cells, smallest)
    return SideBySide(
        studies=tuple(study.name for study in studies),
        cells=tuple(shared),
        unlike=tuple(text for pair in combinations(studies, 2) for text in _unlike(*pair)),
        findings=tuple(_findings(studies, shared)),
        pieces=tuple(tuple(those) for those in pieces_of.values() if len(those) > 1),
        smallest_effect=smallest,
    )


def _judged(shared: Sequence[SharedCell], smallest: float) -> list[SharedCell]:
    """The cells with their changes, which are judged together."""
    pairs = [
        (one.entries[0], entry)
        for one in shared
        for entry in one.entries[1:]
        if entry.ratio is not None and entry.absent is None
    ]
    found = sides([(first.figures.run_step_ns, one.figures.run_step_ns) for first, one in pairs], smallest)
    changes = {id(one): _CHANGES[told] for (_, one), told in zip(pairs, found, strict=True)}
    return [
        SharedCell(entries=tuple(replace(one, change=changes.get(id(one))) for one in shared_cell.entries))
        for shared_cell in shared
    ]


def _work(cell: Cell) -> dict[str, object]:
    """The fields that define the work of a cell."""
    return {name: getattr(cell, name) for name in cell.__struct_fields__ if name != "steps"}


def _entry(study: StudyFigures, one: CellFigures, first: CellFigures | None) -> CellInStudy:
    absent, ratio = None, None
    differs: Mapping[str, tuple[str, str]] = {}
    if first is not None:
        there, here = first.newest.environment, one.newest.environment
        if there is not None and here is not None:
            differs = differing(there.pooling_facts(), here.pooling_facts())
        if one.evidence is not first.evidence:
            absent = f"{one.evidence} here, {first.evidence} there"
        elif NOT_PROVEN in (one.no_claim, first.no_claim):
            absent = NOT_PROVEN
        elif there is None or here is None:
            absent = NO_ENVIRONMENT
        else:
            ratio = ratio_of_runs(first.run_step_ns, one.run_step_ns, "x")
            absent = FEW_RUNS if ratio.samples < FEWEST_RUNS else None
    points = (point for curve in study.curves for point in curve.points)
    return CellInStudy(
        study=study.name,
        figures=one,
        efficiency=next((p.efficiency for p in points if p.figures.cell.id == one.cell.id), None),
        ratio=ratio,
        absent=absent,
        differs=differs,
        disturbed=(_disturbed(first or one), _disturbed(one)),
    )


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
    pairs = grouped(
        ((cell.entries[0].study, entry.study), entry) for cell in shared for entry in cell.entries[1:]
    )
    for (first, other), entries in pairs.items():
        told = _told(entries, first, other)
        yield f"{other} against {first}, {count(len(entries), 'shared cell')}: {told}."
    in_several = Counter(entry.study for cell in shared for entry in cell.entries)
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
