"""The verdict of a study: for each workload an answer in a sentence, and small records that it rests on.

A record says what it is about, how much, how sure that is and because of what. The page, the terminal and
the exports show the same records. Only measured figures make a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.analysis.budget import (
    LOSS_NAMES,
    RESIDUAL_ABOVE,
    BudgetPart,
    Lost,
    budget,
    change,
    lost,
    why_no_budget,
)
from reports.analysis.communication import communication_finding, link_peaks, slow_links
from reports.analysis.cost import cell_costs, cheapest_text, frontiers, within_text
from reports.analysis.exchange import exchange_parts
from reports.analysis.figures import CellFigures
from reports.analysis.knee import knee
from reports.analysis.next_run import NextRun, next_run
from reports.analysis.outcomes import outcome_words
from reports.analysis.scaling import CurvePoint, Named, is_measured, piece_of, rate
from reports.analysis.size_to_buy import ALL_EMULATED, CPU, KINDS, SizeToBuy, sizes_to_buy
from reports.analysis.stragglers import Stragglers, stragglers
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.answer import answer, lead_of
from reports.text import capital, count, devices, duration, listed, metric, percent
from results.cell import BASELINE_STRATEGY, UNCOMPRESSED, label
from results.grouping import grouped
from results.plan import Scaling
from results.statistics import Metric

INPUT_BOUND = 0.1
"""Share of a step from which waiting for data is named."""
NOTHING = "No cell has a figure: the reasons are under Failures and skips."


LITTLE = 0.1
"""Share of a step up to which a loss is called little, and is not attributed to a part (10 %)."""
NO_BASELINE = "it has no baseline to compare with"
COMPRESSING = f"{LOSS_NAMES['compute']} with encoding and decoding"
"""The name of slower computation where a compressor runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One curve: how well it does at its largest size, where growing stops to pay, and why."""

    scaling: Scaling
    strategy: str
    gpus: int
    """Its largest measured size."""
    efficiency: Metric | None
    """There; None for the baseline itself, and where none is claimed."""
    against: str | None
    """The baseline of the efficiency: `single on 1`."""
    knee: int | None
    """The last size up to which every growth pays; None if no growth does, or all do."""
    knee_text: str
    lost_on: str
    """The cell whose step is divided: the first beyond the knee, or else the largest."""
    lost_gpus: int
    lost_share: float | None
    """The share of its step that is lost against the baseline's computation; None if that is unknown."""
    lost_to: BudgetPart | None
    """The part that takes most of that; None where little is lost, or the parts do not explain it."""
    cause: str
    """A clause on the lost time, or on why it is unknown."""


def reach(named: Named) -> Reach | None:
    """How far the curve of a point goes; None if fewer than two of its sizes were measured."""
    curve, stop = named[0], knee(named[0])
    measured = [point for point in curve.points if is_measured(point)]
    if len(measured) < 2 and not (stop.growths and measured):
        return None
    largest = measured[-1]
    beyond = stop.beyond.larger if stop.beyond else None
    point = next((one for one in measured if one.gpus == beyond), largest)
    found = _lost(point)
    share, part = (found.share, _blamed(found)) if isinstance(found, Lost) else (None, None)
    return Reach(
        scaling=curve.key.kind,
        strategy=curve.key.label,
        gpus=largest.gpus,
        efficiency=largest.efficiency.claimed,
        against=largest.efficiency.against,
        knee=stop.at,
        knee_text=stop.text,
        lost_on=point.cell.id,
        lost_gpus=point.gpus,
        lost_share=share,
        lost_to=part,
        cause=_cause(point, found),
    )


def _lost(point: CurvePoint) -> Lost | str:
    """The time that a step loses against the baseline's computation, or why it is unknown."""
    claim = point.efficiency
    if claim.baseline is None or claim.metric is None or claim.is_baseline:
        return claim.reason or NO_BASELINE
    if not claim.metric.tells:
        return "the runs are too far apart"
    here, ideal = budget(point.figures), budget(claim.baseline)
    if here is None or ideal is None:
        return str(why_no_budget(point.figures if here is None else claim.baseline))
    return lost(here, ideal)


