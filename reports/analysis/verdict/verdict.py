"""The verdict of a study, as facts and in sentences made from them.

For each workload the verdict names the fastest configuration, how far it scales, and the size beyond which
more devices do not pay. It also names the part of the step that loses the time, slow ranks and links, and
what was not measured. Only measured figures make a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from reports.analysis.budget import budget
from reports.analysis.communication import communication_finding, link_peaks, slow_links
from reports.analysis.exchange import exchange_parts
from reports.analysis.figures import EMULATED, CellFigures
from reports.analysis.next_run import NextRun, next_run
from reports.analysis.size_to_buy import ALL_EMULATED, CPU, SizeToBuy, sizes_to_buy
from reports.analysis.stragglers import Stragglers, stragglers
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.answer import answer
from reports.analysis.verdict.made_from import MadeFrom, Missing, made_from, missing
from reports.analysis.verdict.scalability import Scalability, scalability
from reports.analysis.verdict.sentences import cost_sentences, scaling_sentences
from reports.text import capital, count, devices, listed, percent
from results.cell import label
from results.run import NOT_PROVEN

INPUT_BOUND = 0.1
"""Share of a step from which waiting for data is named."""
NOTHING = "No cell has a figure: the reasons are under Failures and skips."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadVerdict:
    workload: str
    answer: str | None
    """The sentence that `answer` makes; None without a measured figure."""
    scalings: tuple[Scalability, ...]
    slow_ranks: str | None
    """A clause on the persistently slow ranks of the largest measured cell that has some; None without
    any."""
    inputs: tuple[str, ...]
    """The measured cell that waits longest for its data, if it is bound by them."""
    network: tuple[str, ...]
    """Sentences on slow links and limits of the network."""
    exchanges: tuple[str, ...]
    """Sentences on gains and losses of compressors and collectives, one for each network."""
    costs: tuple[str, ...]
    """Sentences on the cheapest cell, and on the cheapest epoch in time; empty without a price."""
    made_from: MadeFrom
    missing: Missing
    to_buy: tuple[SizeToBuy, ...]
    """The size to buy by the report's goal, or why none is named: one for each rule of scaling."""
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyVerdict:
    """A study in words."""

    workloads: tuple[WorkloadVerdict, ...]
    """Empty if nothing has a figure."""
    next_run: NextRun | None
    """The run that the study needs next; None if it needs none."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences; if there are several workloads, each sentence begins with the workload's name."""
        if not self.workloads:
            return (NOTHING,)
        several = len(self.workloads) > 1
        return tuple(
            f"{one.workload}: {sentence}" if several else sentence
            for one in self.workloads
            for sentence in one.sentences
        )


def verdict(study: StudyFigures) -> StudyVerdict:
    names = dict.fromkeys(one.cell.workload for one in study.cells.values())
    sizes = sizes_to_buy(study)
    return StudyVerdict(
        workloads=tuple(
            _workload(study, name, [one for one in sizes if one.workload == name]) for name in names
        ),
        next_run=next_run(study),
    )


def _workload(study: StudyFigures, workload: str, sizes: Sequence[SizeToBuy]) -> WorkloadVerdict:
    cells = [one for one in study.cells.values() if one.cell.workload == workload]
    scaled = (scalability(study, workload, "weak"), scalability(study, workload, "strong"))
    facts = WorkloadVerdict(
        workload=workload,
        answer=answer(study, sizes),
        scalings=tuple(one for one in scaled if one is not None),
        slow_ranks=_slow_ranks(cells),
        inputs=tuple(_inputs(cells)),
        network=tuple(_network(study, scaled, cells)),
        exchanges=tuple(part.finding for part in exchange_parts(study) if part.workload == workload),
        costs=tuple(cost_sentences(study, workload)),
        made_from=made_from(study, workload),
        missing=missing(study, workload),
        to_buy=tuple(sizes),
        sentences=(),
    )
    return replace(facts, sentences=tuple(_sentences(facts)))


def slow_cells(cells: Iterable[CellFigures]) -> list[tuple[CellFigures, Stragglers]]:
    """The measured cells with persistently slow ranks, the largest first."""
    measured = [one for one in cells if one.no_claim is None]
    found = [(one, ranks) for one in measured if (ranks := stragglers(one)) and ranks.persistent]
    return sorted(found, key=lambda pair: -pair[0].cell.gpus)


