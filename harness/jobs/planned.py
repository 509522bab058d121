"""Group the launches that are left into jobs, estimate the time of each job, and choose the baseline.

The baseline is the cell that every allocation times on one device, so that allocations can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import msgspec

from harness.launch.conduct import conduct_of
from harness.plan.estimate import Earlier, estimate
from harness.plan.schedule import PlannedLaunch
from harness.plan.surroundings import Devices
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell
from results.grouping import grouped
from results.plan import Placement, Plan


def baseline_of(cells: Sequence[Cell]) -> Cell:
    """The plan's first cell on a single device; without one, its smallest cell changed to one device.

    All jobs of a plan have the same baseline, whatever cells they run themselves. `cells` is not empty.
    """
    alone = [cell for cell in cells if cell.gpus == 1 and cell.strategy == BASELINE_STRATEGY]
    if alone:
        return alone[0]
    return msgspec.structs.replace(
        min(cells, key=lambda cell: cell.gpus),
        strategy=BASELINE_STRATEGY,
        compression=UNCOMPRESSED,
        collective=DEFAULT_COLLECTIVE,
        gpus=1,
        model_parallel=1,
        node_size=None,
        link_mbit_per_s=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One allocation to come, and the launches in it."""

    launches: tuple[PlannedLaunch, ...]
    baseline: Cell | None
    """Timed in addition to its own cells; None if it is one of them, or if the plan has an order."""
    estimate_s: float

    @property
    def placement(self) -> Placement:
        return self.launches[0].placement

    @property
    def cells(self) -> tuple[str, ...]:
        """Ids, each once."""
        return tuple(dict.fromkeys(cell.id for launch in self.launches for cell in launch.cells))


def planned_jobs(
    plan: Plan,
    launches: Sequence[PlannedLaunch],
    *,
    per_cell: bool,
    earlier: Mapping[str, Earlier],
    hardware: Devices,
) -> list[PlannedJob]:
    """The jobs for `launches`, small placements first: one for each placement, or for each cell.

    All repeats of a cell are in one job. A plan whose points are all skipped has no launches, and no jobs.
    """
    if not launches:
        return []
    if per_cell:
        launches = [replace(one, cells=(cell,), forks=False) for one in launches for cell in one.cells]
    groups = grouped(((one.placement, one.cells[0].id if per_cell else ""), one) for one in launches)
    # A round has its baseline among its cells.
    baseline = baseline_of(plan.cells) if plan.order is None and plan.round is None else None
    conduct = conduct_of(plan)
    jobs = []
    for key in sorted(groups):
        own = {cell.id for launch in groups[key] for cell in launch.cells}
        extra = [] if baseline is None or baseline.id in own else [baseline_launch(baseline)]
        every = [*extra, *groups[key]]
        costs = estimate(every, earlier=earlier, hardware=hardware)
        jobs.append(
            PlannedJob(
                launches=tuple(groups[key]),
                baseline=baseline if extra else None,
                estimate_s=sum(map(attrgetter("longest_s"), conduct.times(every, costs.launches))),
            )
        )
    return jobs


def baseline_launch(cell: Cell) -> PlannedLaunch:
    """The launch of an allocation's baseline, on one of its devices."""
    return PlannedLaunch(placement=Placement(nodes=1, gpus_per_node=1), repeat=1, cells=(cell,))
