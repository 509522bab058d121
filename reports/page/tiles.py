"""The four tiles of the first screen: what to buy, how well it scales, what an epoch takes, what to trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.analysis.assumptions import study_day
from reports.analysis.cost import CellCost, cell_costs
from reports.analysis.figures import CellFigures
from reports.analysis.outcomes import NOT_RUN, outcome_words
from reports.analysis.size_to_buy import UNPROVEN, Purchase, SizeToBuy
from reports.analysis.pick import UNPROVEN
from reports.analysis.size_to_buy import SizeToBuy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.scalability import Configuration, Scalability, scalability
from reports.page.section import Tile
from reports.text import count, device_word, duration, metric, number
from results.cell import label
from results.statistics import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A subject of the first screen: one workload under one rule of scaling."""

    bought: SizeToBuy
    scaling: Scalability | None
    cell: CellFigures | None
    """The choice, or else the best at the largest size measured."""
    several: bool
    """Whether the first screen is about several workloads, so that each is named."""

    @property
    def work(self) -> str:
        """`weak, batch 8`."""
        return f"{self.bought.scaling}, batch {self.bought.batch:,}"

    @property
    def named(self) -> str:
        """The work, with the workload where there are several."""
        return f"{self.bought.workload} {self.work}" if self.several else self.work

    @property
    def short(self) -> str:
        """`weak`; with the workload where there are several."""
        return f"{self.bought.workload} {self.bought.scaling}" if self.several else self.bought.scaling


def shown(study: StudyFigures, sizes: Sequence[SizeToBuy]) -> list[Shown]:
    """Return the subjects of all sizes to buy, in their order."""
    found, several = [], len({bought.workload for bought in sizes}) > 1
    for bought in sizes:
        scaling = scalability(study, bought.workload, bought.scaling)
        cell_id = bought.choice.cell_id if bought.choice else _best_id(study, scaling)
        cell = study.cells.get(cell_id) if cell_id else None
        found.append(Shown(bought=bought, scaling=scaling, cell=cell, several=several))
    return found


def tiles(study: StudyFigures, all_shown: Sequence[Shown]) -> tuple[Tile, ...]:
    """In the order in which they are read."""
    return (_size(all_shown), _efficiency(all_shown), _epoch(study, all_shown), _trust(study))


def _best_id(study: StudyFigures, scaling: Scalability | None) -> str | None:
    """The cell of the best at the largest size, or of the fastest."""
    best = _configuration(scaling)
    if best is None or scaling is None:
        return None
    for curve in study.curves:
        if (curve.key.kind, curve.key.constant_batch, curve.key.label) == (
            scaling.kind,
            scaling.batch,
            best.strategy,
        ):
            for point in curve.points:
                if point.gpus == best.gpus and point.figures.throughput == best.throughput:
                    return point.figures.cell.id
    return None


def _configuration(scaling: Scalability | None) -> Configuration | None:
    if scaling is None:
        return None
    return scaling.largest.configuration if scaling.largest else scaling.fastest


def _size(all_shown: Sequence[Shown]) -> Tile:
    first = all_shown[0].bought if all_shown else None
    figure, lines = "none", ["no cell has a figure" if first is None else first.absent or ""]
    if first is not None and first.choice is not None:
        beyond = first.choice.shown_to
        open_growth = f"growing beyond {beyond or 0:,} may pay or not: the runs leave it open"
        figure = first.choice.size
        lines = [
            f"with {first.choice.strategy}; {all_shown[0].named}",
            first.goal if beyond is None else open_growth,
            *_left_out(first.left_out),
            *(f"{one.named}: {one.bought.text}" for one in all_shown[1:4]),
        ]
    return Tile(title="Size to buy", figure=figure, lines=tuple(lines), anchor="method-size-to-buy")


def _left_out(points: Sequence[str]) -> Iterator[str]:
    """Name the points that could not be chosen, and why, with the first of each kind."""
    unproven = [point for point in points if point.endswith(f"({UNPROVEN})")]
    other = [point for point in points if point not in unproven]
    if other:
        yield (
            f"not chosen from: {count(len(other), 'point')} of other training, which may take more samples "
            f"to the same loss, such as {other[0]}"
        )
    if unproven:
        yield f"not chosen from: {count(len(unproven), 'point')} without a proof, such as {unproven[0]}"


def _because(reasons: Iterable[str]) -> str:
    """` (runs on exactly 1 GPU; 2 other reasons)`: the most frequent reason, or both of two; empty for
    no reasons."""
    counted = [reason for reason, _ in Counter(reasons).most_common()]
    if not counted:
        return ""
    told = [counted[0], f"{len(counted) - 1} other reasons"] if len(counted) > 2 else counted
    return f" ({'; '.join(told)})"


def _efficiency(all_shown: Sequence[Shown]) -> Tile:
    lines: list[str] = []
    figure = ""
    for one in all_shown[:4]:
        value, against, where = _claim(one)
        if value is None:
            told = f"{one.named}: {against}"
        else:
            said = metric(value)
            told = f"{where}: {said.value} ({said.note})"
            if not figure:
                figure, note, choice = said.value, said.note, one.bought.choice
                if choice is not None and choice.shown_efficiency is not None:
                    # The choice is from one size to another.
                    least = metric(choice.shown_efficiency)
                    note = f"on {choice.shown_to:,}: {least.note}; on {choice.gpus:,}: {said.note}"
                    figure = f"{least.value} to {said.value}"
                told = f"{note}; {where}, against {against}"
        lines.append(told)
    return Tile(
        title="Efficiency",
        figure=figure or "not claimed",
        lines=tuple(lines) or ("no cell has a figure",),
        anchor="method-efficiency",
    )


