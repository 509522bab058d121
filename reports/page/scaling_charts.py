"""Efficiency and throughput against size, a chart of each for a piece of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reports.analysis.headline import runs_text
from reports.analysis.scaling import Curve, CurvePoint
from reports.analysis.size_to_buy import Purchase
from reports.page.chart import Chart, Line, Point, Rule, drawn
from reports.page.drawing import Drawing
from reports.page.looks import Looks
from reports.text import devices, listed, metric
from results.cell import BASELINE_STRATEGY
from results.outcome import Evidence
from results.statistics import Metric

ROW = "cell-"
"""Before the id of a cell: the anchor of its row in the full table."""

FEW, FEW_WIDTH = 3, 415.0
"""Sizes up to which a chart is narrow, and how wide it is then."""

Figure = Callable[[CurvePoint], Metric | None]


def efficiency_chart(
    name: str,
    curves: Sequence[Curve],
    shown: Looks,
    devices_word: str,
    *,
    chosen: Purchase | None = None,
    first: bool = False,
) -> Drawing | None:
    """Zoomed to where the curves are; None where no point makes a claim but the baseline."""
    claims = [point.efficiency for curve in curves for point in curve.points]
    if not any(claim.metric is not None and not claim.is_baseline for claim in claims):
        return None
    lines = _lines(curves, shown, _efficiency, scale=100)
    baselines = dict.fromkeys(claim.baseline.short for claim in claims if claim.baseline is not None)
    against = next(iter(baselines)) if len(baselines) == 1 else "each series' own smallest size"
    rules = [Rule(text="100 % ideal", y=100)]
    if chosen is not None:
        rules.append(Rule(text=f"to buy: {chosen.size}", x=chosen.gpus))
    return drawn(
        Chart(
            name=name,
            title=f"Efficiency against {against}, by {devices_word}",
            y_title=f"efficiency, % of {against}",
            x_title=devices_word,
            lines=lines,
            rules=tuple(rules),
            missing=_missing(curves),
            note=_note(curves),
            width=820 if first else _width(curves),
            height=390 if first else 330 if _width(curves) > FEW_WIDTH else 240,
        )
    )


def throughput_chart(name: str, curves: Sequence[Curve], shown: Looks, devices_word: str) -> Drawing | None:
    """Both axes linear: a curve bends where growing brings less. None of one size."""
    points = [point for curve in curves for point in curve.points]
    if len({point.gpus for point in points}) < 2:
        return None
    top = max(point.figures.throughput.value for point in points)
    by, prefix = next((one for one in _SI if top >= one[0]), (1.0, ""))
    scale = 1 / by
    unit = points[0].figures.throughput.unit
    singles = [curve.single for curve in curves if curve.single is not None]
    slope = [
        Rule(text="ideal", slope=scale * single.figures.throughput.value / single.gpus)
        for single in singles[:1]
    ]
    return drawn(
        Chart(
            name=name,
            title=f"Throughput, {prefix}{unit}, by {devices_word}",
            y_title=f"throughput, {prefix}{unit}",
            x_title=devices_word,
            lines=_lines(curves, shown, lambda point: point.figures.throughput, scale=scale),
            rules=tuple(slope),
            x_axis="linear",
            y_from=0.0,
            width=_width(curves),
            height=330 if _width(curves) > FEW_WIDTH else 240,
        )
    )


_SI = ((1e9, "G "), (1e6, "M "), (1e3, "k "))


def _width(curves: Sequence[Curve]) -> float:
    sizes = {point.gpus for curve in curves for point in curve.points}
    return FEW_WIDTH if len(sizes) <= FEW else 630


def _efficiency(point: CurvePoint) -> Metric | None:
    return point.efficiency.metric


def _lines(curves: Sequence[Curve], shown: Looks, figure: Figure, *, scale: float) -> tuple[Line, ...]:
    """Not the single device where there are others: it is what they are measured against."""
    several = any(curve.key.strategy != BASELINE_STRATEGY and curve.points for curve in curves)
    found = []
    for curve in curves:
        if several and curve.key.strategy == BASELINE_STRATEGY:
            continue
        points = tuple(
            _point(curve, point, value, scale)
            for point in curve.points
            if (value := figure(point)) is not None
        )
        if points:
            look = shown[curve.key.exchange]
            found.append(
                Line(
                    name=curve.key.exchange,
                    colour=look.colour,
                    dash=look.dash,
                    points=points,
                    start=_start(curve, figure, scale),
                )
            )
    return tuple(found)


def _start(curve: Curve, figure: Figure, scale: float) -> tuple[float, float] | None:
    """The single device of which a line's efficiencies are; of throughputs it is the start as well."""
    single = curve.single
    first = min(point.gpus for point in curve.points)
    if single is None or single.gpus >= first or single.figures.evidence is Evidence.EMULATED:
        return None
    if figure is _efficiency:
        return single.gpus, scale
    return single.gpus, single.figures.throughput.value * scale


def _point(curve: Curve, point: CurvePoint, value: Metric, scale: float) -> Point:
    figures = point.figures
    mean = figures.step_ns.value
    own = [value.value * scale * mean / step for step in figures.run_step_ns]
    where = devices(point.gpus, figures.cell.device)
    return Point(
        x=point.gpus,
        y=value.value * scale,
        low=None if value.low is None else value.low * scale,
        high=None if value.high is None else value.high * scale,
        runs=tuple(own),
        label=f"{curve.key.label} on {where}: {metric(value)}; {runs_text(figures)}",
        href=f"{ROW}{figures.cell.id}",
        hollow=figures.evidence is Evidence.EMULATED,
    )


def _missing(curves: Sequence[Curve]) -> tuple[tuple[float, str], ...]:
    """Sizes that failed or did not run, each once."""
    found: dict[int, list[str]] = {}
    for curve in curves:
        for gap in curve.gaps:
            if not gap.skipped:
                found.setdefault(gap.gpus, []).append(f"{curve.key.label}: {gap.outcome}".replace("_", " "))
    return tuple(
        (size, f"no result on {size:,}: {'; '.join(those)}") for size, those in sorted(found.items())
    )


def _note(curves: Sequence[Curve]) -> str:
    """What is missing, in words."""
    gone = [
        f"{curve.key.label} on {gap.gpus:,} ({(gap.outcome or '').replace('_', ' ')})"
        for curve in curves
        for gap in curve.gaps
        if not gap.skipped
    ]
    return f"Crosses at the foot: {listed(gone, last=', ')}." if gone else ""
