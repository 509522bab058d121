"""The answer for a workload in a sentence: what to use, its speed-up, and how the others compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.analysis.budget import BudgetPart, budget
from reports.analysis.cost import CellCost, cell_costs
from reports.analysis.effect import sides
from reports.analysis.figures import differences_in_training
from reports.analysis.knee import knee
from reports.analysis.scaling import Named, Piece, of_largest_batch, piece_of, rate, ties
from reports.analysis.size_to_buy import SizeToBuy
from reports.analysis.study import StudyFigures
from reports.text import capital, devices, duration, listed, metric, number, percent, whole_percent
from results.cell import BASELINE_STRATEGY
from results.grouping import grouped
from results.statistics import Metric, ratio_of_runs

_MOST_OTHERS = 3
_BECAUSE: dict[BudgetPart, str] = {
    "input": "it waits longer for data",
    "compute": "its computation is slower",
    "transfer": "its exchange is not hidden",
    "wait": "its ranks wait longer for each other",
    "imbalance": "its ranks compute unequal numbers of rows",
    "bubble": "its stages wait for their input",
}
"""The reason for a slower step, by the part that takes most of the difference."""


def answer(study: StudyFigures, sizes: Sequence[SizeToBuy]) -> tuple[str, tuple[str, ...]]:
    """Answer for one workload by its sizes to buy; empty if nothing was measured that makes a claim.

    Sentences follow on how the others compare, and on the two sizes that weak and strong scaling name.
    """
    smallest = study.assumptions.smallest_effect
    for bought in sizes:
        piece = piece_of(study.curves, bought.workload, bought.scaling)
        lead = lead_of(piece, bought, smallest) if piece else None
        if piece is not None and lead is not None:
            others = (*_others(piece, lead, smallest), *_not_comparable(piece, lead))
            more = (*_second_choice(piece, lead, smallest), *_trade(study, sizes))
            beside = tuple(f"{capital(text)}." for text in (*others, *more))
            return f"{_speed_up(lead)}{_why(bought)}.", beside
    return "", ()


def lead_of(piece: Piece, bought: SizeToBuy, smallest: float) -> Named | None:
    """The size to buy; without one the fastest at the largest measured size, or, if it is not shown to be
    slower than that, what trains as plain data parallelism does."""
    if bought.choice is not None:
        chosen = (one for one in piece.measured if one[1].figures.cell.id == bought.choice.cell_id)
        return next(chosen, None)
    largest = max((point.gpus for _, point in piece.measured), default=0)
    alike = of_largest_batch([one for one in piece.measured if one[1].gpus == largest])
    there = sorted(alike, key=rate, reverse=True)
    level = [one for one in there if ties(there[0][1].figures, one[1].figures, smallest)]
    plain = (one for one in level if not _unlike(piece, one))
    return next(plain, next(iter(there), None))


def _unlike(piece: Piece, named: Named) -> tuple[str, ...]:
    """How a point trains otherwise than plain data parallelism in the fullest precision of the piece."""
    return differences_in_training(named[1].figures, (point.cell for _, point in piece.measured))


def _speed_up(lead: Named) -> str:
    """`ddp on 2 GPUs trains 1.83 times (1.80 to 1.86) as fast as one device`."""
    curve, point = lead
    where = f"{curve.key.label} on {devices(point.gpus, point.cell.device)}"
    faster, against = times(lead), point.efficiency.against
    if faster is None:
        return f"{where} has {metric(point.figures.throughput).with_ends}"
    if not faster.tells:
        return f"{where}: the runs are too far apart to tell its speed-up ({_figure(faster)})"
    base = "one device" if against == f"{BASELINE_STRATEGY} on 1" else against
    if faster.low is not None and faster.low <= 1:
        how = "slower" if faster.high is not None and faster.high < 1 else "not shown to be faster"
        return f"{where} is {how} than {base} ({_figure(faster)} times)"
    ends = _figure(faster).partition(", ")[2]
    return f"{where} trains {number(faster.value)} times {f'({ends}) ' if ends else ''}as fast as {base}"


def times(named: Named) -> Metric | None:
    """The throughput over the baseline's; None for the baseline, and where no efficiency is claimed."""
    claim = named[1].efficiency
    if claim.claimed is None or claim.baseline is None:
        return None
    return claim.claimed.times(named[1].gpus / claim.baseline.cell.gpus)


def _figure(times: Metric) -> str:
    """`1.83, 1.80 to 1.86`."""
    ends = "" if times.low is None or times.high is None else f", {number(times.low)} to {number(times.high)}"
    return f"{number(times.value)}{ends}"


def _why(bought: SizeToBuy) -> str:
    """How sure a size to buy is, and why it is this one, without the words on the place of its knee."""
    choice = bought.choice
    if choice is None or bought.why is None:
        return ""
    why = (bought.why.partition(": ")[2] or bought.why).partition("; ")[0]
    odds = choice.odds.get(choice.gpus) if choice.odds and "of resamples" not in why else None
    sure = "" if odds is None else f" in {whole_percent(odds)} of resamples"
    more = " or more" if choice.or_more else ""
    return f", the size to buy{f' so far ({choice.between})' if choice.between else more + sure}: {why}"


