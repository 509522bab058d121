"""From the launches that are left to the jobs that run them, and what these will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.jobs.baseline import baseline_of
from harness.plan.estimate import Earlier, Hardware, estimate
from harness.plan.schedule import PlannedLaunch
from results.cell import Cell
from results.plan import Placement, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One allocation to come, and the launches in it."""

    launches: tuple[PlannedLaunch, ...]
    baseline: Cell | None
    """Timed beside its own cells; None if it is one of them, or if the job trains."""
    estimate_s: float

    @property
    def placement(self) -> Placement:
        return self.launches[0].placement

    @property
    def cells(self) -> tuple[str, ...]:
        """Ids, each once."""
        return tuple(dict.fromkeys(cell.id for launch in self.launches for cell in launch.cells))

    @property
    def runs(self) -> int:
        return sum(len(launch.cells) for launch in self.launches)


def planned_jobs(
    plan: Plan,
    launches: Sequence[PlannedLaunch],
    *,
    per_cell: bool,
    earlier: Mapping[str, Earlier],
    hardware: Hardware,
) -> list[PlannedJob]:
    """The jobs for `launches`, small placements first: one for each placement, or for each cell.

    All repeats of a cell are in one job. A plan whose points are all skipped has no launches, and no jobs.
    """
    if not launches:
        return []
    groups: dict[tuple[Placement, str], list[PlannedLaunch]] = {}
    for launch in launches:
        for share in _shares(launch) if per_cell else [launch]:
            key = (launch.placement, share.cells[0].id if per_cell else "")
            groups.setdefault(key, []).append(share)
    baseline = baseline_of(plan.cells) if plan.training is None else None
    return [_job(groups[key], baseline, earlier, hardware) for key in sorted(groups)]


def _shares(launch: PlannedLaunch) -> list[PlannedLaunch]:
    return [
        PlannedLaunch(placement=launch.placement, repeat=launch.repeat, cells=(cell,))
        for cell in launch.cells
    ]


def _job(
    launches: list[PlannedLaunch], baseline: Cell | None, earlier: Mapping[str, Earlier], hardware: Hardware
) -> PlannedJob:
    own = {cell.id for launch in launches for cell in launch.cells}
    extra = [] if baseline is None or baseline.id in own else [baseline_launch(baseline)]
    costs = estimate([*extra, *launches], earlier=earlier, hardware=hardware)
    return PlannedJob(
        launches=tuple(launches), baseline=baseline if extra else None, estimate_s=costs.seconds
    )


def baseline_launch(cell: Cell) -> PlannedLaunch:
    """The launch of an allocation's baseline, on one of its devices."""
    return PlannedLaunch(placement=Placement(nodes=1, gpus_per_node=1), repeat=1, cells=(cell,))
