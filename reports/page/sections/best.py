"""The best of every size, and the figures of every strategy at every size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from reports import fields
from reports.analysis.cost import CellCost, cell_costs
from reports.analysis.effect import effect_text
from reports.analysis.headline import efficiency_field, runs_text
from reports.analysis.outcomes import outcome_words
from reports.analysis.scaling import Curve, CurvePoint, is_measured, rate, ties
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.looks import works
from reports.page.section import Definition, Row, Section, Table
from reports.table import Column, TextTable, figures, table, words
from reports.text import NOTHING, listed, number

_MOST_TIES = 3
_FEWEST_ROWS = 2
"""A map needs more rows than this: the table already has one strategy and the single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfSize:
    """The fastest configuration of one size in one piece of work."""

    work: str
    curve: Curve
    point: CurvePoint
    ties: tuple[str, ...]
    """Others to which no difference is shown."""
    compared: int
    cost: CellCost | None


def best_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure."""
    found = list(_best(study))
    if not found:
        return None
    several = len({one.work for one in found}) > len({one.curve.key.kind for one in found})
    maps = []
    for title, curves in works(study):
        if sum(bool(curve.points) for curve in curves) > _FEWEST_ROWS:
            what = "efficiency by size, %" if _claimed(curves) else "throughput of a device by size"
            maps.append(Table(_heat_map(curves), f"{title}, {curves[0].key.kind}: {what}", shaded=True))
    tie = Definition(
        "method-tie",
        "No difference shown",
        "The interval of the ratio of the two throughputs contains 1, or the two differ by less than "
        f"{effect_text(study.assumptions.smallest_effect)}; for single runs by less than 5 %.",
    )
    fastest = Table(_table(study, found, several=several), "The fastest of each size")
    return Section(
        anchor="best",
        title="Best of each size",
        blocks=(fastest, Row(tuple(maps))) if maps else (fastest,),
        definitions=(tie,),
    )


def _best(study: StudyFigures) -> Iterator[BestOfSize]:
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    for title, curves in works(study):
        points = [(curve, point) for curve in curves for point in curve.points]
        for size in sorted({point.gpus for _, point in points}):
            here = [pair for pair in points if pair[1].gpus == size]
            measured = [pair for pair in here if is_measured(pair[1])] or here
            curve, point = max(measured, key=rate)
            yield BestOfSize(
                work=title,
                curve=curve,
                point=point,
                ties=tuple(
                    other.key.label
                    for other, one in measured
                    if one is not point
                    and ties(point.figures, one.figures, study.assumptions.smallest_effect)
                ),
                compared=len(measured),
                cost=costs.get(point.figures.cell.id),
            )


def _table(study: StudyFigures, found: Sequence[BestOfSize], *, several: bool) -> TextTable:
    def fastest(row: BestOfSize) -> str:
        return row.curve.key.label if row.compared > 1 else f"{row.curve.key.label} (the only one)"

    def efficiency(row: BestOfSize) -> Field:
        claim = row.point.efficiency
        return NONE if claim.baseline is None else efficiency_field(claim)

    def usd(row: BestOfSize) -> Field:
        cost = row.cost.usd_per_million_samples if row.cost else None
        return fields.shown(cost.value if cost else None, number, "USD")

    def tied(row: BestOfSize) -> str:
        return listed(row.ties, most=_MOST_TIES) if row.ties else NOTHING

    columns: list[Column[BestOfSize]] = [
        figures(study.devices_word, lambda row: fields.whole(row.point.gpus), anchor="method-sizes"),
        words("scaling", lambda row: row.curve.key.kind, anchor="method-scaling"),
        words("fastest", fastest),
        figures("efficiency", efficiency, anchor="method-efficiency"),
        figures(
            "throughput", lambda row: fields.figure(row.point.figures.throughput), anchor="method-throughput"
        ),
        figures("USD a million samples", usd, anchor="method-cost"),
        words("no difference shown to", tied, anchor="method-tie"),
        words("runs", lambda row: runs_text(row.point.figures), anchor="method-evidence"),
    ]
    if several:
        columns.insert(0, words("work", lambda row: row.work))
    return table(found, columns)


def _heat_map(curves: Sequence[Curve]) -> TextTable:
    """One row for each series and one column for each size, with efficiencies, or else throughputs a
    device."""
    claimed = _claimed(curves)

    def show(size: int, curve: Curve) -> Field:
        point = next((one for one in curve.points if one.gpus == size), None)
        if point is None:
            gap = next((one for one in curve.gaps if one.gpus == size and not one.skipped), None)
            return Field(outcome_words(gap.outcome or "")) if gap else NONE
        if not claimed:
            return fields.number(point.figures.throughput.value / size)
        metric = point.efficiency.metric
        return fields.shown(metric.value if metric else None, lambda share: f"{100 * share:.0f}", "ratio")

    sizes = sorted({point.gpus for curve in curves for point in curve.points})
    columns: list[Column[Curve]] = [words("strategy", lambda curve: curve.key.label)]
    columns += [figures(f"{size:,}", partial(show, size), hint=f"on {size:,}") for size in sizes]
    return table([curve for curve in curves if curve.points], columns)


def _claimed(curves: Sequence[Curve]) -> bool:
    return any(point.efficiency.metric is not None for curve in curves for point in curve.points)
