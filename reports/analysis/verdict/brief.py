"""The verdict in a few clauses, for a terminal: the same figures and words, without their explanations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reports.analysis.budget import BudgetPart
from reports.analysis.figures import EMULATED
from reports.analysis.size_to_buy import CPU
from reports.analysis.verdict.scalability import Dominant, Scalability
from reports.analysis.verdict.sentences import PART_WORDS
from reports.analysis.verdict.verdict import WorkloadVerdict
from reports.text import listed, metric, percent
from results.run import NOT_PROVEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One line of the brief verdict, if it is short enough."""

    title: str
    text: str
    rank: int
    """If not all clauses fit, the clauses with the lowest ranks are shown."""


def brief(found: WorkloadVerdict) -> Iterator[Clause]:
    """The clauses to act on, in reading order: the size to buy, how far it scales, the largest loss
    of time, how good the runs are, what is missing."""
    named = [one for one in found.to_buy if one.absent != CPU]
    several = len({one.text for one in named}) > 1
    for number, size in enumerate(named[: 2 if several else 1]):
        sure = f" ({size.confidence} confidence)" if size.confidence else ""
        title = f"to buy, {size.scaling}" if several else "to buy"
        yield Clause(title=title, text=f"{size.text}{sure}", rank=number)
    for one in found.scalings:
        yield Clause(title=one.kind, text=_reach(one), rank=2)
    for one in found.scalings:
        dominant = one.largest.dominant if one.largest else None
        efficiency = one.largest.configuration.efficiency if one.largest else None
        tells = efficiency is None or efficiency.tells
        if dominant is not None and dominant.part is not None and tells:
            yield Clause(title=f"lost, {one.kind}", text=_lost(dominant), rank=5)
    yield from _trust(found)
    if found.slow_ranks is not None:
        yield Clause(title="slow ranks", text=found.slow_ranks, rank=4)
    if found.costs:
        yield Clause(title="cost", text=found.costs[0], rank=6)


def _reach(one: Scalability) -> str:
    lead = one.largest.configuration if one.largest else one.fastest
    if lead is None:
        return "every figure is emulated"
    told = f"{lead.strategy} on {lead.gpus:,}, {metric(lead.throughput).value}"
    if one.largest is None:
        return f"{told}; only one size"
    efficiency = "no efficiency claimed"
    if lead.efficiency is not None:
        efficiency = metric(lead.efficiency).with_ends
    return f"{told}, {efficiency}; {one.largest.knee_text.partition(':')[0]}"


def _lost(dominant: Dominant) -> str:
    told = f"{percent(dominant.lost_share)} of a step on {dominant.gpus:,}"
    if not dominant.blames or dominant.part is None:
        return f"{told}; the cause is unknown"
    if dominant.contenders:
        return f"{told}; the most to {listed([_short(one.part) for one in dominant.contenders], last=' or ')}"
    return f"{told}; the most to {_short(dominant.part)}{'' if dominant.shown else ' (not shown)'}"


def _short(part: BudgetPart) -> str:
    """`slower computation`, `exposed transfer`."""
    return _SHORT.get(part) or PART_WORDS[part].partition(":")[0]


_SHORT: dict[BudgetPart, str] = {"compute": "slower computation", "other": "a change of the machine"}


def _trust(found: WorkloadVerdict) -> Iterator[Clause]:
    made, gone = found.made_from, found.missing
    if made.runs:
        disturbed = f"{made.disturbed:,} disturbed" if made.disturbed else "none disturbed"
        disturbed += f", {made.disturbed_out:,} disturbed left out" if made.disturbed_out else ""
        failed = f", {len(made.failed):,} failed" if made.failed else ""
        yield Clause(title="runs", text=f"{made.runs:,}, {disturbed}{failed}", rank=1)
    states = ("failed", gone.failed), ("not run", gone.not_run), ("skipped", gone.skipped)
    silent = (EMULATED, gone.emulated), (NOT_PROVEN, gone.not_proven)
    told = [f"{state} {listed(points)}" for state, points in (*states, *silent) if points]
    if gone.unproved:
        told.append(f"{gone.unproved:,} of {gone.cells:,} cells not checked")
    if told:
        yield Clause(title="without", text="; ".join(told), rank=3)
