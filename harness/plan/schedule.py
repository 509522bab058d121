"""The order of launches: repeat by repeat over all placements, so that drift falls on all sizes alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from msgspec.structs import replace as with_fields

from results.cell import Backend, Cell, Device, StepPolicy
from results.job import Isolation
from results.plan import Placement, has_virtual_nodes, placement_of
from strategies.catalog import STRATEGIES

_Groups = dict[str, list[tuple[str, Cell]]]
"""Cells that may share a launch, each with the id of its work, by the facts that they share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The runs that a study has so far."""

    ok_runs: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Runs that ended well, by cell id; 0 for a cell that is not there."""
    wanted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Runs that a cell needs, by id, where it does not need all repeats."""
    closed: Set[str] = frozenset()
    """Ids of cells that failed for good and are not run again."""

    def left(self, cell_id: str, repeats: int) -> int:
        """The number of runs that a cell of `repeats` still needs."""
        return self.wanted.get(cell_id, repeats) - self.ok_runs.get(cell_id, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """One launch to come: its cells share placement, device, backend, link, variables and
    interpreter, and run in this order."""

    placement: Placement
    repeat: int
    """1 for the first."""
    cells: tuple[Cell, ...]
    """One cell several times where its repeats share the launch."""
    forks: bool = False
    """Whether each run is a separate process, forked from its rank."""

    @property
    def device(self) -> Device:
        return self.cells[0].device

    @property
    def backend(self) -> Backend:
        return self.cells[0].backend

    @property
    def link_mbit_per_s(self) -> float | None:
        return self.cells[0].link_mbit_per_s

    @property
    def env(self) -> tuple[str, ...]:
        return self.cells[0].env

    @property
    def python(self) -> str | None:
        """The interpreter of its cells' engine; None: bench's own."""
        return _interpreter(self.cells[0])

    @property
    def virtual(self) -> bool:
        """Whether the nodes of a cell are virtual."""
        return any(has_virtual_nodes(cell, self.placement) for cell in self.cells)


def schedule(
    cells: Sequence[Cell],
    *,
    repeats: int,
    progress: Progress | None = None,
    seed: int = 0,
    gpus_per_node: int | None = None,
    isolation: Isolation = "launch",
) -> list[PlannedLaunch]:
    """The launches that are left to do, in order.

    Every odd repeat visits placements, and cells within them, in an order drawn from `seed`; the even repeat
    after it goes through the same order backwards, so that a steady drift of the machine cancels. The order
    of two cells does not depend on what is done, so that an interrupted study continues in the same order.
    Nor does it depend on the other cells, so that two revisions of a study have the same order. A cell that
    needs k more runs is in the last k repeats. Raises UsageError if a cell's workers do not fill whole
    nodes.
    """
    progress = progress or Progress()
    launches: list[PlannedLaunch] = []
    groups = _grouped(cells, gpus_per_node)
    for repeat in range(1, repeats + 1):
        for group in _ordered(groups, seed=seed, repeat=repeat):
            pending = [
                cell
                for cell in group
                if cell.id not in progress.closed and progress.left(cell.id, repeats) > repeats - repeat
            ]
            shares = [(cell,) for cell in pending] if isolation == "cell" else [tuple(pending)]
            launches += [
                PlannedLaunch(placement=placement_of(share[0], gpus_per_node), repeat=repeat, cells=share)
                for share in shares
                if share
            ]
    if isolation != "fork" or any(launch.device != "cpu" for launch in launches):
        # A forked process cannot use a device.
        return launches
    if len({launch.repeat for launch in launches}) < len(launches):
        return [replace(launch, forks=True) for launch in launches]
    # All cells may share a launch: one launch has all repeats.
    return [
        replace(launch, cells=tuple(cell for each in launches for cell in each.cells), forks=True)
        for launch in launches[:1]
    ]


def _grouped(cells: Sequence[Cell], gpus_per_node: int | None) -> _Groups:
    """Group the cells that may share a launch: they need the same process-wide settings."""
    groups: _Groups = {}
    steps = StepPolicy()
    for cell in sorted(cells, key=lambda cell: cell.id):
        placement = placement_of(cell, gpus_per_node)
        # A limit on memory changes how the process takes it, and not back.
        bound = (cell.device, cell.backend, cell.link_mbit_per_s or 0.0, cell.memory_limit_mb or 0)
        own = filter(None, (_interpreter(cell), STRATEGIES.facts(cell.strategy).of_process))
        words = (placement.nodes, placement.gpus_per_node, *bound, *cell.env, *own)
        # Two revisions of the user's files, or two lengths of measuring, have one order.
        is_plain = cell.source_hash is None and cell.dataset_hash is None and cell.steps == steps
        work = cell if is_plain else with_fields(cell, source_hash=None, dataset_hash=None, steps=steps)
        groups.setdefault(" ".join(map(str, words)), []).append((work.id, cell))
    return groups


def _interpreter(cell: Cell) -> str | None:
    engine = STRATEGIES.facts(cell.strategy).engine
    return None if engine is None else engine.python


def _ordered(groups: _Groups, *, seed: int, repeat: int) -> list[list[Cell]]:
    """Order groups and cells by a place that depends only on each, so that a new cell reorders no other."""
    draw = f"{seed}:{(repeat - 1) // 2}"

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{draw}:{name}".encode()).digest()

    named = [sorted(groups[name], key=lambda named: place(named[0])) for name in sorted(groups, key=place)]
    drawn = [[cell for _, cell in group] for group in named]
    return drawn if repeat % 2 else [group[::-1] for group in drawn[::-1]]
