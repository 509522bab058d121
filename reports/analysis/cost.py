"""The cost of a measured cell in dollars and joules, and the cells that no other beats in time and cost.

Time and cost are step time multiplied by constants: a cell's devices, its work, a price. The ends of an
interval are multiplied by the same constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reports.analysis.assumptions import Assumptions, Quote, quote
from reports.analysis.figures import CellFigures, OfCell, differences_in_training
from reports.analysis.study import StudyFigures
from reports.text import device_word, devices, duration, listed, metric
from results.cell import label
from results.outcome import Evidence
from results.statistics import Metric, over_runs

MILLION = 1_000_000
BILLION = 1_000_000_000
HOUR_NS = 3.6e12

EMULATED = (
    "emulated: a cost is a claim about the throughput of separate devices, which stand-ins do not support"
)
NO_EPOCH = "the size of its epoch is not known: give --epoch-samples N"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCost(OfCell):
    """The cost of training a cell. Without a price it has only times."""

    gpus_per_node: int
    """The most devices of one node that the study used of its device: one price for all cells of a device."""
    quote: Quote | None
    usd_per_hour: float | None
    """The price of all devices that it uses."""
    million_samples_ns: Metric
    epoch_samples: int | None
    epoch_ns: Metric | None
    usd_per_1000_steps: Metric | None
    usd_per_million_samples: Metric | None
    usd_per_billion_tokens: Metric | None
    """The cost of a billion tokens; also None where the workload does not count tokens."""
    usd_per_epoch: Metric | None
    absent: str | None
    """Why the costs in dollars are missing; None if they are known."""

    @property
    def basis(self) -> tuple[Metric, Metric | None, str]:
        """Time and cost of an epoch or, if the number of its samples is not known, of a million samples."""
        if self.epoch_ns is not None:
            return self.epoch_ns, self.usd_per_epoch, "an epoch"
        return self.million_samples_ns, self.usd_per_million_samples, "a million samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Cells that do the same work, and the cells among them on the frontier of time and cost."""

    title: str
    """The work."""
    costs: tuple[CellCost, ...]
    """All cells with a cost, in reading order; at least one."""
    best: tuple[CellCost, ...]
    """The frontier, the fastest and most expensive first."""

    @property
    def fastest(self) -> CellCost:
        return self.best[0]

    @property
    def cheapest(self) -> CellCost:
        return self.best[-1]


def cell_costs(study: StudyFigures) -> list[CellCost]:
    """The costs of every cell with a figure, in the study's order."""
    nodes: dict[str, int] = {}
    for one in study.cells.values():
        environment = one.newest.environment
        here = environment.gpus_per_node if environment else 1
        nodes[_device(one)] = max(nodes.get(_device(one), 1), here)
    return [_cost(one, study.assumptions, nodes[_device(one)]) for one in study.cells.values()]


def energy_per_sample(figures: CellFigures) -> Metric | None:
    """Joules of all devices for one sample: energy of a step over its samples; None without counters."""
    joules = [run.energy_j / figures.cell.global_batch for run in figures.runs if run.energy_j is not None]
    return over_runs(joules, "J") if len(joules) == len(figures.runs) else None


def why_no_energy(figures: CellFigures) -> str | None:
    """Why the energy of a cell is unknown; None if it is known."""
    if energy_per_sample(figures) is not None:
        return None
    reasons = [run.absent["energy_j"] for run in figures.runs if "energy_j" in run.absent]
    return reasons[0] if reasons else "no counter of the devices' energy was read"


def frontiers(costs: Sequence[CellCost]) -> list[Frontier]:
    """The frontier of each piece of equal work that has costs."""
    groups: dict[tuple[str, ...], list[CellCost]] = {}
    for cost in costs:
        if cost.usd_per_million_samples is not None:
            cell = cost.cell
            # Time and cost are compared only where these fields agree.
            source = (cell.source_hash or "", cell.dataset_hash or "")
            work = (cell.workload, cell.dataset, cell.precision, *source)
            groups.setdefault(work, []).append(cost)
    return [
        Frontier(title=_title(work, list(groups)), costs=tuple(those), best=tuple(_undominated(those)))
        for work, those in groups.items()
    ]


def cheapest_within(frontier: Frontier, within_s: float) -> CellCost | None:
    """The cheapest cell whose epoch takes at most `within_s` seconds; None if all take longer.

    If several cells are equally cheap, it is the fastest of them. The answer is on the frontier for any time.
    """
    in_time = [
        cost for cost in frontier.best if cost.epoch_ns is not None and cost.epoch_ns.value <= within_s * 1e9
    ]
    return in_time[-1] if in_time else None


def cheapest_text(frontier: Frontier) -> str:
    """Name the cheapest cell and the fastest; how fast the loss falls is not compared."""
    cheapest, fastest = frontier.cheapest, frontier.fastest
    told = f"{_named(cheapest)} is the cheapest at {_usd_and_time(cheapest)} a million samples"
    clauses = differences_in_training(cheapest.figures, (one.cell for one in frontier.costs))
    unlike = f"; it {listed(clauses)}: compare its loss too" if clauses else ""
    if fastest is cheapest:
        return f"{told}, and no cell is faster{unlike}"
    return f"{told}{unlike}; {_named(fastest)} is the fastest at {_usd_and_time(fastest)}"


