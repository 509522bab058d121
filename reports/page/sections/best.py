"""The best of every size, and the figures of every strategy at every size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from reports import fields
from reports.analysis.effect import effect_text
from reports.analysis.headline import FiguresRow, cells_table
from reports.analysis.outcomes import outcome_words
from reports.analysis.scaling import Curve, is_measured, of_largest_batch, rate, ties
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.looks import works
from reports.page.section import Definition, Folded, Section, Table
from reports.table import Column, TextTable, figures, table, words
from reports.text import NOTHING, listed
from results.cell import label
from results.grouping import grouped

_MOST_TIES = 3
_FEWEST_ROWS = 2
"""A map needs more rows than this: the table already has one strategy and the single device."""


_Best = FiguresRow[tuple[str, Curve, list[str], bool]]
"""The fastest of one size in one piece of work: the work, its curve, others to which no difference is shown,
and whether it is the only one."""


def best_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure."""
    found = list(_best(study))
    if not found:
        return None
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
    folded = [Folded("Every strategy at every size", tuple(maps))] if maps else []
    return Section(
        anchor="best",
        title="Best of each size",
        blocks=(Table(_table(study, found), "The fastest of each size"), *folded),
        definitions=(tie,),
    )


def _best(study: StudyFigures) -> Iterator[_Best]:
    for title, curves in works(study):
        sizes = grouped((point.gpus, (curve, point)) for curve in curves for point in curve.points)
        for size in sorted(sizes):
            measured = [named for named in sizes[size] if is_measured(named[1])] or sizes[size]
            compared = of_largest_batch(measured)
            best = max(compared, key=rate)
            level = [
                other.key.label
                for other, one in compared
                if one is not best[1]
                and ties(best[1].figures, one.figures, study.assumptions.smallest_effect)
            ]
            claim, of = best[1].efficiency, (title, best[0], level, len(measured) == 1)
            efficiency = claim if claim.baseline else None
            yield FiguresRow(figures=best[1].figures, efficiency=efficiency, of=of)


def _table(study: StudyFigures, found: Sequence[_Best]) -> TextTable:
    several = len({row.of[0] for row in found}) > len({row.of[1].key.kind for row in found})
    work: Column[_Best] = words("work", lambda row: row.of[0])
    columns: list[str | Column[_Best]] = [
        *([work] if several else []),
        "size",
        words("scaling", lambda row: row.of[1].key.kind, anchor="method-scaling"),
        words("fastest", lambda row: f"{label(row.cell)}{' (the only one)' if row.of[3] else ''}"),
        *("efficiency", "throughput"),
        words(
            "no difference shown to",
            lambda row: listed(row.of[2], most=_MOST_TIES) if row.of[2] else NOTHING,
            anchor="method-tie",
        ),
        "runs",
    ]
    return cells_table(found, study.devices_word, columns)


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
