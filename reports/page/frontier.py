"""Time against cost: the priced cells of one piece of work, those that no other beats with a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reports.analysis.cost import CellCost
from reports.analysis.scaling import Curve
from reports.page.chart import Chart, Line, Point, drawn
from reports.page.drawing import Drawing
from reports.page.looks import Looks
from reports.page.scaling_charts import ROW
from reports.text import devices, duration, metric

_TIMES = ((3600e9, "hours"), (60e9, "minutes"), (1e9, "seconds"), (1e6, "ms"))


def frontier_chart(
    name: str,
    work: str,
    curves: Sequence[Curve],
    costs: Mapping[str, CellCost],
    best: frozenset[str],
    shown: Looks,
) -> Drawing:
    """Both axes logarithmic, a line a series from its largest size to its smallest."""
    points = [
        sorted(
            (costs[point.figures.cell.id] for point in curve.points if point.figures.cell.id in costs),
            key=lambda cost: cost.million_samples_ns.value,
        )
        for curve in curves
    ]
    fastest = min(cost.million_samples_ns.value for those in points for cost in those)
    scale, unit = next((one for one in _TIMES if fastest >= one[0]), _TIMES[-1])
    lines = []
    for curve, those in zip(curves, points, strict=True):
        if those:
            look = shown[curve.key.exchange]
            marks = tuple(_point(curve, cost, scale, on=cost.cell.id in best) for cost in those)
            lines.append(Line(name=curve.key.exchange, colour=look.colour, dash=look.dash, points=marks))
    return drawn(
        Chart(
            name=name,
            title=f"{work}: cost against time of a million samples",
            y_title="USD a million samples",
            x_title=f"{unit} a million samples",
            lines=tuple(lines),
            x_axis="log",
            y_axis="log",
            sizes=False,
            switchable=False,
            note="Ringed: no other cell is both faster and cheaper. Lines go from large sizes to small ones.",
        )
    )


def _point(curve: Curve, cost: CellCost, scale: float, *, on: bool) -> Point:
    usd = cost.usd_per_million_samples
    assert usd is not None
    where = devices(cost.cell.gpus, cost.cell.device)
    took = duration(cost.million_samples_ns.value)
    return Point(
        x=cost.million_samples_ns.value / scale,
        y=usd.value,
        low=usd.low,
        high=usd.high,
        runs=(),
        label=f"{curve.key.label} on {where}: {metric(usd)}, {took} a million samples",
        href=f"{ROW}{cost.cell.id}",
        mark=f"{cost.cell.gpus:,}" if on else "",
    )