def _claim(one: Shown) -> tuple[Metric | None, str, str]:
    """Return the efficiency, its baseline (or the reason why it is missing), and its place."""
    choice = one.bought.choice
    if choice is not None:
        where = f"{choice.strategy} on {choice.gpus:,}, {one.short}"
        return choice.efficiency, choice.against or "the baseline itself", where
    best = _configuration(one.scaling)
    if best is None:
        return None, "every figure is emulated", ""
    where = f"{best.strategy} on {best.gpus:,}, {one.short}"
    return best.efficiency, best.against or f"{where} has no baseline to be held against", where


def _epoch(study: StudyFigures, all_shown: Sequence[Shown]) -> Tile:
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    found = [(one, costs[one.cell.cell.id]) for one in all_shown if one.cell and one.cell.cell.id in costs]
    if not found:
        return Tile(title="An epoch", figure="unknown", lines=("no measured cell",), anchor="method-epoch")
    first = found[0][1]
    time, usd = _basis(first)
    ends = [] if time.low is None or time.high is None else [f"{_time(time.low)} to {_time(time.high)}"]
    ends += [f"{metric(usd).ends} USD"] if usd and metric(usd).ends else []
    interval = f" ({', '.join(ends)})" if ends else ""
    samples = first.epoch_samples if first.epoch_ns and first.epoch_samples else 1_000_000
    return Tile(
        title="An epoch" if first.epoch_ns else "A million samples",
        figure=_took(first),
        lines=(
            f"{samples:,} samples by {_where(found[0][0], first)}{interval}",
            _price(study, first),
            *(f"{_where(one, cost)}: {_took(cost)}" for one, cost in found[1:4]),
        ),
        anchor="method-epoch",
    )


def _basis(cost: CellCost) -> tuple[Metric, Metric | None]:
    """Return the time and the cost of an epoch, or of a million samples if its size is unknown."""
    if cost.epoch_ns:
        return cost.epoch_ns, cost.usd_per_epoch
    return cost.million_samples_ns, cost.usd_per_million_samples


def _took(cost: CellCost) -> str:
    """`3 h 20 min, 434 USD`."""
    time, usd = _basis(cost)
    return _time(time.value) + (f", {metric(usd).value}" if usd else "")


def _time(ns: float) -> str:
    """`21.2 h`, and below an hour as a duration."""
    return f"{number(ns / 3.6e12)} h" if ns >= 3.6e12 else duration(ns)


def _where(one: Shown, cost: CellCost) -> str:
    assert one.cell is not None
    choice = one.bought.choice
    name = choice.strategy if choice else label(cost.cell)
    return f"{name} on {cost.cell.gpus:,}, {one.short}"


def _price(study: StudyFigures, cost: CellCost) -> str:
    """Describe the price with its date and range, or the reason why it is missing."""
    quote = cost.quote
    if quote is None:
        return f"no cost: {cost.absent}"
    price, day = quote.price, study_day(study.runs)
    dated = f", of {price.date}" if price.date else ""
    unit = f"USD a {device_word(cost.cell.device)} and hour"
    told = f"{price.usd_per_gpu_hour:,.2f} {unit} ({price.place or quote.origin}{dated}"
    if len(quote.alternatives) > 1:
        dollars = [other.usd_per_gpu_hour for other in quote.alternatives]
        told += f"; others {min(dollars):,.2f} to {max(dollars):,.2f}"
    warning = quote.warning(day)
    return f"{told}{f'; {warning}' if warning else ''})"


def _trust(study: StudyFigures) -> Tile:
    proven = sum(one.proof is not None for one in study.cells.values())
    cells, runs = len(study.cells), study.runs
    disturbed = sum(run.disturbed for run in runs)
    dirty = sum(bool(run.environment and run.environment.code.dirty) for run in runs)
    not_run = sum(failure.outcome == NOT_RUN for failure in study.failures)
    failed = [failure for failure in study.failures if failure.outcome != NOT_RUN]
    lost = f", {count(len(study.lost), 'run')} of other cells" if study.lost else ""
    skipped = sum(len(group.gpus) for group in study.skipped)
    return Tile(
        title="Trust",
        figure=f"{proven:,} of {count(cells, 'cell')} proven" if cells else "nothing proven",
        lines=(
            "proven: their training was checked; "
            f"of {count(len(study.pools), 'planned cell')} {cells:,} have a figure",
            f"disturbed: {disturbed:,} of {count(len(runs), 'run')}; code with local changes: {dirty:,}",
            f"failed: {count(len(failed), 'cell')}{_because(outcome_words(one.outcome) for one in failed)}"
            f"{lost}; not run: {not_run:,}",
            f"skipped: {count(skipped, 'point')}{_because(group.skip.reason for group in study.skipped)}",
        ),
        anchor="method-proof",
        alarm=proven < cells or bool(disturbed or dirty or failed),
    )
