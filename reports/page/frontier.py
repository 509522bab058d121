"""Time against cost: every priced cell of one piece of work, and the line of those that no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from reports.analysis.cost import CellCost, Frontier
from reports.page.groups import LineStyles
from reports.page.svg import INK, MUTED, Drawing, axes, inline
from results.label import exchange_label

_WIDTH, _HEIGHT, _LEGEND_ROW = 4.6, 2.7, 0.19
_ROOM = 1.25
"""Factor of empty space around the outermost points."""
_ON, _OFF = 7.0, 4.5
"""Sizes of marks on the frontier and off it, in points."""
_TIMES = ((3600e9, "hours"), (60e9, "minutes"), (1e9, "seconds"))


def frontier_drawing(frontier: Frontier, styles: LineStyles, *, name: str, devices_word: str) -> Drawing:
    """Time and cost of a million samples, both axes logarithmic; numbers beside marks are sizes.

    `name` is unique on the page.
    """
    scale, unit = _unit(frontier)
    title = f"{frontier.title}: cost against time of a million samples"
    entries = _legend(frontier, styles)
    rows = math.ceil(len(entries) / 2)
    with axes(width=_WIDTH, height=_HEIGHT + _LEGEND_ROW * rows) as drawn:
        _line(drawn, frontier, scale)
        for cost in frontier.costs:
            _mark(drawn, cost, styles, scale, on=cost in frontier.best)
        drawn.set_xscale("log")
        drawn.set_yscale("log")
        _limits(drawn, frontier, scale)
        drawn.set_xlabel(f"{unit} a million samples")
        drawn.set_title("USD a million samples")
        drawn.grid(axis="both")
        figure = drawn.get_figure(root=True)
        assert figure is not None
        figure.legend(handles=entries, loc="outside lower left", ncols=2, borderaxespad=0.1)
        svg = inline(drawn, name=name, title=title, description=_description(frontier, title, devices_word))
    return Drawing(
        title=title, svg=svg, note=f"Numbers beside marks are {devices_word}; intervals are in the table."
    )


def _unit(frontier: Frontier) -> tuple[float, str]:
    """Nanoseconds of the axis' unit, and its name: the one in which the fastest cell is at least 1."""
    fastest = frontier.fastest.million_samples_ns.value
    return next((unit for unit in _TIMES if fastest >= unit[0]), _TIMES[-1])


def _xy(cost: CellCost, scale: float) -> tuple[float, float]:
    assert cost.usd_per_million_samples is not None
    return cost.million_samples_ns.value / scale, cost.usd_per_million_samples.value


def _line(drawn: Axes, frontier: Frontier, scale: float) -> None:
    """A stair: left of and below it there is no cell."""
    points = [_xy(cost, scale) for cost in frontier.best]
    drawn.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=INK,
        linewidth=1,
        drawstyle="steps-post",
        zorder=1,
    )


def _mark(drawn: Axes, cost: CellCost, styles: LineStyles, scale: float, *, on: bool) -> None:
    style = styles[exchange_label(cost.cell)]
    point = _xy(cost, scale)
    drawn.plot(
        [point[0]],
        [point[1]],
        style.marker,
        color=style.colour,
        markersize=_ON if on else _OFF,
        zorder=3 if on else 2,
    )
    if on:
        # Below and left of the frontier there is no mark to cover.
        drawn.annotate(
            f"{cost.cell.gpus:,}",
            point,
            textcoords="offset points",
            xytext=(-4, -4),
            ha="right",
            va="top",
            fontsize=7.5,
        )


def _limits(drawn: Axes, frontier: Frontier, scale: float) -> None:
    points = [_xy(cost, scale) for cost in frontier.costs]
    times, dollars = [x for x, _ in points], [y for _, y in points]
    drawn.set_xlim(min(times) / _ROOM, max(times) * _ROOM)
    drawn.set_ylim(min(dollars) / _ROOM, max(dollars) * _ROOM)
    _ticks(drawn.xaxis, *drawn.get_xlim())
    _ticks(drawn.yaxis, *drawn.get_ylim())


def _ticks(axis: Axis, low: float, high: float) -> None:
    axis.set_major_locator(_locator(low, high))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _locator(low: float, high: float) -> Locator:
    """1, 2, 5 of each decade; round numbers at equal distances where the axis spans less than a decade."""
    if high < 10 * low:
        return FixedLocator([float(tick) for tick in MaxNLocator(4).tick_values(low, high) if tick > 0])
    return LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)


def _legend(frontier: Frontier, styles: LineStyles) -> Sequence[Line2D]:
    """Every way of exchange in its colour, also if none of its cells is on the frontier."""
    labels = dict.fromkeys(exchange_label(cost.cell) for cost in frontier.costs)
    entries = [
        Line2D([], [], color=styles[label].colour, marker=styles[label].marker, linestyle="", label=label)
        for label in labels
    ]
    entries.append(Line2D([], [], color=INK, linewidth=1, label="frontier"))
    if len(frontier.best) < len(frontier.costs):
        entries.append(
            Line2D([], [], color=MUTED, marker="o", markersize=_OFF, linestyle="", label="small: beaten")
        )
    return entries


def _description(frontier: Frontier, title: str, devices_word: str) -> str:
    on = ", ".join(f"{exchange_label(cost.cell)} on {cost.cell.gpus:,}" for cost in frontier.best)
    return (
        f"{title}, {len(frontier.costs)} cells. On the frontier, the fastest first: {on} ({devices_word}). "
        f"The numbers are in the table below."
    )