def _others(piece: Piece, lead: Named, smallest: float) -> Iterator[str]:
    """How the other strategies do on as many devices, the fastest first, judged together."""
    if unlike := _unlike(piece, lead):
        yield f"it {listed(unlike)}: compare its loss too"
    others = _beside(piece, lead).get(lead[1].cell.global_batch, [])
    judged = sides([(_sample_ns(lead), _sample_ns(one)) for one in others], smallest)
    by_side = grouped(zip(judged, others, strict=True))
    if alike := [f"{one[0].key.label} ({_rate(lead, one)})" for one in by_side.get(None, ())]:
        yield f"not shown to be faster or slower: {listed(alike)}"
    yield from (
        f"faster: {one[0].key.label}, {number(_ratio(lead, one).value)} times"
        for one in by_side.get("faster", ())
        if not _unlike(piece, one)
    )
    slower = [
        f"{one[0].key.label}, {percent(_ratio(lead, one).value)} of its rate{_because(lead, one)}"
        for one in by_side.get("slower", ())
    ]
    if slower:
        yield f"slower: {listed(slower, most=_MOST_OTHERS, last='; ')}"


def _rate(lead: Named, one: Named) -> str:
    """`1.83, 1.80 to 1.86`: the speed-up over the baseline; without a baseline `97.2 % of its rate`."""
    faster = times(one)
    return _figure(faster) if faster else f"{percent(_ratio(lead, one).value)} of its rate"


def _not_comparable(piece: Piece, lead: Named) -> Iterator[str]:
    """Name the strategies that train on another number of samples a step."""
    batch, beside = lead[1].cell.global_batch, _beside(piece, lead)
    unequal = [
        f"{curve.key.label} ({size:,})" for size in beside if size != batch for curve, _ in beside[size]
    ]
    if unequal:
        yield (
            f"not comparable, because a step trains on another number of samples than {batch:,}: "
            f"{listed(unequal)}; strong scaling compares them at one global batch"
        )


def _beside(piece: Piece, lead: Named) -> dict[int, list[Named]]:
    """Return the other points on as many devices by their global batch, the fastest first."""
    return grouped(
        (one[1].cell.global_batch, one)
        for one in sorted(piece.measured, key=rate, reverse=True)
        if one[1].gpus == lead[1].gpus and one[0] is not lead[0]
    )


def _sample_ns(named: Named) -> list[float]:
    """The time of a sample in each run."""
    figures = named[1].figures
    return [ns / figures.cell.global_batch for ns in figures.run_step_ns]


def _ratio(lead: Named, other: Named) -> Metric:
    """The ratio of throughputs, `other` over `lead`."""
    return ratio_of_runs(_sample_ns(lead), _sample_ns(other), "ratio")


def _second_choice(piece: Piece, lead: Named, smallest: float) -> Iterator[str]:
    """Name a curve that trains otherwise, and pays further or is shown to be faster on as many devices."""
    found = list(_others_that_win(piece, lead, smallest))
    if not found:
        return
    best = max(found, key=lambda one: (one[1].gpus, rate(one)))
    curve, point = best
    claims = {one.gpus: one.efficiency.metric for one in lead[0].points}
    share, own = point.efficiency.metric, claims.get(point.gpus)
    where = f", where {lead[0].key.label} has {percent(own.value)}" if own else ""
    has = f"{percent(share.value) if share else ''} on {point.gpus:,}{where}"
    unlike = listed(_unlike(piece, best))
    yield f"second choice, if its loss is as good: {curve.key.label}, which {unlike}, has {has}"


def _others_that_win(piece: Piece, lead: Named, smallest: float) -> Iterator[Named]:
    """The points that train otherwise and are shown to be faster, at their knee or the size of `lead`."""
    for curve in piece.curves:
        size = max(knee(curve).size or 0, lead[1].gpus)
        for point in curve.points:
            claimed = point.gpus == size and point.efficiency.metric is not None
            other = claimed and _unlike(piece, (curve, point))
            if other and not ties(point.figures, lead[1].figures, smallest):
                yield curve, point


def _because(lead: Named, other: Named) -> str:
    """Name the part that takes more than half of the time by which a step is longer; empty without one."""
    (mine, its), parts = (budget(lead[1].figures), budget(other[1].figures)), {}
    if mine is None or its is None:
        return ""
    for part in _BECAUSE:
        own, more = (one.part_ns.get(part, 0.0) / one.cell.global_batch for one in (mine, its))
        parts[part] = more - own
    longer = its.step_ns / its.cell.global_batch - mine.step_ns / mine.cell.global_batch
    part = max(_BECAUSE, key=lambda part: parts[part])
    if not parts[part] > longer / 2 > 0:
        return ""
    encodes = part == "compute" and its.cell.compresses
    return f", because {'it encodes and decodes' if encodes else _BECAUSE[part]}"


def _trade(study: StudyFigures, sizes: Sequence[SizeToBuy]) -> Iterator[str]:
    """Weigh the two sizes to buy that weak and strong scaling name."""
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    named = {one.choice.gpus: costs[one.choice.cell_id] for one in sizes if one.choice}
    if len(named) < 2:
        return
    small, large = named[min(named)], named[max(named)]
    faster = small.million_samples_ns.value / large.million_samples_ns.value
    first, second, dearer = small.usd_per_million_samples, large.usd_per_million_samples, ""
    if first is not None and second is not None:
        share = second.value / first.value - 1
        dearer = f", {whole_percent(abs(share))} {'dearer' if share >= 0 else 'cheaper'}"
    yield (
        f"for {small.basis[2]} {_told(small)} at a global batch of {small.cell.global_batch:,}, and "
        f"{_told(large)} at {large.cell.global_batch:,}: {number(faster)} times as fast{dearer}, if the "
        f"larger batch trains as well"
    )


def _told(cost: CellCost) -> str:
    time, usd, _ = cost.basis
    paid = f" and {metric(usd).value}" if usd else ""
    return f"{devices(cost.cell.gpus, cost.cell.device)} take {duration(time.value)}{paid}"
