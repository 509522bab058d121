"""What is said of cost: the cheapest for a unit of work, and for an epoch in the time asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from reports.analysis.cost import NO_EPOCH, CellCost, Frontier, cell_costs, cheapest_within, frontiers
from reports.analysis.study import StudyFigures
from reports.analysis.training import differences_in_training
from reports.analysis.verdict.scaling_sentences import unlike
from reports.text import capital, devices, duration, metric
from results.cell import label


def cost_sentences(study: StudyFigures, workload: str) -> Iterator[str]:
    """Of each piece of equal work of a workload; none without a price."""
    found = [one for one in frontiers(cell_costs(study)) if one.cheapest.cell.workload == workload]
    for one in found:
        title = f"{one.title}: " if len(found) > 1 else ""
        yield f"{title}{_cheapest(one)}."
        if study.assumptions.within_s is not None:
            yield f"{title}{capital(epoch_clause(one, study.assumptions.within_s, _epoch_of))}."


def _cheapest(frontier: Frontier) -> str:
    """By the cost of a million samples; what a sample teaches is not compared."""
    cheapest, fastest = frontier.cheapest, frontier.fastest
    told = f"The cheapest is {_named(cheapest)} at {_usd_and_time(cheapest)} a million samples"
    clauses = differences_in_training(cheapest.figures, {one.cell.precision for one in frontier.costs})
    if fastest is cheapest:
        return "; ".join((f"{told}, and no cell is faster", *unlike(clauses)))
    other = f"the fastest, {_named(fastest)} is at {_usd_and_time(fastest)}"
    return "; ".join((told, *unlike(clauses), other))


def epoch_clause(frontier: Frontier, within_s: float, told: Callable[[CellCost], str]) -> str:
    """The cheapest cell that finishes an epoch in the time asked about; `told` gives a cell with the cost and
    the time of its epoch."""
    limit = duration(within_s * 1e9)
    samples = frontier.fastest.epoch_samples
    if samples is None:
        return f"which cell finishes an epoch within {limit} is open: {NO_EPOCH}"
    asked = f"an epoch of {samples:,} samples within {limit}"
    cheapest = cheapest_within(frontier, within_s)
    if cheapest is None:
        return f"{asked}: no cell does, the fastest is {told(frontier.fastest)}"
    assert cheapest.epoch_ns is not None
    late = (cheapest.epoch_ns.high or 0.0) > within_s * 1e9
    warning = "; its interval reaches beyond that time" if late else ""
    return f"{asked}: the cheapest is {told(cheapest)}{warning}"


def _named(cost: CellCost) -> str:
    cell = cost.cell
    where = devices(cell.gpus, cell.device)
    return f"{label(cell)} on {where}, batch {cell.batch_per_replica:,} per replica,"


def _usd_and_time(cost: CellCost) -> str:
    assert cost.usd_per_million_samples is not None
    return f"{metric(cost.usd_per_million_samples).value} and {duration(cost.million_samples_ns.value)}"


def _epoch_of(cost: CellCost) -> str:
    assert cost.epoch_ns is not None
    assert cost.usd_per_epoch is not None
    return f"{_named(cost)} at {metric(cost.usd_per_epoch).value} and {duration(cost.epoch_ns.value)}"
