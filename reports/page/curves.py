"""Throughput and efficiency against size: two drawings for each piece of work that was scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from reports.analysis.scaling import Curve, Point
from reports.page.groups import Group, Hand, Hands, shown_gaps
from reports.page.svg import MUTED, PAPER, Drawing, axes, inline
from reports.text import number
from results.outcome import Evidence
from results.statistics import Metric

_WIDTH, _HEIGHT, _LEGEND_ROW = 4.6, 2.7, 0.19
_LONG_LABEL = 26
_CLOSEST_TICKS = 1.25
"""Sizes nearer to each other than by this factor share a label."""


def throughput(group: Group, hands: Hands) -> Drawing:
    """Throughput of all devices together, both axes logarithmic, so that the ideal is a straight line."""
    title = f"Throughput, {group.unit}"
    entries = _legend(group, hands, f"ideal from {group.start.short}")
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, hands[curve.key.exchange], _throughputs(curve))
        _ideal(drawn, group)
        drawn.set_yscale("log")
        drawn.yaxis.set_major_locator(_throughput_ticks(*drawn.get_ylim()))
        _finish(drawn, group, entries)
        drawn.set_title(group.unit)
        return Drawing(
            title=title,
            svg=inline(drawn, name=f"{group.name}-throughput", title=title, description=group.description),
            note=group.missing,
        )


def _throughput_ticks(low: float, high: float) -> Locator:
    """1, 2, 5 of each decade; round numbers at equal distances where the axis spans less than a decade."""
    if high < 10 * low:
        return FixedLocator([float(tick) for tick in MaxNLocator(4).tick_values(low, high) if tick > 0])
    return LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)


def efficiency(group: Group, hands: Hands) -> Drawing:
    """Efficiency against the best single device, or against the own smallest size where there is none."""
    title = "Efficiency, percent of the baseline"
    entries = _legend(group, hands, "ideal: 100 %")
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, hands[curve.key.exchange], _claims(curve))
            _super_linear(drawn, curve)
        drawn.axhline(100, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        _finish(drawn, group, entries)
        drawn.set_ylim(0, max(110, 1.06 * drawn.get_ylim()[1]))
        drawn.set_title(f"% of {group.against}")
        return Drawing(
            title=title,
            svg=inline(drawn, name=f"{group.name}-efficiency", title=title, description=group.description),
            note=group.no_claims,
        )


Mark = tuple[Point, Metric]


def _throughputs(curve: Curve) -> list[Mark]:
    return [(point, point.figures.throughput) for point in curve.points]


def _claims(curve: Curve) -> list[Mark]:
    found = [(point, point.efficiency.metric) for point in curve.points]
    return [(point, _in_percent(metric)) for point, metric in found if metric is not None]


def _in_percent(metric: Metric) -> Metric:
    ends = [None if end is None else end * 100 for end in (metric.low, metric.high)]
    return Metric(
        value=metric.value * 100,
        unit="%",
        low=ends[0],
        high=ends[1],
        samples=metric.samples,
        interval=metric.interval,
    )


def _line(drawn: Axes, curve: Curve, hand: Hand, marks: Sequence[Mark]) -> None:
    """Measured sizes filled on a full line, emulated ones hollow on a dotted one."""
    measured = [mark for mark in marks if mark[0].figures.evidence is Evidence.MEASURED]
    emulated = [mark for mark in marks if mark[0].figures.evidence is Evidence.EMULATED]
    if emulated:
        bridge = [*measured[-1:], *emulated] if measured and _after(measured, emulated) else emulated
        drawn.plot(*_xy(bridge), color=hand.colour, linestyle=":", zorder=2)
    drawn.plot(*_xy(measured), color=hand.colour, zorder=2)
    for some, fill in ((measured, hand.colour), (emulated, PAPER)):
        _markers(drawn, some, hand, fill)
    for gap in shown_gaps(curve):
        drawn.plot(
            [gap],
            [0.035],
            "x",
            color=hand.colour,
            transform=drawn.get_xaxis_transform(),
            clip_on=False,
            zorder=4,
        )


def _markers(drawn: Axes, marks: Sequence[Mark], hand: Hand, fill: str) -> None:
    if not marks:
        return
    below = [metric.value - (metric.value if metric.low is None else metric.low) for _, metric in marks]
    above = [(metric.value if metric.high is None else metric.high) - metric.value for _, metric in marks]
    sizes, values = _xy(marks)
    drawn.errorbar(
        sizes,
        values,
        # Rounding can put an end on the wrong side of its value, and a negative length is refused.
        yerr=[[max(0.0, end) for end in below], [max(0.0, end) for end in above]],
        fmt=hand.marker,
        color=hand.colour,
        markerfacecolor=fill,
        capsize=2.5,
        elinewidth=1.1,
        zorder=3,
    )


def _super_linear(drawn: Axes, curve: Curve) -> None:
    for point, metric in _claims(curve):
        if point.efficiency.super_linear:
            drawn.annotate(
                "super-linear",
                (point.gpus, metric.value if metric.high is None else metric.high),
                textcoords="offset points",
                xytext=(0, 5),
                ha="center",
                fontsize=7.5,
            )


def _xy(marks: Sequence[Mark]) -> tuple[list[int], list[float]]:
    return [point.gpus for point, _ in marks], [metric.value for _, metric in marks]


def _after(measured: Sequence[Mark], emulated: Sequence[Mark]) -> bool:
    return measured[-1][0].gpus < emulated[0][0].gpus


def _ideal(drawn: Axes, group: Group) -> None:
    start = group.start
    ends = [start.gpus, max(group.sizes)]
    drawn.plot(
        ends,
        [start.figures.throughput.value * size / start.gpus for size in ends],
        color=MUTED,
        linewidth=1,
        linestyle=(0, (4, 3)),
        zorder=1,
    )


def _finish(drawn: Axes, group: Group, entries: Sequence[Line2D]) -> None:
    """Axis of sizes, grid and legend."""
    sizes = group.sizes
    drawn.set_xscale("log", base=2)
    drawn.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
    drawn.xaxis.set_major_locator(FixedLocator(sizes))
    drawn.xaxis.set_minor_locator(NullLocator())
    drawn.yaxis.set_minor_locator(NullLocator())
    labelled = _labelled(sizes)
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if size in labelled else ""))
    drawn.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, digits=1)))
    drawn.set_xlabel(group.devices_word)
    drawn.grid(axis="y")
    figure = drawn.get_figure(root=True)
    assert figure is not None
    figure.legend(
        handles=list(entries), loc="outside lower left", ncols=_legend_columns(entries), borderaxespad=0.1
    )


def _labelled(sizes: Sequence[int]) -> set[int]:
    """The sizes that have room for a label, the largest first."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or kept[-1] / size >= _CLOSEST_TICKS:
            kept.append(size)
    return set(kept)


def _legend(group: Group, hands: Hands, ideal: str) -> list[Line2D]:
    points = [point for curve in group.curves for point in curve.points]
    labels = dict.fromkeys(curve.key.exchange for curve in group.curves)
    entries = [
        Line2D([], [], color=hands[label].colour, marker=hands[label].marker, label=label) for label in labels
    ]
    entries.append(Line2D([], [], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=ideal))
    if any(point.figures.evidence is Evidence.EMULATED for point in points):
        entries.append(
            Line2D(
                [],
                [],
                color=MUTED,
                marker="o",
                markerfacecolor=PAPER,
                linestyle=":",
                label="hollow: emulated",
            )
        )
    if any(shown_gaps(curve) for curve in group.curves):
        entries.append(Line2D([], [], color=MUTED, marker="x", linestyle="", label="failed or skipped"))
    return entries


def _legend_columns(entries: Sequence[Line2D]) -> int:
    return 1 if any(len(str(entry.get_label())) > _LONG_LABEL for entry in entries) else 2


def _height(entries: Sequence[Line2D]) -> float:
    """So much that the axes of all drawings are equally high, whatever the legend needs."""
    return _HEIGHT + _LEGEND_ROW * math.ceil(len(entries) / _legend_columns(entries))
