"""Sentences on how a workload scales and on its cost.

Sentences on scaling name the fastest and the largest configuration, where growing stops paying, and why.
Sentences on cost name the cheapest cell for a unit of work, and for an epoch in the time asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from reports.analysis.budget import BudgetPart, change
from reports.analysis.cost import NO_EPOCH, CellCost, Frontier, cell_costs, cheapest_within, frontiers
from reports.analysis.exchange import FEWEST_RUNS
from reports.analysis.figures import differences_in_training
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.scalability import Configuration, Dominant, Reach, Scalability
from reports.text import capital, count, devices, duration, listed, metric, percent
from results.cell import label

PART_WORDS: dict[BudgetPart, str] = {
    "input": "input: waiting for data and moving it",
    "compute": "computation that is slower than the baseline's",
    "transfer": "exposed transfer",
    "wait": "waiting for the slowest rank",
    "bubble": "pipeline bubbles",
    "other": "a change of the machine between the timed steps and those that the parts come from",
}
COMPRESSING = "computation, encoding and decoding in it, that is slower than the baseline's"


def scaling_sentences(one: Scalability) -> Iterator[str]:
    """The best configuration and why it scales no further; also for plain data parallelism if that
    differs."""
    batch = f"batch {one.batch:,} per replica" if one.kind == "weak" else f"global batch {one.batch:,}"
    setting = f", {one.setting}" if one.setting else ""
    yield f"{one.kind.capitalize()} scaling, {batch}{setting}: {_best(one)}."
    if one.largest is not None:
        yield f"{capital(_why(one.largest))}."
    if one.dense is not None:
        dense = one.dense.configuration
        yield f"Of plain data parallelism, {_where(dense)} has {_efficiency(dense)}; {_why(one.dense)}."


def unlike(clauses: Sequence[str]) -> tuple[str, ...]:
    """A clause if something trains differently."""
    return (f"it {listed(clauses)}: compare its convergence too",) if clauses else ()


def _best(one: Scalability) -> str:
    """Name the fastest configuration, and the one at the largest size."""
    if one.fastest is None:
        return "every figure is emulated, so no claim is made"
    throughput = metric(one.fastest.throughput).with_ends
    fastest = f"{_where(one.fastest)} {_leads(one.fastest, 'the fastest')} {throughput}"
    if one.largest is None:
        alone = "only one size was measured, so scaling is not judged"
        return "; ".join((fastest, *_remarks(one.fastest), alone))
    lead = one.largest.configuration
    if (lead.strategy, lead.gpus) == (one.fastest.strategy, one.fastest.gpus):
        return "; ".join((f"{fastest}, {_efficiency(lead)}", *_remarks(one.fastest)))
    ahead = f"{lead.strategy} {_leads(lead, 'ahead')} {_efficiency(lead)}"
    largest = f"on {lead.gpus:,}, the largest size measured, {ahead}"
    return "; ".join((fastest, *_remarks(one.fastest), largest, *_remarks(lead)))


def _leads(one: Configuration, what: str) -> str:
    """`is the fastest with`; with too few runs `seems the fastest (1 run) with`; for one point `has`.

    If no difference to others is shown, it does not name a winner.
    """
    if one.compared == 1:
        return "has"
    if one.ties:
        return "has the highest figure with"
    if one.fewest_runs >= FEWEST_RUNS:
        return f"is {what} with"
    return f"seems {what} ({count(one.fewest_runs, 'run')}) with"


def _where(one: Configuration) -> str:
    return f"{one.strategy} on {devices(one.gpus, one.device)}"


def _remarks(one: Configuration) -> Iterator[str]:
    if one.ties:
        yield f"no difference is shown to {listed(one.ties)}"
    yield from unlike(one.unlike)


def _efficiency(one: Configuration) -> str:
    if one.efficiency is None:
        return "an efficiency that is not claimed"
    return f"an efficiency of {metric(one.efficiency).with_ends} against {one.against}"


def cause(one: Reach) -> str:
    """A clause on the cause of the lost time, or on why it is unknown."""
    if one.dominant is None:
        return f"the cause of the lost time is unknown: {one.dominant_absent}"
    if one.configuration.efficiency is not None and not one.configuration.efficiency.tells:
        return "the cause of the lost time is unknown: the runs are too far apart"
    return _loss(one.dominant, compresses=one.configuration.compresses)


def _why(one: Reach) -> str:
    """A clause on the knee and on the cause of the lost time."""
    return f"{one.knee_text}; {cause(one)}"


def _loss(one: Dominant, *, compresses: bool) -> str:
    if one.part is None:
        share = max(0.0, round(one.lost_share, 3))
        return f"at {one.gpus:,} " + (
            f"little is lost, {percent(share)} of a step" if share else "nothing is lost"
        )
    lost = f"at {one.gpus:,} a step loses {percent(one.lost_share)} of its time against {one.against}"
    if not one.blames:
        return f"{lost}; the cause is unknown: {change(one.other_ns, one.step_ns)}"
    if one.contenders:
        parts = [
            f"{_words(each.part, compresses)} ({duration(each.ns)}, {duration(each.low_ns)} to "
            f"{duration(each.high_ns)})"
            for each in one.contenders
        ]
        return f"{lost}; the runs do not show which of its parts is the largest: {listed(parts)}"
    taken = f"{_words(one.part, compresses)} ({duration(one.part_ns)})"
    if not one.shown:
        return f"{lost}; the largest part of it, {taken}, is not shown to be above zero"
    most = "most of it to" if one.part_share > 0.5 else "the largest part of it to"
    return f"{lost}, {most} {taken}"


def _words(part: BudgetPart, compresses: bool) -> str:
    return COMPRESSING if compresses and part == "compute" else PART_WORDS[part]


def cost_sentences(study: StudyFigures, workload: str) -> Iterator[str]:
    """Sentences on each piece of equal work of a workload; no sentence without a price."""
    found = [one for one in frontiers(cell_costs(study)) if one.cheapest.cell.workload == workload]
    for one in found:
        title = f"{one.title}: " if len(found) > 1 else ""
        yield f"{title}{_cheapest(one)}."
        if study.assumptions.within_s is not None:
            yield f"{title}{capital(epoch_clause(one, study.assumptions.within_s, _epoch_of))}."


def _cheapest(frontier: Frontier) -> str:
    """Compare the cost of a million samples; convergence is not compared."""
    cheapest, fastest = frontier.cheapest, frontier.fastest
    told = f"The cheapest is {_named(cheapest)} at {usd_and_time(cheapest)} a million samples"
    clauses = differences_in_training(cheapest.figures, {one.cell.precision for one in frontier.costs})
    if fastest is cheapest:
        return "; ".join((f"{told}, and no cell is faster", *unlike(clauses)))
    other = f"the fastest, {_named(fastest)} is at {usd_and_time(fastest)}"
    return "; ".join((told, *unlike(clauses), other))


def epoch_clause(frontier: Frontier, within_s: float, told: Callable[[CellCost], str]) -> str:
    """A clause on the cheapest cell that finishes an epoch in the time asked about.

    `told` describes a cell with the cost and the time of its epoch.
    """
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


def usd_and_time(cost: CellCost) -> str:
    """The cost and the time of a million samples."""
    assert cost.usd_per_million_samples is not None
    return f"{metric(cost.usd_per_million_samples).value} and {duration(cost.million_samples_ns.value)}"


def _epoch_of(cost: CellCost) -> str:
    assert cost.epoch_ns is not None
    assert cost.usd_per_epoch is not None
    return f"{_named(cost)} at {metric(cost.usd_per_epoch).value} and {duration(cost.epoch_ns.value)}"