def _blamed(loss: Lost) -> BudgetPart | None:
    """The largest part, unless little is lost, or the parts miss the step by too much."""
    off, part = abs(loss.part_ns["other"]), loss.largest
    missed = off > RESIDUAL_ABOVE * loss.budget.step_ns and off > loss.part_ns[part] / 2
    return None if missed or loss.share < LITTLE else part


def _cause(point: CurvePoint, loss: Lost | str) -> str:
    if isinstance(loss, str):
        return f"unknown: {loss}"
    share = f"{percent(max(0.0, loss.share))} of a step on {point.gpus:,}"
    if loss.share < LITTLE:
        return f"little: {share}"
    told = f"{share} against {point.efficiency.against}"
    part = _blamed(loss)
    if part is None:
        return f"{told}; the cause is unknown: {change(loss.part_ns['other'], loss.budget.step_ns)}"
    parts = list(_parts(point, loss))
    if len(parts) > 1:
        return f"{told}; the runs do not show which part is the largest: {listed(parts)}"
    most = "most of it" if loss.part_ns[part] > loss.total_ns / 2 else "the largest part of it"
    return f"{told}, {most} {parts[0]}{'' if loss.shown(part) else ', which is not shown to be above zero'}"


def _parts(point: CurvePoint, loss: Lost) -> Iterator[str]:
    """The largest part and its rivals, the largest first; the rivals and it with their ends."""
    encodes = point.cell.compression != UNCOMPRESSED
    every = (loss.largest, *loss.rivals)
    for part in sorted(every, key=lambda one: -loss.part_ns[one]):
        low, high = loss.ends_ns(part)
        ends = f", {duration(low)} to {duration(high)}" if len(every) > 1 else ""
        words = COMPRESSING if encodes and part == "compute" else LOSS_NAMES[part]
        yield f"{words} ({duration(loss.part_ns[part])}{ends})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One answer of the verdict."""

    what: str
    figure: str
    sure: str = ""
    because: str = ""
    rank: int
    """If not all records fit, those with the lowest ranks are shown."""

    growth: bool = False
    """Whether it says where growing stops to pay, or why."""

    @property
    def short(self) -> str:
        return f"{self.figure}{f' ({self.sure})' if self.sure else ''}"

    @property
    def told(self) -> str:
        """All but what it is about."""
        return f"{self.short}{f': {self.because}' if self.because else ''}"

    @property
    def sentence(self) -> str:
        return f"{capital(self.what)}: {self.told.removesuffix('.')}."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadVerdict:
    workload: str
    answer: str
    """The answer in a sentence; empty without a measured figure."""
    beside: tuple[str, ...]
    """How the others compare with it, in sentences."""
    records: tuple[Record, ...]
    reaches: tuple[Reach, ...]
    """How far the curve of the answer goes, for each rule of scaling that has two sizes."""
    to_buy: tuple[SizeToBuy, ...]
    """The size to buy by the report's goal, or why none is named: one for each rule of scaling."""

    @property
    def sentences(self) -> tuple[str, ...]:
        said = (self.answer, *self.beside, *(one.sentence for one in self.records))
        return tuple(filter(None, said))


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
    reaches = {size.scaling: reach_of(study, size) for size in sizes}
    known = tuple(one for one in reaches.values() if one is not None)
    told, beside = answer(study, sizes)
    bought = [one for one in sizes if one.absent not in (CPU, ALL_EMULATED)]
    return WorkloadVerdict(
        workload=workload,
        answer=told,
        beside=beside,
        records=(
            *(_to_buy(one, reaches[one.scaling], several=len(sizes) > 1) for one in bought),
            *(record for one in sizes for record in _scaling(study, one, reaches[one.scaling])),
            *_machine(study, workload, known),
            *_exchange_and_cost(study, workload),
            *_left_out(study, workload),
        ),
        reaches=known,
        to_buy=tuple(sizes),
    )


