"""Throughput and efficiency against size: two drawings for each piece of work that was scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from reports.analysis.scaling import Baseline, Curve, Point
from reports.page.svg import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    Drawing,
    axes,
    inline,
)
from reports.text import number
from results.outcome import Evidence
from results.statistics import Metric

_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH, _HEIGHT, _LEGEND_ROW = 4.6, 2.7, 0.19
_LONG_LABEL = 26
_SKIPS_SHOWN_UP_TO = 2
"""Skipped sizes are marked up to so many times the largest size with a result; the note names all."""
_CLOSEST_TICKS = 1.25
"""Sizes nearer to each other than by this factor share a label."""
_SINGLE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """How one series is drawn."""

    colour: str
    marker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The curves of one drawing: the same work, scaled by the same rule, by different strategies."""

    name: str
    """Unique on the page."""
    title: str
    curves: tuple[Curve, ...]
    devices_word: str


Hands = dict[str, Hand]
"""By the label of the series, the same on the whole page."""


def hands(curves: Sequence[Curve]) -> Hands:
    """A colour and a marker for each label; one device alone is drawn in ink."""
    labels = [label for label in dict.fromkeys(curve.key.label for curve in curves) if label != _SINGLE]
    drawn = {
        label: Hand(colour=_COLOURS[place % len(_COLOURS)], marker=_MARKERS[place % len(_MARKERS)])
        for place, label in enumerate(labels)
    }
    return {_SINGLE: Hand(colour=INK, marker="o")} | drawn


def throughput(group: Group, hands: Hands) -> Drawing:
    """Throughput of all devices together, both axes logarithmic, so that the ideal is a straight line."""
    unit = _unit(group)
    title = f"Throughput, {unit}"
    entries = _legend(group, hands, _ideal_name(group))
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, hands[curve.key.label], _throughputs(curve))
        _ideal(drawn, group)
        drawn.set_yscale("log")
        drawn.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        _finish(drawn, group, entries)
        drawn.set_title(unit)
        return Drawing(
            title=title,
            svg=inline(drawn, name=f"{group.name}-throughput", title=title, description=_describe(group)),
            note=_missing(group),
        )


def efficiency(group: Group, hands: Hands) -> Drawing:
    """Efficiency against the best single device, or against the own smallest size where there is none."""
    title = "Efficiency, percent of the baseline"
    entries = _legend(group, hands, "ideal: 100 %")
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, hands[curve.key.label], _claims(curve))
            _super_linear(drawn, curve)
        drawn.axhline(100, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        _finish(drawn, group, entries)
        drawn.set_ylim(0, max(110, 1.06 * drawn.get_ylim()[1]))
        drawn.set_title(f"% of {_against(group)}")
        return Drawing(
            title=title,
            svg=inline(drawn, name=f"{group.name}-efficiency", title=title, description=_describe(group)),
            note=_no_claims(group),
        )


Mark = tuple[Point, Metric]


def _throughputs(curve: Curve) -> list[Mark]:
    return [(point, point.figures.units_per_s or point.figures.samples_per_s) for point in curve.points]


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
    for gap in _shown_gaps(curve):
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
        # The mean of few runs can lie outside the interval of the mean of their logarithms.
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
    start = _start(group)
    if start is None:
        return
    first = start.figures.units_per_s or start.figures.samples_per_s
    sizes = _sizes(group)
    ends = [start.gpus, max(sizes)]
    drawn.plot(
        ends,
        [first.value * size / start.gpus for size in ends],
        color=MUTED,
        linewidth=1,
        linestyle=(0, (4, 3)),
        zorder=1,
    )


def _start(group: Group) -> Baseline | None:
    """Where the ideal line starts: the best single device, or the smallest size there is."""
    singles = [curve.single for curve in group.curves if curve.single is not None]
    owns = [curve.own for curve in group.curves if curve.own is not None]
    return next(iter(singles or sorted(owns, key=lambda own: own.gpus)), None)


def _ideal_name(group: Group) -> str | None:
    start = _start(group)
    return None if start is None else f"ideal from {start.short}"


def _against(group: Group) -> str:
    singles = [curve.single for curve in group.curves if curve.single is not None]
    return singles[0].short if singles else "the own smallest size"


def _finish(drawn: Axes, group: Group, entries: Sequence[Line2D]) -> None:
    """Axis of sizes, grid and legend."""
    sizes = _sizes(group)
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


def _legend(group: Group, hands: Hands, ideal: str | None) -> list[Line2D]:
    points = [point for curve in group.curves for point in curve.points]
    labels = dict.fromkeys(curve.key.label for curve in group.curves)
    entries = [
        Line2D([], [], color=hands[label].colour, marker=hands[label].marker, label=label) for label in labels
    ]
    if ideal is not None:
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
    if any(_shown_gaps(curve) for curve in group.curves):
        entries.append(Line2D([], [], color=MUTED, marker="x", linestyle="", label="failed or skipped"))
    return entries


def _legend_columns(entries: Sequence[Line2D]) -> int:
    return 1 if any(len(str(entry.get_label())) > _LONG_LABEL for entry in entries) else 2


def _height(entries: Sequence[Line2D]) -> float:
    """So much that the axes of all drawings are equally high, whatever the legend needs."""
    return _HEIGHT + _LEGEND_ROW * math.ceil(len(entries) / _legend_columns(entries))


def _sizes(group: Group) -> list[int]:
    sizes = {point.gpus for curve in group.curves for point in curve.points}
    return sorted(sizes | {gap for curve in group.curves for gap in _shown_gaps(curve)})


def _shown_gaps(curve: Curve) -> list[int]:
    """Sizes to mark as missing: all that failed, and the skipped ones where the curve would go on.

    `single` ends at one device by its nature, and a strategy begins at its smallest size.
    """
    failed = [gap.gpus for gap in curve.gaps if not gap.skipped]
    reached = max([point.gpus for point in curve.points] + failed, default=0)
    if curve.key.strategy == _SINGLE:
        return failed
    begins = min([point.gpus for point in curve.points] + failed, default=0)
    skipped = [gap.gpus for gap in curve.gaps if gap.skipped]
    return failed + [gpus for gpus in skipped if begins < gpus <= _SKIPS_SHOWN_UP_TO * reached]


def _missing(group: Group) -> str:
    """Every missing size of every curve in words."""
    texts = []
    for curve in group.curves:
        gaps = [gap for gap in curve.gaps if not (gap.skipped and curve.key.strategy == _SINGLE)]
        if gaps:
            sizes = ", ".join(f"{gap.gpus:,}{' (skipped)' if gap.skipped else ''}" for gap in gaps)
            texts.append(f"{curve.key.label} at {sizes}")
    return f"No result: {'; '.join(texts)}." if texts else ""


def _no_claims(group: Group) -> str:
    texts = []
    for curve in group.curves:
        none = [f"{point.gpus:,}" for point in curve.points if point.efficiency.metric is None]
        if none:
            texts.append(f"{curve.key.label} at {', '.join(none)}")
    return f"No efficiency is claimed for {'; '.join(texts)}; the reasons are below." if texts else ""


def _unit(group: Group) -> str:
    units = {mark[1].unit for curve in group.curves for mark in _throughputs(curve)}
    return " or ".join(sorted(units)) or "samples/s"


def _describe(group: Group) -> str:
    """The drawing in a sentence for who cannot see it; the table has the numbers."""
    texts = [
        f"{curve.key.label} at {', '.join(str(point.gpus) for point in curve.points)} {group.devices_word}"
        for curve in group.curves
        if curve.points
    ]
    return f"{group.title}. {'; '.join(texts)}. The numbers are in the table below."
