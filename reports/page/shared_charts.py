"""Several studies on the same axes: throughputs of equal work, and how each matched cell compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reports.analysis.scaling import Curve, CurvePoint
from reports.analysis.side_by_side import SideBySide, StudyPiece
from reports.page.chart import Chart, Line, Point, Rule, drawn
from reports.page.drawing import Drawing
from reports.page.looks import colours_over_studies
from reports.text import devices, devices_word, metric

_DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""By the study: the first is drawn in full."""


def shared_charts(comparison: SideBySide) -> Iterator[Drawing]:
    """Of each piece of work that several studies have: the throughputs, and the ratios where cells match."""
    for number, those in enumerate(comparison.pieces):
        curves = [curve for one in those for curve in one.piece.curves]
        shown, word = colours_over_studies(curves), devices_word({curves[0].points[0].figures.cell.device})
        work = f"{curves[0].key.workload}, {curves[0].key.kind} scaling, batch {curves[0].key.batch:,}"
        yield drawn(
            Chart(
                name=f"shared-{number}-throughput",
                title=f"{work}: throughput by {word}",
                y_title=curves[0].points[0].figures.throughput.unit,
                x_title=word,
                lines=tuple(
                    _line(one.study, curve, shown, _dash(comparison, one), _throughputs(one.study, curve))
                    for one in those
                    for curve in one.piece.curves
                ),
                y_axis="log",
            )
        )
        ratios = tuple(
            _line(one.study, curve, shown, _dash(comparison, one), points)
            for one in those
            for curve in one.piece.curves
            if (points := _ratios(comparison, one.study, curve))
        )
        if ratios:
            yield drawn(
                Chart(
                    name=f"shared-{number}-ratio",
                    title=f"{work}: times as fast as in {those[0].study}, by {word}",
                    y_title="times as fast",
                    x_title=word,
                    lines=ratios,
                    rules=(Rule(text="as fast", y=1.0),),
                    note="Hollow: not judged. The table below says why, and which conditions differ.",
                )
            )


def _dash(comparison: SideBySide, one: StudyPiece) -> str:
    return _DASHES[comparison.studies.index(one.study) % len(_DASHES)]


def _line(study: str, curve: Curve, shown: Mapping[str, str], dash: str, points: Sequence[Point]) -> Line:
    exchange = curve.key.exchange
    return Line(name=f"{exchange}, {study}", colour=shown[exchange], dash=dash, points=tuple(points))


def _throughputs(study: str, curve: Curve) -> list[Point]:
    return [_throughput(study, curve, point) for point in curve.points]


def _throughput(study: str, curve: Curve, point: CurvePoint) -> Point:
    value, mean = point.figures.throughput, point.figures.step_ns.value
    return Point(
        x=point.gpus,
        y=value.value,
        low=value.low,
        high=value.high,
        runs=tuple(value.value * mean / step for step in point.figures.run_step_ns),
        label=f"{_where(study, curve, point)}: {metric(value)}",
        href="",
    )


def _ratios(comparison: SideBySide, study: str, curve: Curve) -> list[Point]:
    found = []
    for point in curve.points:
        entry = comparison.ratio(study, point.figures.cell.id)
        if entry is not None and entry.ratio is not None:
            ends = metric(entry.ratio).note
            found.append(
                Point(
                    x=point.gpus,
                    y=entry.ratio.value,
                    low=entry.ratio.low,
                    high=entry.ratio.high,
                    runs=(),
                    label=f"{_where(study, curve, point)}: {entry.ratio.value:.3g} times as fast ({ends}), "
                    f"{entry.change or 'not judged'}",
                    href="",
                    hollow=entry.change is None,
                )
            )
    return found


def _where(study: str, curve: Curve, point: CurvePoint) -> str:
    return f"{curve.key.label} on {devices(point.gpus, point.figures.cell.device)}, {study}"