def reach_of(study: StudyFigures, bought: SizeToBuy) -> Reach | None:
    """How far the curve of the size to buy goes, or else the curve of the fastest at the largest size."""
    piece = piece_of(study.curves, bought.workload, bought.scaling)
    if piece is None or not piece.measured:
        return None
    lead = lead_of(piece, bought, study.assumptions.smallest_effect)
    fastest = max(piece.measured, key=lambda one: (one[1].gpus, rate(one)))
    return next(filter(None, map(reach, (*([lead] if lead else []), fastest))), None)


def _to_buy(one: SizeToBuy, found: Reach | None, *, several: bool) -> Record:
    what = f"to buy, {one.scaling}" if several else "to buy"
    if one.choice is None:
        return Record(what=what, figure=one.text, rank=0)
    # The record of the scaling has the text of a knee.
    why = [one.why] if one.why and (found is None or one.why != found.knee_text) else []
    return Record(
        what=what,
        figure=f"{one.choice.size} {one.choice.how}",
        sure=": ".join([f"{one.confidence} confidence", *(["; ".join(one.doubts)] if one.doubts else [])]),
        because="; ".join([one.goal, *why]),
        rank=0,
    )


def _scaling(study: StudyFigures, size: SizeToBuy, found: Reach | None) -> Iterator[Record]:
    piece = piece_of(study.curves, size.workload, size.scaling)
    assert piece is not None
    setting = study.settings[piece.curves[0].key.setting]
    what = f"{size.scaling}, batch {size.batch:,}{f', {setting}' if setting else ''}"
    if found is None:
        none = "only one size was measured" if piece.measured else "every figure is emulated"
        yield Record(what=what, figure=f"not judged: {none}", rank=2, growth=True)
        return
    place, _, growth = found.knee_text.partition(": ")
    share = (
        f"{metric(found.efficiency).with_ends} against {found.against}" if found.efficiency else "not claimed"
    )
    figure = f"{found.strategy} on {found.gpus:,}, efficiency {share}; {place}"
    yield Record(what=what, figure=figure, because=growth, rank=2, growth=True)
    yield Record(what=f"time lost, {size.scaling}", figure=found.cause, rank=5, growth=True)
    if beyond := [named[1].figures.name for named in piece.measured if named[1].efficiency.super_linear]:
        yield Record(what="super-linear", figure=f"{listed(beyond)}, worth a second look", rank=6)


def slow_cells(cells: Iterable[CellFigures]) -> list[tuple[CellFigures, Stragglers]]:
    """The measured cells with ranks that are slow in every run, the largest first."""
    measured = [one for one in cells if one.no_claim is None]
    found = [(one, ranks) for one in measured if (ranks := stragglers(one)) and ranks.marked]
    return sorted(found, key=lambda pair: -pair[0].cell.gpus)


def _machine(study: StudyFigures, workload: str, found: Sequence[Reach]) -> Iterator[Record]:
    """Name what holds the machine up: slow ranks, the input, a slow link, the limit of the network."""
    cells = [one for one in study.cells.values() if one.cell.workload == workload]
    for cell, ranks in (slow := slow_cells(cells))[:1]:
        others = f" {count(len(slow) - 1, 'other cell')} too." if len(slow) > 1 else ""
        what = "slow ranks" if ranks.persistent else "laden ranks"
        yield Record(what=what, figure=f"{_cell(cell)}: {ranks.finding}{others}", rank=3)
    yield from _input(cells)
    peaks = link_peaks(study.cells.values())
    if links := slow_links(cells, peaks):
        yield Record(what="slow link", figure=max(links)[1].removeprefix("Slow link: "), rank=4)
    blamed = [one for one in found if one.lost_to == "transfer"]
    if blamed:
        cell = study.cells[max(blamed, key=lambda one: one.lost_gpus).lost_on]
        if limit := communication_finding(cell, peaks):
            yield Record(what="network", figure=f"{_cell(cell)}: {limit}", rank=8)


