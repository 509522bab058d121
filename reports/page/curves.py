"""Throughput, speed-up and efficiency against size: three drawings for each piece of work that was scaled.

What kind of number a mark is shows in its look, never in its colour: measured filled on a full line, emulated
hollow on a dotted one, projected a line of dashes without marks of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from reports.analysis.scaling import Curve, CurvePoint, Gap, scaled, speed_up
from reports.page.groups import CurveGroup, LineStyle, LineStyles, shown_gaps
from reports.page.svg import MUTED, PAPER, RULE, Drawing, axes, inline
from reports.text import tick
from results.statistics import Metric

_WIDTH, _HEIGHT, _LEGEND_ROW = 4.2, 2.6, 0.19
_LONG_LABEL = 26
_CLOSEST_TICKS = 1.25
"""Sizes nearer to each other than by this factor share a label."""
_MOST_TICKS = 7
_GAP_ROW, _GAPS_AT_MOST = 0.06, 0.36
"""Shares of the drawing's height: of a row of marks for what is missing, and of all rows together."""
_IDEAL = (0, (6, 2, 1, 2))
"""Dashes and dots in turn: dots alone are emulated, dashes alone projected."""


@dataclass(frozen=True, slots=True)
class _Look:
    """How one kind of evidence is drawn."""

    line: tuple[float, tuple[float, ...]]
    """An offset and the lengths of dashes and gaps, in widths of the line; none for a full line."""
    filled: bool
    words: str
    """For the legend."""


_LOOKS = {
    "measured": _Look((0, ()), True, "filled: measured"),
    "emulated": _Look((0, (1, 1.6)), False, "hollow, dotted: emulated"),
    "projected": _Look((0, (5, 3)), False, "dashed: projected"),
}


def throughput_drawing(group: CurveGroup, styles: LineStyles) -> Drawing:
    """Throughput of all devices together, both axes logarithmic, so that the ideal is a straight line."""
    title = f"Throughput, {group.unit}"
    entries = _legend(group, styles, f"ideal from {group.start.short}")
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, styles[curve.key.exchange], _throughputs(curve))
        _ideal(drawn, group)
        drawn.set_yscale("log")
        drawn.yaxis.set_major_locator(_throughput_ticks(*drawn.get_ylim()))
        _finish(drawn, group, entries)
        _gaps(drawn, group, styles)
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


def speed_up_ticks(low: float, high: float, ideal: float) -> list[float]:
    """1, the end of the ideal line, and powers of two between `low` and `high`: each, or every so many."""
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = math.ceil(len(exponents) / _MOST_TICKS)
    powers = [2.0**exponent for exponent in exponents if exponent % stride == 0]
    apart = [power for power in powers if max(power / ideal, ideal / power) > _CLOSEST_TICKS]
    return sorted({*apart, 1.0, ideal})


def speed_up_drawing(group: CurveGroup, styles: LineStyles) -> Drawing:
    """Times the baseline's throughput, both axes logarithmic; the ideal starts at each baseline's size."""
    title = "Speed-up over the baseline"
    entries = _legend(group, styles, "ideal: linear")
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, styles[curve.key.exchange], _speed_ups(curve))
        for start in group.starts:
            ends = [start, max(group.sizes)]
            drawn.plot(
                ends, [end / start for end in ends], color=MUTED, linewidth=1, linestyle=_IDEAL, zorder=1
            )
        drawn.set_yscale("log", base=2)
        drawn.set_ylim(min(0.9, drawn.get_ylim()[0]), max(1.1, drawn.get_ylim()[1]))
        ideal = max(group.sizes) / min(group.starts)
        drawn.yaxis.set_major_locator(FixedLocator(speed_up_ticks(*drawn.get_ylim(), ideal)))
        _finish(drawn, group, entries)
        _gaps(drawn, group, styles)
        drawn.set_title(f"times {group.against}")
        return Drawing(
            title=title,
            svg=inline(drawn, name=f"{group.name}-speed-up", title=title, description=group.description),
        )