def _slow_ranks(cells: Sequence[CellFigures]) -> str | None:
    found = slow_cells(cells)
    if not found:
        return None
    cell, ranks = found[0]
    others = len(found) - 1
    more = (
        f" {count(others, 'other cell')} {'has' if others == 1 else 'have'} slow ranks too." if others else ""
    )
    return f"{_cell(cell)}: {ranks.finding}{more}"


def _inputs(cells: Sequence[CellFigures]) -> Iterator[str]:
    """A sentence on the cell with the largest share of input in its step, if cells are bound by their
    input."""
    budgets = [budget(one) for one in cells if one.no_claim is None]
    bound = {one.cell.id: one for one in budgets if one and (one.share("input") or 0.0) >= INPUT_BOUND}
    if not bound:
        return
    shares = {name: one.part_ns["input"] / one.step_ns for name, one in bound.items()}
    worst = max(shares, key=lambda name: shares[name])
    others = len(bound) - 1
    more = f", and {count(others, 'other cell')} for a tenth or more" if others else ""
    yield (
        f"Bound by its input: {_cell(bound[worst].figures)} waits for data for {percent(shares[worst])} of a "
        f"step{more}: give the loader workers, or prepare the data beforehand."
    )


def _network(
    study: StudyFigures, scaled: Iterable[Scalability | None], cells: Sequence[CellFigures]
) -> Iterator[str]:
    """The slow link of the largest size, and the limit of the cell with most exposed communication."""
    peaks = link_peaks(study.cells.values())
    links = slow_links(cells, peaks)
    if links:
        yield max(links)[1]
    dominants = [
        reach.dominant
        for one in scaled
        for reach in ((one.largest, one.dense) if one else ())
        if reach is not None and reach.dominant is not None
    ]
    blamed = [one for one in dominants if one.part == "transfer" and one.blames]
    if blamed:
        largest = max(blamed, key=lambda one: one.gpus)
        cell = study.cells[largest.cell_id]
        finding = communication_finding(cell, peaks)
        if finding is not None:
            yield f"Network of {_cell(cell)}: {finding}"


def _cell(figures: CellFigures) -> str:
    return f"{label(figures.cell)} on {devices(figures.cell.gpus, figures.cell.device)}"


def _sentences(facts: WorkloadVerdict) -> Iterator[str]:
    for size in facts.to_buy:
        # Ranks on CPU and emulated figures are named elsewhere.
        if size.absent not in (CPU, ALL_EMULATED):
            yield (
                f"{capital(size.scaling)} scaling: {size.sentence}"
                if len(facts.to_buy) > 1
                else size.sentence
            )
    for one in facts.scalings:
        yield from scaling_sentences(one)
    super_linear = list(dict.fromkeys(name for one in facts.scalings for name in one.super_linear))
    if super_linear:
        yield f"Super-linear, and so worth a second look: {listed(super_linear)}."
    if facts.slow_ranks is not None:
        yield f"Slow ranks of {facts.slow_ranks}"
    yield from facts.inputs
    yield from facts.network
    yield from facts.exchanges
    yield from facts.costs
    if facts.made_from.sentence is not None:
        yield facts.made_from.sentence
    left_out = list(_left_out(facts))
    if left_out:
        yield f"Not in this verdict: {'; '.join(left_out)}."


def _left_out(facts: WorkloadVerdict) -> Iterator[str]:
    gone, others = facts.missing, sum(one.others for one in facts.scalings)
    if others:
        noun = "other batches, settings or links"
        yield f"{'another batch, setting or link' if others == 1 else f'{others:,} {noun}'} (see the curves)"
    states = ("failed", gone.failed), ("not run yet", gone.not_run), ("skipped", gone.skipped)
    for state, points in (*states, (EMULATED, gone.emulated), (NOT_PROVEN, gone.not_proven)):
        if points:
            yield f"{state}: {listed(points, last=', ')}"
    if gone.unproved:
        yield f"{gone.unproved:,} of {count(gone.cells, 'cell')} without a check that it trained"
    if not facts.costs:
        yield "cost, for want of a price"