def _input(cells: Sequence[CellFigures]) -> Iterator[Record]:
    """Name the measured cell that waits longest for data."""
    shares = [(one.share("input") or 0.0, one.cell.id, cell) for cell in cells if (one := budget(cell))]
    bound = [one for one in shares if one[0] >= INPUT_BOUND and one[-1].no_claim is None]
    if bound:
        share, _, worst = max(bound, key=lambda one: one[:2])
        others = f", and {count(len(bound) - 1, 'other cell')} for a tenth or more" if len(bound) > 1 else ""
        waits = f"{_cell(worst)} waits for data for {percent(share)} of a step{others}"
        give = "give the loader workers, or prepare the data beforehand"
        yield Record(what="input", figure=waits, because=give, rank=4)


def _exchange_and_cost(study: StudyFigures, workload: str) -> Iterator[Record]:
    for part in exchange_parts(study):
        if part.workload == workload:
            yield Record(what="exchanges", figure=part.finding, rank=8)
    frontier = [one for one in frontiers(cell_costs(study)) if one.cheapest.cell.workload == workload]
    for one in frontier:
        title = f"{one.title}: " if len(frontier) > 1 else ""
        yield Record(what="cost", figure=f"{title}{cheapest_text(one)}", rank=7)
        if study.assumptions.within_s is not None:
            told = within_text(one, study.assumptions.within_s)
            yield Record(what="an epoch in time", figure=f"{title}{told}", rank=6)


def _left_out(study: StudyFigures, workload: str) -> Iterator[Record]:
    """Name the points of a workload without a figure or a claim, by the reason: `crashed: ddp on 8`."""
    told = []
    for why, points in grouped(_points_left_out(study, workload)).items():
        sizes = {it: [f"{n:,}" for n in sorted(set(those))] for it, those in grouped(points).items()}
        told.append(f"{why}: {listed([f'{it} on {listed(on)}' for it, on in sizes.items()], last=', ')}")
    pieces = [piece.others for kind in KINDS if (piece := piece_of(study.curves, workload, kind))]
    if others := sum(pieces):
        told.append(f"{count(others, 'other piece')} of work: another batch, setting or link")
    proofs = [one.proof for one in study.cells.values() if one.cell.workload == workload]
    if unchecked := proofs.count(None):
        told.append(f"{unchecked:,} of {count(len(proofs), 'cell')} without a check that it trained")
    if told:
        yield Record(what="not in this verdict", figure="; ".join(told), rank=1)


def _points_left_out(study: StudyFigures, workload: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """The points of a workload without a figure or a claim: the reason, the exchange and the size."""
    curves = [curve for curve in study.curves if curve.key.workload == workload]
    for curve in curves:
        gaps = ((outcome_words(gap.outcome), gap.gpus) for gap in curve.gaps if gap.outcome is not None)
        yield from ((why, (curve.key.label, gpus)) for why, gpus in gaps)
    for one in study.cells.values():
        if one.cell.workload == workload and one.no_claim:
            yield one.no_claim, (label(one.cell), one.cell.gpus)
    alone = any(curve.single is not None for curve in curves)
    yield from (("skipped", point) for point in _points_skipped(study, workload, alone=alone))


def _points_skipped(study: StudyFigures, workload: str, *, alone: bool) -> Iterator[tuple[str, int]]:
    """The points that were planned not to run. Neither what the user excluded is missed, nor one device with
    an exchange where it ran `alone`, nor several with `single`."""
    for group in study.skipped:
        skip = group.skip
        if skip.workload == workload and not skip.excluded and skip.strategy != BASELINE_STRATEGY:
            yield from ((label(skip), gpus) for gpus in group.gpus if gpus > 1 or not alone)


def _cell(figures: CellFigures) -> str:
    return f"{label(figures.cell)} on {devices(figures.cell.gpus, figures.cell.device)}"