def efficiency_drawing(group: CurveGroup, styles: LineStyles) -> Drawing:
    """Efficiency against the best single device, or against the own smallest size where there is none."""
    title = "Efficiency, percent of the baseline"
    entries = _legend(group, styles, "ideal: 100 %")
    with axes(width=_WIDTH, height=_height(entries)) as drawn:
        for curve in group.curves:
            _line(drawn, curve, styles[curve.key.exchange], _claims(curve))
            _super_linear(drawn, curve)
        drawn.axhline(100, color=MUTED, linewidth=1, linestyle=_IDEAL, zorder=1)
        _finish(drawn, group, entries)
        drawn.set_ylim(0, max(110, 1.06 * drawn.get_ylim()[1]))
        _gaps(drawn, group, styles)
        drawn.set_title(f"% of {group.against}")
        return Drawing(
            title=title,
            svg=inline(drawn, name=f"{group.name}-efficiency", title=title, description=group.description),
            note=group.no_claims,
        )


CurveMark = tuple[CurvePoint, Metric]


def _throughputs(curve: Curve) -> list[CurveMark]:
    return [(point, point.figures.throughput) for point in curve.points]


def _claims(curve: Curve) -> list[CurveMark]:
    found = [(point, point.efficiency.metric) for point in curve.points]
    return [(point, scaled(metric, 100)) for point, metric in found if metric is not None]


def _speed_ups(curve: Curve) -> list[CurveMark]:
    found = [(point, speed_up(point)) for point in curve.points]
    return [(point, metric) for point, metric in found if metric is not None]


def _line(drawn: Axes, curve: Curve, style: LineStyle, marks: Sequence[CurveMark]) -> None:
    """The marks of a series, a part for each kind of evidence, joined to the part before it."""
    before: list[CurveMark] = []
    for evidence, part in groupby(marks, key=_evidence):
        there, look = list(part), _LOOKS[evidence]
        drawn.plot(*_xy([*before, *there]), color=style.colour, linestyle=look.line, zorder=2)
        _markers(drawn, there, style, style.colour if look.filled else PAPER)
        before = there[-1:]


def _gaps(drawn: Axes, group: CurveGroup, styles: LineStyles) -> None:
    """What is missing, in a strip of its own under the values; several of one size above each other."""
    places = list(_gap_places(group))
    if not places:
        return
    rows = 1 + max(row for _, _, row in places)
    height = min(_GAP_ROW * rows, _GAPS_AT_MOST)
    _room_below(drawn, height + _GAP_ROW)
    for curve, gap, row in places:
        drawn.plot(
            [gap.gpus],
            [height * (row + 0.5) / rows],
            "|" if gap.skipped else "x",
            color=styles[curve.key.exchange].colour,
            transform=drawn.get_xaxis_transform(),
            zorder=4,
        )
    # Not axhspan: its heights are values of the axis.
    strip = Rectangle(
        (0, 0), 1, height, transform=drawn.transAxes, color=RULE, alpha=0.5, linewidth=0, zorder=0
    )
    drawn.add_patch(strip)


def _gap_places(group: CurveGroup) -> Iterator[tuple[Curve, Gap, int]]:
    """What is marked as missing, and in which row from below."""
    rows: dict[int, int] = {}
    for curve in group.curves:
        shown = shown_gaps(curve)
        for gap in curve.gaps:
            if gap.gpus in shown:
                row = rows.get(gap.gpus, 0)
                rows[gap.gpus] = row + 1
                yield curve, gap, row


def _room_below(drawn: Axes, share: float) -> None:
    """The lowest `share` of the drawing without values, ticks or an axis."""
    low, high = drawn.get_ylim()
    ticks = [float(value) for value in drawn.yaxis.get_majorticklocs() if low <= value <= high]
    drawn.yaxis.set_major_locator(FixedLocator(ticks))
    more = share / (1 - share)
    logarithmic = drawn.get_yscale() == "log"
    drawn.set_ylim(low * (low / high) ** more if logarithmic else low - (high - low) * more, high)
    drawn.spines["left"].set_bounds(low, high)


