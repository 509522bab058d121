"""Communication against scale: a small drawing a quantity for each piece of work of several sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from reports.analysis.communication import CellCommunication
from reports.analysis.scaling import Curve
from reports.page.groups import LineStyle, LineStyles
from reports.page.svg import MUTED, PAPER, Drawing, axes, inline
from reports.page.works import WorkCurves
from reports.text import number, tick
from results.outcome import Evidence

_WIDTH, _HEIGHT, _LEGEND_ROW = 4.6, 2.1, 0.19
_LONG_LABEL = 26
_LABELLED_SIZES = 10

ByCell = Mapping[str, CellCommunication]
"""By the id of the cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    name: str
    title: str
    unit: str
    value: Callable[[CellCommunication], float | None]


def _in_ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


_QUANTITIES = (
    _Quantity(
        name="total", title="Communication in flight", unit="ms", value=lambda one: _in_ms(one.total_ns)
    ),
    _Quantity(
        name="transfer",
        title="Exposed transfer",
        unit="ms",
        value=lambda one: _in_ms(one.transfer_ns.value if one.transfer_ns else None),
    ),
    _Quantity(
        name="wait",
        title="Exposed wait",
        unit="ms",
        value=lambda one: _in_ms(one.wait_ns.value if one.wait_ns else None),
    ),
    _Quantity(
        name="ratio",
        title="Exposed transfer over compute",
        unit="%",
        value=lambda one: None if one.over_compute is None else 100 * one.over_compute,
    ),
)

Marks = list[tuple[CellCommunication, float]]
Lines = list[tuple[Curve, Marks]]


def communication_curves(
    works: Sequence[WorkCurves], cells: ByCell, styles: LineStyles, devices: str
) -> list[Drawing]:
    """Of each piece of work the quantities that were measured at two sizes or more."""
    drawings = []
    for place, (title, curves) in enumerate(works):
        for quantity in _QUANTITIES:
            lines = _lines(curves, cells, quantity)
            if len({one.cell.gpus for _, marks in lines for one, _ in marks}) > 1:
                name = f"communication-{place}-{quantity.name}"
                drawings.append(_drawing(lines, quantity, styles, name=name, work=title, devices=devices))
    return drawings


def _lines(curves: Sequence[Curve], cells: ByCell, quantity: _Quantity) -> Lines:
    lines = []
    for curve in curves:
        there = [cells[one] for point in curve.points if (one := point.figures.cell.id) in cells]
        marks = [(one, value) for one in there if (value := quantity.value(one)) is not None]
        if marks:
            lines.append((curve, marks))
    return lines


def _drawing(
    lines: Lines, quantity: _Quantity, styles: LineStyles, *, name: str, work: str, devices: str
) -> Drawing:
    title = f"{work}: {quantity.title.lower()} of a step, {quantity.unit}"
    emulated = any(one.figures.evidence is Evidence.EMULATED for _, marks in lines for one, _ in marks)
    entries = _legend(lines, styles, emulated=emulated)
    columns = 1 if any(len(str(entry.get_label())) > _LONG_LABEL for entry in entries) else 2
    height = _HEIGHT + _LEGEND_ROW * math.ceil(len(entries) / columns)
    with axes(width=_WIDTH, height=height) as drawn:
        for curve, marks in lines:
            _line(drawn, styles[curve.key.exchange], marks)
        _finish(drawn, lines, devices)
        drawn.set_title(f"{quantity.title}, {quantity.unit}")
        figure = drawn.get_figure(root=True)
        assert figure is not None
        figure.legend(handles=entries, loc="outside lower left", ncols=columns, borderaxespad=0.1)
        svg = inline(drawn, name=name, title=title, description=_description(lines, title, devices))
    return Drawing(title=title, svg=svg)


def _line(drawn: Axes, style: LineStyle, marks: Marks) -> None:
    """Measured sizes are filled, emulated ones hollow."""
    xs, ys = [one.cell.gpus for one, _ in marks], [value for _, value in marks]
    drawn.plot(xs, ys, color=style.colour, zorder=2)
    for (one, value), size in zip(marks, xs, strict=True):
        fill = style.colour if one.figures.evidence is Evidence.MEASURED else PAPER
        drawn.plot([size], [value], style.marker, color=style.colour, markerfacecolor=fill, zorder=3)


def _finish(drawn: Axes, lines: Lines, devices: str) -> None:
    sizes = sorted({one.cell.gpus for _, marks in lines for one, _ in marks})
    values = [value for _, marks in lines for _, value in marks]
    drawn.set_xscale("log", base=2)
    drawn.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    drawn.set_ylim(min(0.0, 1.08 * min(values)), 1.08 * max(*values, 1e-3))
    drawn.xaxis.set_major_locator(FixedLocator(sizes[:: math.ceil(len(sizes) / _LABELLED_SIZES)]))
    drawn.xaxis.set_minor_locator(NullLocator())
    drawn.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    drawn.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    drawn.set_xlabel(devices)
    drawn.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
    drawn.grid(axis="y")


def _legend(lines: Lines, styles: LineStyles, *, emulated: bool) -> list[Line2D]:
    labels = dict.fromkeys(curve.key.exchange for curve, _ in lines)
    entries = [
        Line2D([], [], color=styles[label].colour, marker=styles[label].marker, label=label)
        for label in labels
    ]
    if emulated:
        hollow = Line2D(
            [], [], color=MUTED, marker="o", markerfacecolor=PAPER, linestyle="", label="hollow: emulated"
        )
        entries.append(hollow)
    return entries


def _description(lines: Lines, title: str, devices: str) -> str:
    texts = [
        f"{curve.key.exchange}: {', '.join(f'{number(value)} at {one.cell.gpus:,}' for one, value in marks)}"
        for curve, marks in lines
    ]
    return f"{title}, by {devices}. {'; '.join(texts)}."