def within_text(frontier: Frontier, within_s: float) -> str:
    """Name the cheapest cell that finishes an epoch in the time asked about."""
    limit, samples = duration(within_s * 1e9), frontier.fastest.epoch_samples
    if samples is None:
        return f"which cell finishes an epoch within {limit} is open: {NO_EPOCH}"
    asked = f"an epoch of {samples:,} samples within {limit}"
    cheapest = cheapest_within(frontier, within_s)
    told = cheapest or frontier.fastest
    assert told.epoch_ns is not None
    assert told.usd_per_epoch is not None
    which = f"{_named(told)} at {metric(told.usd_per_epoch).value} and {duration(told.epoch_ns.value)}"
    if cheapest is None:
        return f"{asked}: no cell does, the fastest is {which}"
    late = (told.epoch_ns.high or 0.0) > within_s * 1e9
    return f"{asked}: the cheapest is {which}{'; its interval reaches beyond that time' if late else ''}"


def _named(cost: CellCost) -> str:
    cell = cost.cell
    return (
        f"{label(cell)} on {devices(cell.gpus, cell.device)}, batch {cell.batch_per_replica:,} per replica,"
    )


def _usd_and_time(cost: CellCost) -> str:
    assert cost.usd_per_million_samples is not None
    return f"{metric(cost.usd_per_million_samples).value} and {duration(cost.million_samples_ns.value)}"


def _cost(one: CellFigures, assumptions: Assumptions, gpus_per_node: int) -> CellCost:
    measured = one.no_claim is None
    found = quote(assumptions, one.newest, gpus_per_node=gpus_per_node) if measured else None
    rate = found.price.usd_per_gpu_hour * one.cell.gpus if found else None
    samples = one.cell.global_batch
    epoch = assumptions.epoch_of(one.cell)
    million = one.step_ns.times(MILLION / samples)
    epoch_ns = one.step_ns.times(epoch / samples) if epoch else None
    billion_ns = None
    if one.units_per_s is not None and one.units_per_s.unit == "tokens/s":
        tokens = round(one.units_per_s.value * one.step_ns.value / 1e9)
        billion_ns = one.step_ns.times(BILLION / tokens) if tokens else None
    return CellCost(
        figures=one,
        gpus_per_node=gpus_per_node,
        quote=found,
        usd_per_hour=rate,
        million_samples_ns=million,
        epoch_samples=epoch,
        epoch_ns=epoch_ns,
        usd_per_1000_steps=_dollars(one.step_ns.times(1000), rate),
        usd_per_million_samples=_dollars(million, rate),
        usd_per_billion_tokens=_dollars(billion_ns, rate),
        usd_per_epoch=_dollars(epoch_ns, rate),
        absent=None if found else _why_no_cost(one),
    )


def _dollars(time_ns: Metric | None, usd_per_hour: float | None) -> Metric | None:
    if time_ns is None or usd_per_hour is None:
        return None
    return time_ns.times(usd_per_hour / HOUR_NS, "USD")


def _why_no_cost(one: CellFigures) -> str:
    if one.no_claim is not None:
        return EMULATED if one.evidence is Evidence.EMULATED else f"{one.no_claim}: {one.pool.unproven}"
    environment = one.newest.environment
    if environment is None:
        return "no device is known"
    return (
        f"no price is known of {environment.device_name}: give --price USD, of one "
        f"{device_word(one.cell.device)} and hour, or --prices FILE.csv"
    )


def _device(one: CellFigures) -> str:
    environment = one.newest.environment
    return environment.device_name if environment else ""


def _title(work: tuple[str, ...], all_works: Sequence[tuple[str, ...]]) -> str:
    """The workload, with the fields in which others of its name differ."""
    named = [other for other in all_works if other[0] == work[0]]
    told = [part for place, part in enumerate(work) if place == 0 or any(o[place] != part for o in named)]
    return ", ".join(part[:16] if place else part for place, part in enumerate(told))


def _undominated(costs: Sequence[CellCost]) -> Iterator[CellCost]:
    """The costs that no other matches in both time and cost and beats in one of them; equal ones all stay."""
    lowest = float("inf")
    previous: tuple[float, float] | None = None
    for cost in sorted(costs, key=_time_and_usd):
        time_and_usd = _time_and_usd(cost)
        if time_and_usd[1] < lowest or time_and_usd == previous:
            lowest, previous = time_and_usd[1], time_and_usd
            yield cost


def _time_and_usd(cost: CellCost) -> tuple[float, float]:
    """Time and cost to nine digits, because the last bits of equal figures may differ."""
    assert cost.usd_per_million_samples is not None
    time_ns, usd = cost.million_samples_ns.value, cost.usd_per_million_samples.value
    return float(f"{time_ns:.9g}"), float(f"{usd:.9g}")
