"""The verdict: what a study comes to, as facts and in sentences made from them.

For each workload: what is the fastest, how far it scales, where growing stops paying and what the time is
lost to, which ranks and links are slow, and what was not measured. Only measured figures make a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from reports.analysis.budget import Part
from reports.analysis.communication import communication_finding, slow_links
from reports.analysis.cost import cell_costs
from reports.analysis.exchange import exchange_parts
from reports.analysis.figures import CellFigures
from reports.analysis.missing import Missing, listed, missing
from reports.analysis.scalability import Configuration, Dominant, Scalability, scalability
from reports.analysis.stragglers import stragglers
from reports.analysis.study import StudyFigures
from reports.text import MetricText, count, devices, duration, metric, percent
from results.label import label
from results.outcome import Evidence

NOTHING = "No cell has a figure: the reasons are under Failures and skips."
PART_WORDS: dict[Part, str] = {
    "input": "input: waiting for data and moving it",
    "compute": "computation that is slower than the baseline's",
    "transfer": "exposed communication",
    "wait": "waiting for the slowest rank",
    "bubble": "pipeline bubbles",
    "other": "time that no part accounts for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadVerdict:
    """All that is said of one workload."""

    workload: str
    scalings: tuple[Scalability, ...]
    slow_ranks: str | None
    """The largest measured cell in which ranks are persistently slow, and they; None if there is none."""
    network: tuple[str, ...]
    """What slow links and limits of the network there are, a sentence each."""
    exchanges: tuple[str, ...]
    """What compressors and collectives gain or lose, a sentence for each network."""
    missing: Missing
    priced: bool
    """Whether there are dollars of any of its cells."""
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A study in words."""

    workloads: tuple[WorkloadVerdict, ...]
    """Empty if nothing has a figure."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """All of them; those of several workloads begin with its name."""
        if not self.workloads:
            return (NOTHING,)
        several = len(self.workloads) > 1
        return tuple(
            f"{one.workload}: {sentence}" if several else sentence
            for one in self.workloads
            for sentence in one.sentences
        )


def verdict(study: StudyFigures) -> Verdict:
    """The verdict of a study."""
    names = dict.fromkeys(one.cell.workload for one in study.cells.values())
    return Verdict(workloads=tuple(_workload(study, name) for name in names))


def _workload(study: StudyFigures, workload: str) -> WorkloadVerdict:
    cells = [one for one in study.cells.values() if one.cell.workload == workload]
    scaled = (scalability(study, workload, "weak"), scalability(study, workload, "strong"))
    facts = WorkloadVerdict(
        workload=workload,
        scalings=tuple(one for one in scaled if one is not None),
        slow_ranks=_slow_ranks(cells),
        network=tuple(_network(study, scaled, cells)),
        exchanges=tuple(part.finding for part in exchange_parts(study) if part.workload == workload),
        missing=missing(study, workload),
        priced=any(one.quote for one in cell_costs(study) if one.cell.workload == workload),
        sentences=(),
    )
    return replace(facts, sentences=tuple(_sentences(facts)))


def _slow_ranks(cells: Sequence[CellFigures]) -> str | None:
    measured = [one for one in cells if one.evidence is Evidence.MEASURED]
    found = [(one, ranks) for one in measured if (ranks := stragglers(one)) and ranks.persistent]
    if not found:
        return None
    cell, ranks = max(found, key=lambda pair: pair[0].cell.gpus)
    others = len(found) - 1
    more = (
        f" {count(others, 'other cell')} {'has' if others == 1 else 'have'} slow ranks too." if others else ""
    )
    return f"{_cell(cell)}: {ranks.finding}{more}"


def _network(
    study: StudyFigures, scaled: Iterable[Scalability | None], cells: Sequence[CellFigures]
) -> Iterator[str]:
    """The slow link of the largest size, and what limits where most is lost to exposed communication."""
    links = slow_links(cells)
    if links:
        yield max(links, key=lambda link: link.one.cell.gpus).finding
    blamed = [one.dominant for one in scaled if one and one.dominant and one.dominant.part == "transfer"]
    if blamed:
        largest = max(blamed, key=lambda one: one.gpus)
        cell = study.cells[largest.cell_id]
        finding = communication_finding(cell)
        if finding is not None:
            yield f"Network of {_cell(cell)}: {finding}"


def _cell(figures: CellFigures) -> str:
    return f"{label(figures.cell)} on {devices(figures.cell.gpus, figures.cell.device)}"


def _sentences(facts: WorkloadVerdict) -> Iterator[str]:
    for one in facts.scalings:
        yield f"{_work(one)}: {_best(one)}."
        yield from _why(one)
    super_linear = list(dict.fromkeys(name for one in facts.scalings for name in one.super_linear))
    if super_linear:
        yield f"Super-linear, and so worth a second look: {listed(super_linear)}."
    if facts.slow_ranks is not None:
        yield f"Slow ranks of {facts.slow_ranks}"
    yield from facts.network
    yield from facts.exchanges
    left_out = list(_left_out(facts))
    if left_out:
        yield f"Not in this verdict: {'; '.join(left_out)}."


def _work(one: Scalability) -> str:
    batch = f"batch {one.batch:,} per replica" if one.kind == "weak" else f"global batch {one.batch:,}"
    setting = f", {one.setting}" if one.setting else ""
    return f"{one.kind.capitalize()} scaling, {batch}{setting}"


def _best(one: Scalability) -> str:
    """What is the fastest, and what the largest size comes to."""
    if one.fastest is None:
        return "every figure is emulated, so that nothing is claimed"
    fastest = f"{_where(one.fastest)} is the fastest with {_figure(metric(one.fastest.throughput))}"
    if one.largest is None:
        alone = "one size alone was measured, so that nothing is said of scaling"
        return "; ".join((fastest, *_ties(one.fastest), alone))
    if (one.largest.strategy, one.largest.gpus) == (one.fastest.strategy, one.fastest.gpus):
        return "; ".join((f"{fastest}, {_efficiency(one.largest)}", *_ties(one.fastest)))
    where = f"on {one.largest.gpus:,}, the largest size measured, {one.largest.strategy} is ahead"
    largest = f"{where} with {_efficiency(one.largest)}"
    return "; ".join((fastest, *_ties(one.fastest), largest, *_ties(one.largest)))


def _where(one: Configuration) -> str:
    return f"{one.strategy} on {devices(one.gpus, one.device)}"


def _figure(text: MetricText) -> str:
    return f"{text.value} ({text.ends})" if text.ends else text.value


def _ties(one: Configuration) -> tuple[str, ...]:
    return (f"no difference is shown to {listed(one.ties)}",) if one.ties else ()


def _efficiency(one: Configuration) -> str:
    if one.efficiency is None:
        return "an efficiency that is not claimed"
    return f"an efficiency of {_figure(metric(one.efficiency))} against {one.against}"


def _why(one: Scalability) -> Iterator[str]:
    """The knee, and what the time is lost to."""
    if one.largest is None:
        return
    knee = f"{one.knee_text[0].upper()}{one.knee_text[1:]}"
    if one.dominant is None:
        yield f"{knee}; what the time is lost to is not known: {one.dominant_absent}."
    else:
        yield f"{knee}; {_loss(one.dominant)}."


def _loss(one: Dominant) -> str:
    if one.part is None:
        return f"at {one.gpus:,} little is lost, {percent(max(0.0, one.lost_share))} of a step"
    lost = f"at {one.gpus:,} a step loses {percent(one.lost_share)} of its time against {one.against}"
    taken = f"{PART_WORDS[one.part]} ({duration(one.part_ns)})"
    if not one.shown:
        return f"{lost}; the largest part of it, {taken}, is not told apart from zero"
    most = "most of it to" if one.part_share > 0.5 else "the largest part of it to"
    return f"{lost}, {most} {taken}"


def _left_out(facts: WorkloadVerdict) -> Iterator[str]:
    gone, others = facts.missing, sum(one.others for one in facts.scalings)
    if others:
        yield f"{_other_pieces(others)} (see the curves)"
    for state, points in (("failed", gone.failed), ("skipped", gone.skipped), ("emulated", gone.emulated)):
        if points:
            yield f"{state}: {listed(points, last=', ')}"
    if gone.unproved:
        yield f"{gone.unproved:,} of {count(gone.cells, 'cell')} without a check that it trained"
    if gone.disturbed:
        yield f"{gone.disturbed:,} of {count(gone.runs, 'run')} disturbed by other processes"
    if not facts.priced:
        yield "cost, for want of a price"


def _other_pieces(others: int) -> str:
    return "another batch, setting or link" if others == 1 else f"{others:,} other batches, settings or links"
