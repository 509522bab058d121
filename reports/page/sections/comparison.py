"""Several studies side by side: the first section of a report of several studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import log

from reports.analysis.effect import claim_rule
from reports.analysis.headline import FiguresRow, cells_table
from reports.analysis.scaling import Curve, CurvePoint
from reports.analysis.series import setting_labels, setting_of
from reports.analysis.side_by_side import CellInStudy, SharedPiece, SideBySide
from reports.fields import NONE, Field
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Point, Rule, interval_point
from reports.page.looks import colours_over_studies, study_dash
from reports.page.section import (
    Block,
    Bullets,
    Definition,
    Drawing,
    Drawings,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
)
from reports.page.sections.scaling import MOST
from reports.table import Column, TextTable, figures, words
from reports.text import NOTHING, count, devices, devices_word, metric, percent
from results.cell import label

ANCHOR = "comparison"
_ABOUT = (
    "Cells that do the same work in more than one study, one row a study. The others are compared with the "
    "first study that has the cell."
)
_AGAINST_FIRST = "method-against-first"
_LARGEST = 3
"""The number of changes with a tile each."""


def comparison_section(comparison: SideBySide) -> Section:
    """Make the section: the work that the studies share, and the work that differs."""
    blocks: list[Block] = [
        Tiles(tuple(changed_tiles(comparison))),
        Paragraph(_ABOUT, "plain"),
        Bullets(comparison.findings),
    ]
    drawings = tuple(
        drawing
        for those in comparison.pieces
        for kind, drawing in shared_charts(comparison, those).items()
        # On the page, the efficiencies are on the first screen of each study.
        if kind != "efficiency"
    )
    if drawings:
        blocks.append(Drawings(drawings))
    shared = comparison_table(comparison)
    if shared.rows:
        blocks.append(Table(shared, "The same work in several studies"))
    if comparison.unlike:
        blocks.append(Paragraph("Not compared, because the work differs:", "plain"))
        blocks.append(Bullets(comparison.unlike, "plain"))
    definition = Definition(
        _AGAINST_FIRST,
        "Against the first study",
        "Step time of the cell in the first study over its step time in this one: above 1 it is faster here. "
        "The interval is made from the runs of both, like the interval of an efficiency. "
        f"{claim_rule(comparison.smallest_effect)}. Only cells whose work is equal in every field are "
        "compared, and measured ones never with emulated ones. Conditions that differ are named, and so are "
        "runs that other processes disturbed: all of these may be the cause of the ratio.",
    )
    return Section(
        anchor=ANCHOR, title="Studies side by side", blocks=tuple(blocks), definitions=(definition,)
    )


def changed_tiles(comparison: SideBySide) -> Iterator[Tile]:
    """Say how many cells changed, and name the largest changes, the largest first."""
    judged = [
        (shared[0].cell, entry)
        for shared in comparison.cells
        for entry in shared[1:]
        if entry.change is not None
    ]
    changed = [pair for pair in judged if pair[1].change != "no difference shown"]
    if comparison.cells:
        yield Tile(
            title="What changed",
            figure=f"{len(changed):,} of {count(len(judged), 'cell')} changed",
            lines=() if judged else ("nothing could be judged: the table says why",),
            anchor=_AGAINST_FIRST,
            alarm=any(entry.change == "slower" for _, entry in changed),
        )
    changed.sort(key=lambda pair: abs(log(pair[1].ratio.value)) if pair[1].ratio else 0.0, reverse=True)
    for cell, entry in changed[:_LARGEST]:
        assert entry.ratio is not None
        yield Tile(
            title=f"{cell.workload}, {label(cell)} on {cell.gpus:,}",
            figure=f"{percent(abs(1 / entry.ratio.value - 1))} {entry.change}",
            lines=(
                f"in {entry.study}: {entry.ratio.value:.3g} times as fast ({metric(entry.ratio).note})",
                f"differs in: {_differs(entry)}",
            ),
            anchor=_AGAINST_FIRST,
            alarm=entry.change == "slower",
        )


def comparison_table(comparison: SideBySide) -> TextTable:
    """One row for each shared cell and study; the rows of a cell are together."""
    cells = [(shared[0].cell, entry) for shared in comparison.cells for entry in shared]
    settings = setting_labels(cell for cell, _ in cells)
    rows = [
        FiguresRow(figures=one.figures, efficiency=one.efficiency, setting=settings[setting_of(cell)], of=one)
        for cell, one in cells
    ]
    columns: list[str | Column[FiguresRow[CellInStudy]]] = [
        *("workload", "strategy", "setting", "size", "batch per replica / global"),
        words("study", lambda row: row.of.study),
        *("step time", "interval", "throughput", "efficiency"),
        figures("against the first", lambda row: _ratio(row.of), anchor=_AGAINST_FIRST),
        words("differs in", lambda row: _differs(row.of), anchor=_AGAINST_FIRST),
        "runs",
    ]
    return cells_table(rows, devices_word({cell.device for cell, _ in cells} or {"cuda"}), columns)


def _ratio(entry: CellInStudy) -> Field:
    if entry.ratio is None:
        return NONE if entry.absent is None else Field(f"none: {entry.absent}")
    text, told = metric(entry.ratio), entry.change or "not judged"
    ends = "" if text.ends is None else f"{text.ends}, "
    return Field(f"{text.value} ({ends}{_interval(entry)}), {told}", entry.ratio.value, entry.ratio.unit)


def _interval(entry: CellInStudy) -> str:
    """Describe the sample of the interval; if the sides differ in their number of runs, it names both."""
    there, here = (side.of for side in entry.disturbed)
    if there == here == 1:
        return "1 run each"
    assert entry.ratio is not None
    if there != here and entry.ratio.interval == "range":
        return f"range of {there:,} and {here:,} runs"
    return metric(entry.ratio).label


def _differs(entry: CellInStudy) -> str:
    texts = [f"{name}: {there} there, {here} here" for name, (there, here) in entry.differs.items()]
    there, here = entry.disturbed
    if entry.ratio is not None and (there.runs or here.runs):
        texts.append(f"{there} there, {here} here")
    return ", ".join(texts) or (NOTHING if entry.ratio is None else "nothing")


def shared_charts(comparison: SideBySide, those: SharedPiece) -> dict[str, Drawing]:
    """Draw the `throughput` and `efficiency` of a shared piece of work, and the `ratio` of matched cells."""
    number = comparison.pieces.index(those)
    curves = [(study, curve) for study, piece in those for curve in piece.curves]
    first = curves[0][1]
    word = devices_word({first.points[0].figures.cell.device})
    work = f"{first.key.workload}, {first.key.kind} scaling, batch {first.key.constant_batch:,}"
    charts = {
        "throughput": Chart(
            name=f"shared-{number}-throughput",
            title=f"{work}: throughput by {word}",
            y_title=first.points[0].figures.throughput.unit,
            x_title=word,
            lines=_lines(comparison, curves, _throughputs),
            y_axis="log",
        ),
        "efficiency": Chart(
            name=f"shared-{number}-efficiency",
            title=f"{work}: efficiency by {word}",
            y_title="efficiency, %",
            x_title=word,
            lines=_lines(comparison, curves, _efficiencies),
            rules=(Rule(text="100 % ideal", y=100),),
            y_most=MOST,
        ),
        "ratio": Chart(
            name=f"shared-{number}-ratio",
            title=f"{work}: times as fast as in {those[0][0]}, by {word}",
            y_title="times as fast",
            x_title=word,
            lines=_lines(comparison, curves, partial(_ratios, comparison)),
            rules=(Rule(text="as fast", y=1.0),),
            note="Hollow: not judged. The table below says why, and which conditions differ.",
        ),
    }
    return {kind: drawn(chart) for kind, chart in charts.items() if chart.lines}


def _lines(
    comparison: SideBySide,
    curves: Sequence[tuple[str, Curve]],
    points_of: Callable[[str, Curve], Iterable[Point]],
) -> tuple[Line, ...]:
    """One line for each curve of a study that has points."""
    colours = colours_over_studies(curve for _, curve in curves)
    found = [(study, curve.key.exchange, tuple(points_of(study, curve))) for study, curve in curves]
    return tuple(
        Line(
            name=f"{exchange}, {study}",
            colour=colours[exchange],
            dash=study_dash(comparison.studies, study),
            points=points,
        )
        for study, exchange, points in found
        if points
    )


def _throughputs(study: str, curve: Curve) -> Iterator[Point]:
    for point in curve.points:
        value, mean = point.figures.throughput, point.figures.step_ns.value
        yield interval_point(
            point.gpus,
            value,
            runs=tuple(value.value * mean / step for step in point.figures.run_step_ns),
            label=f"{_where(study, curve, point)}: {metric(value)}",
        )


def _efficiencies(study: str, curve: Curve) -> Iterator[Point]:
    for point in curve.points:
        value = point.efficiency.metric
        if value is not None:
            label = f"{_where(study, curve, point)}: {metric(value)}"
            yield interval_point(point.gpus, value, 100, label=label)


def _ratios(comparison: SideBySide, study: str, curve: Curve) -> Iterator[Point]:
    for point in curve.points:
        entry = comparison.ratio(study, point.cell.id)
        if entry is not None and entry.ratio is not None:
            told = f"{entry.ratio.value:.3g} times as fast ({metric(entry.ratio).note})"
            yield interval_point(
                point.gpus,
                entry.ratio,
                label=f"{_where(study, curve, point)}: {told}, {entry.change or 'not judged'}",
                hollow=entry.change is None,
            )


def _where(study: str, curve: Curve, point: CurvePoint) -> str:
    return f"{curve.key.label} on {devices(point.gpus, point.cell.device)}, {study}"