def _markers(drawn: Axes, marks: Sequence[CurveMark], style: LineStyle, fill: str) -> None:
    below = [metric.value - (metric.value if metric.low is None else metric.low) for _, metric in marks]
    above = [(metric.value if metric.high is None else metric.high) - metric.value for _, metric in marks]
    sizes, values = _xy(marks)
    drawn.errorbar(
        sizes,
        values,
        # Rounding can put an end on the wrong side of its value, and a negative length is refused.
        yerr=[[max(0.0, end) for end in below], [max(0.0, end) for end in above]],
        fmt=style.marker,
        color=style.colour,
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


def _xy(marks: Sequence[CurveMark]) -> tuple[list[int], list[float]]:
    return [point.gpus for point, _ in marks], [metric.value for _, metric in marks]


def _evidence(mark: CurveMark) -> str:
    return str(mark[0].figures.evidence)


def _ideal(drawn: Axes, group: CurveGroup) -> None:
    start = group.start
    ends = [start.gpus, max(group.sizes)]
    drawn.plot(
        ends,
        [start.figures.throughput.value * size / start.gpus for size in ends],
        color=MUTED,
        linewidth=1,
        linestyle=_IDEAL,
        zorder=1,
    )


def _finish(drawn: Axes, group: CurveGroup, entries: Sequence[Line2D]) -> None:
    """Axis of sizes, grid and legend."""
    sizes = group.sizes
    drawn.set_xscale("log", base=2)
    drawn.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
    drawn.xaxis.set_major_locator(FixedLocator(sizes))
    drawn.xaxis.set_minor_locator(NullLocator())
    drawn.yaxis.set_minor_locator(NullLocator())
    labelled = _labelled(sizes)
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if size in labelled else ""))
    drawn.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
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


def _legend(group: CurveGroup, styles: LineStyles, ideal: str) -> list[Line2D]:
    labels = dict.fromkeys(curve.key.exchange for curve in group.curves)
    entries = [
        Line2D([], [], color=styles[label].colour, marker=styles[label].marker, label=label)
        for label in labels
    ]
    entries.append(Line2D([], [], color=MUTED, linewidth=1, linestyle=_IDEAL, label=ideal))
    return [*entries, *_evidence_entries(group), *_gap_entries(group)]


def _evidence_entries(group: CurveGroup) -> Iterator[Line2D]:
    """What the looks mean, where there is more than the plain one."""
    kinds = {str(point.figures.evidence) for curve in group.curves for point in curve.points}
    for kind, look in _LOOKS.items():
        if kind in kinds and kinds != {"measured"}:
            fill = MUTED if look.filled else PAPER
            yield Line2D(
                [], [], color=MUTED, marker="o", markerfacecolor=fill, linestyle=look.line, label=look.words
            )


def _gap_entries(group: CurveGroup) -> Iterator[Line2D]:
    gaps = [(gap, gap.gpus in shown_gaps(curve)) for curve in group.curves for gap in curve.gaps]
    for marker, skipped, words in (("x", False, "failed or not run"), ("|", True, "skipped")):
        if any(shown and gap.skipped is skipped for gap, shown in gaps):
            yield Line2D([], [], color=MUTED, marker=marker, linestyle="", label=words)


def _legend_columns(entries: Sequence[Line2D]) -> int:
    return 1 if any(len(str(entry.get_label())) > _LONG_LABEL for entry in entries) else 2


def _height(entries: Sequence[Line2D]) -> float:
    """So much that the axes of all drawings are equally high, whatever the legend needs."""
    return _HEIGHT + _LEGEND_ROW * math.ceil(len(entries) / _legend_columns(entries))
