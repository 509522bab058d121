"""How far the allocations of a scheduler differ, by a cell that each of them timed on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from results.outcome import Outcome
from results.run import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAllocation:
    """One job's nodes, by its baseline."""

    name: str
    """Such as `slurm 17`."""
    hosts: tuple[str, ...]
    runs: int
    step_ns: float
    """Mean over its runs."""
    ratio: float
    """Its step time over the median allocation's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The same cell in several allocations."""

    cell_id: str
    allocations: tuple[MeasuredAllocation, ...]
    others: int
    """Allocations with other machines, software or code, which are not compared."""

    @property
    def lowest(self) -> float:
        return min(allocation.ratio for allocation in self.allocations)

    @property
    def highest(self) -> float:
        return max(allocation.ratio for allocation in self.allocations)


def drift(results: Sequence[RunResult]) -> Drift | None:
    """The cell that most allocations timed, and how they differ in it; None without two to compare.

    Allocations are compared within one environment, that of most of them.
    """
    best: Drift | None = None
    for cell_id, runs in _by_cell(results).items():
        found = _drift(cell_id, runs)
        if found is not None and (best is None or len(found.allocations) > len(best.allocations)):
            best = found
    return best


def _by_cell(results: Sequence[RunResult]) -> Mapping[str, list[RunResult]]:
    cells: dict[str, list[RunResult]] = {}
    for result in sorted(results, key=lambda result: (result.ranks_expected, result.cell_id, result.run_id)):
        allocated = result.environment is not None and result.environment.allocation is not None
        if allocated and result.outcome is Outcome.OK and result.step_ns is not None:
            cells.setdefault(result.cell_id, []).append(result)
    return cells


def _drift(cell_id: str, runs: Sequence[RunResult]) -> Drift | None:
    by_environment: dict[object, dict[str, list[RunResult]]] = {}
    for run in runs:
        assert run.environment is not None
        settings = tuple(sorted((run.environment.settings or {}).items()))
        groups = by_environment.setdefault((run.fingerprint, settings), {})
        groups.setdefault(str(run.environment.allocation), []).append(run)
    largest = max(by_environment.values(), key=len)
    if len(largest) < 2:
        return None
    times = {name: fmean(_step_ns(run) for run in group) for name, group in largest.items()}
    middle = median(times.values())
    return Drift(
        cell_id=cell_id,
        allocations=tuple(
            MeasuredAllocation(
                name=name,
                hosts=tuple(sorted({host for run in group for host in run.hosts})),
                runs=len(group),
                step_ns=times[name],
                ratio=times[name] / middle,
            )
            for name, group in largest.items()
        ),
        others=sum(len(groups) for groups in by_environment.values()) - len(largest),
    )


def _step_ns(run: RunResult) -> float:
    assert run.step_ns is not None
    return run.step_ns.value
