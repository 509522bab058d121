"""Charts of lines over sizes as SVG, which also work by keyboard, on paper and without scripts.

Each point is a link to its row of the full table and shows its value, interval and runs. Positions are
computed here; the attributes `data-x` and `data-y` have the values, so that the page's script can change an
axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from reports.page.section import Drawing, safe
from reports.text import tick
from results.statistics import Metric

Axis = Literal["log", "linear"]
_LEFT, _TOP, _BOTTOM = 46.0, 26.0, 40.0
_LETTER = 6.1
"""Width of a letter of a direct label, in the drawing's units."""
_LABEL_ROOM = (70.0, 175.0)
_BETWEEN_LABELS = 13.0
_MOST = 400
"""Largest number of points of a line without marks, as a screen cannot show more."""
_NARROW = 26.0
"""The distance below which neighbouring sizes share one label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cell."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    runs: tuple[float, ...] = ()
    """The value of each run; drawn as dots if there are several."""
    excluded: tuple[tuple[float, str], ...] = ()
    """The value of each run that reviewers excluded, with the reason; drawn as hollow dots."""
    label: str = ""
    """The label on focus: the value, its interval and its runs."""
    href: str = ""
    """The target of its link; empty for no link."""
    hollow: bool = False
    """Whether it is emulated, and so hollow."""
    mark: str = ""
    """The label of a ring around it; empty for no ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series: its points by x."""

    name: str
    colour: str
    """The name of a variable of the page's style."""
    dash: str = ""
    """The SVG dash pattern; empty for a solid line."""
    points: tuple[Point, ...]
    start: tuple[float, float] | None = None
    """The first vertex, which it shares with other lines and which has no mark."""
    plain: bool = False
    """Whether it has no marks: its many points do not represent cells."""
    pale: bool = False
    """Whether it is behind the others and without a name."""
    ahead: tuple[Point, ...] = ()
    """Projected points, which follow the others: hollow, on a dashed line in a band."""

    @property
    def every(self) -> tuple[Point, ...]:
        return (*self.points, *self.ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named line across the drawing: the ideal, or the chosen size."""

    text: str
    x: float | None = None
    """The position of a vertical line."""
    y: float | None = None
    """The position of a horizontal line."""
    slope: float | None = None
    """The slope of a line through the origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The content of one drawing."""

    name: str
    """Unique on the page."""
    title: str
    y_title: str
    x_title: str
    lines: tuple[Line, ...]
    rules: tuple[Rule, ...] = ()
    missing: tuple[tuple[float, str], ...] = ()
    """Sizes without a result, which get a cross at the foot of the drawing, with a description."""
    x_axis: Axis = "log"
    y_axis: Axis = "linear"
    y_from: float | None = None
    """Lowest end of the axis; None: the range of the values."""
    width: float = 630
    height: float = 330
    sizes: bool = True
    """Whether x is a size, so that each has a tick."""
    switchable: bool = True
    """Whether a script may change its axes: all of its lines have marks."""
    note: str = ""
    about: str = "A point is a cell and links to its row of the full table."
    """Its description for who does not see it."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """An axis, which maps a value to its position."""

    low: float
    high: float
    start: float
    end: float
    axis: Axis

    def at(self, value: float) -> float:
        low, high, own = self.low, self.high, value
        if self.axis == "log":
            low, high, own = math.log(low), math.log(high), math.log(value)
        share = 0.5 if high == low else (own - low) / (high - low)
        return self.start + share * (self.end - self.start)

    @property
    def data(self) -> str:
        return f"{self.low:.6g} {self.high:.6g} {self.start:.1f} {self.end:.1f} {self.axis}"


def interval_point(x: float, metric: Metric, scale: float = 1.0, **more: Any) -> Point:
    """The point of a figure with its interval, times `scale`."""
    low, high = (None if end is None else end * scale for end in (metric.low, metric.high))
    return Point(x=x, y=metric.value * scale, low=low, high=high, **more)


def thinned(values: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
    """The points of a line without marks: at most about `_MOST`, always with the last one."""
    kept = list(values)
    every = -(-len(kept) // _MOST)
    return tuple(Point(x=x, y=y) for x, y in (*kept[:-1:every], kept[-1]))


def drawn(chart: Chart) -> Drawing:
    """The chart as an `svg` element with a title and a description."""
    x, y = _scales(chart)
    parts = [*_ticks(chart, x, y), *_rules(chart, x, y)]
    for size, what in chart.missing:
        # A cross at the foot for each size at which something has no result.
        parts.append(
            f'<g class="gap" data-x="{size:.6g}" transform="translate({x.at(size):.1f} {y.start + 8:.1f})" '
            f'role="img" aria-label="{safe(what)}"><path d="M-3.5 -3.5L3.5 3.5M-3.5 3.5L3.5 -3.5"/></g>\n'
        )
    parts += _series(chart, x, y)
    axes = f'data-x-axis="{x.data}" data-y-axis="{y.data}"' if chart.switchable else ""
    head = (
        f'<svg class="chart" viewBox="0 0 {chart.width:.0f} {chart.height:.0f}" role="group" '
        f'aria-labelledby="{chart.name}-title" aria-describedby="{chart.name}-text" '
        f"{axes}>\n"
        f'<title id="{chart.name}-title">{safe(chart.title)}</title>\n'
        f'<desc id="{chart.name}-text">{safe(chart.about)}</desc>\n'
        f'<text class="axis" x="4" y="13">{safe(chart.y_title)}</text>\n'
        f'<text class="axis" x="{(x.start + x.end) / 2:.0f}" y="{chart.height - 6:.0f}" '
        f'text-anchor="middle">{safe(chart.x_title)}</text>\n'
    )
    return Drawing(
        title=chart.title, svg=Markup(f"{head}{''.join(parts)}</svg>"), width=chart.width, note=chart.note
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the ends, at most 6 and at least one."""
    most = 6
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * times for times in (1, 2, 5, 10, 20) if span / (power * times) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade within the ends, or only 1 if these are too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) <= 8:
            break
    return found if len(found) > 1 else nice_ticks(low, high)


def _scales(chart: Chart) -> tuple[_Scale, _Scale]:
    points = [point for line in chart.lines for point in line.every]
    starts = [line.start for line in chart.lines if line.start is not None]
    xs = sorted({point.x for point in points} | {x for x, _ in (*chart.missing, *starts)})
    ends = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    ends += [y for _, y in starts]
    ends += [rule.y for rule in chart.rules if rule.y is not None]
    low = min(ends) if chart.y_from is None else min(chart.y_from, *ends)
    high = max(ends)
    if chart.y_axis == "log":
        low, high = low / 1.15, high * 1.15
    else:
        room = 0.05 * ((high - low) or abs(high) or 1.0)
        low, high = (low - room if chart.y_from is None or low < chart.y_from else low), high + room
    letters = max((len(line.name) for line in chart.lines), default=0)
    right = min(_LABEL_ROOM[1], max(_LABEL_ROOM[0], letters * _LETTER + 16))
    x_low, x_high = xs[0], xs[-1]
    if chart.x_axis == "linear":
        x_low = min(0.0, x_low)
    across = _Scale(x_low, x_high, _LEFT + 8, chart.width - right, chart.x_axis)
    foot = chart.height - _BOTTOM - (12 if chart.missing else 0)
    return across, _Scale(low, high, foot, _TOP, chart.y_axis)


def _ticks(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    values = log_ticks(y.low, y.high) if y.axis == "log" else nice_ticks(y.low, y.high)
    for value in values:
        power, prefix = (1e9, " G") if value >= 1e9 else (1e6, " M")
        said = tick(value) if value < 1e6 else f"{value / power:g}{prefix}"
        yield (
            f'<g class="tick" data-y="{value:.6g}" transform="translate(0 {y.at(value):.1f})">'
            f'<path d="M{_LEFT:.0f} 0H{x.end:.0f}"/><text x="{_LEFT - 6:.0f}" y="3.5" text-anchor="end">'
            f"{said}</text></g>\n"
        )
    foot = chart.height - _BOTTOM
    last = math.inf
    for size in sorted(_x_ticks(chart, x), reverse=True):
        at = x.at(size)
        hidden = ' class="near"' if last - at < _NARROW else ""
        last = last if hidden else at
        yield (
            f'<g class="tick" data-x="{size:.6g}" transform="translate({at:.1f} 0)">'
            f'<path d="M0 {foot:.0f}v4"/><text y="{foot + 16:.0f}" text-anchor="middle"{hidden}>'
            f"{tick(size)}</text></g>\n"
        )


def _x_ticks(chart: Chart, x: _Scale) -> set[float]:
    if not chart.sizes:
        return set(log_ticks(x.low, x.high) if x.axis == "log" else nice_ticks(x.low, x.high))
    points = {point.x for line in chart.lines for point in line.every}
    starts = {line.start[0] for line in chart.lines if line.start is not None}
    return points | starts | {x for x, _ in chart.missing}


def _rules(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    for rule in chart.rules:
        if rule.x is not None:
            # Its name is on its right, or at the right end of the drawing on its left.
            place = 'x="-5" text-anchor="end"' if rule.x >= x.high else 'x="5"'
            yield (
                f'<g class="chosen" data-x="{rule.x:.6g}" transform="translate({x.at(rule.x):.1f} 0)">'
                f'<path d="M0 {_TOP:.0f}V{chart.height - _BOTTOM:.0f}"/>'
                f'<text {place} y="{y.end + 9:.1f}">{safe(rule.text)}</text></g>\n'
            )
        elif rule.y is not None:
            yield (
                f'<g class="ideal" data-y="{rule.y:.6g}" transform="translate(0 {y.at(rule.y):.1f})">'
                f'<path d="M{_LEFT:.0f} 0H{x.end:.0f}"/>'
                f'<text x="{x.end + 8:.0f}" y="3.5">{safe(rule.text)}</text></g>\n'
            )
        elif rule.slope is not None:
            # The ideal, as far as the drawing goes.
            last = min(x.high, y.high / rule.slope)
            first = max(x.low, y.low / rule.slope)
            if first < last:
                ends = " ".join(f"{x.at(at):.1f},{y.at(at * rule.slope):.1f}" for at in (first, last))
                yield f'<polyline class="ideal" data-slope="{rule.slope:.6g}" points="{ends}"/>\n'


def _series(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    named = [line for line in chart.lines if not line.pale]
    names = _label_places([(line.name, y.at(line.every[-1].y)) for line in named], chart)
    for line in chart.lines:
        if line.pale:
            points = " ".join(f"{x.at(point.x):.1f},{y.at(point.y):.1f}" for point in line.points)
            yield f'<polyline class="pale" style="--c: var(--{line.colour})" points="{points}"/>\n'
    for line in named:
        last = line.every[-1]
        way = [*([line.start] if line.start else []), *((point.x, point.y) for point in line.points)]
        points = " ".join(f"{x.at(right):.1f},{y.at(up):.1f}" for right, up in way)
        start = f' data-start="{line.start[0]:.6g} {line.start[1]:.6g}"' if line.start else ""
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        at, place = x.at(last.x), names[line.name]
        name = line.name if len(line.name) <= 26 else f"{line.name[:14]}...{line.name[-9:]}"
        # The leader joins a line to its label, which may be moved or beyond the line's end.
        leader = f'<path class="leader" d="M{at + 5:.1f} {y.at(last.y):.1f}L{x.end + 6:.1f} {place:.1f}"/>'
        yield (
            f'<g class="series" data-series="{safe(line.name)}"{start} style="--c: var(--{line.colour})">'
            f'{_ahead(line, x, y)}<polyline points="{points}"{dash}/>{leader}'
            f"{'' if line.plain else ''.join(_marks(line, x, y))}"
            f'<text class="name" x="{x.end + 8:.1f}" y="{place + 3.5:.1f}">{safe(name)}</text>'
            f"</g>\n"
        )


def _ahead(line: Line, x: _Scale, y: _Scale) -> str:
    """The band of projected points and the dashed line to them, from the last measured point."""
    if not line.ahead:
        return ""
    way = (line.points[-1], *line.ahead)
    ends = [(point.x, point.y if point.low is None else point.low) for point in way]
    ends += [(point.x, point.y if point.high is None else point.high) for point in reversed(way)]
    band = " ".join(f"{x.at(right):.1f},{y.at(up):.1f}" for right, up in ends)
    dashed = " ".join(f"{x.at(point.x):.1f},{y.at(point.y):.1f}" for point in way)
    return (
        f'<polygon class="band" points="{band}"/>'
        f'<polyline class="ahead" points="{dashed}" stroke-dasharray="5 4"/>'
    )


def _held(y: _Scale, value: float) -> float:
    """The position of a value, kept within the drawing."""
    return y.at(min(max(value, y.low), y.high))


def _marks(line: Line, x: _Scale, y: _Scale) -> Iterator[str]:
    """Draw the dots of the runs, and then the points with their intervals."""
    for point in line.points:
        for run in point.runs if len(point.runs) > 1 else ():
            yield (
                f'<circle class="run" data-x="{point.x:.6g}" data-y="{run:.4g}" r="1.6" '
                f'transform="translate({x.at(point.x):.1f} {_held(y, run):.1f})"/>'
            )
        for run, why in point.excluded:
            yield (
                f'<circle class="run excluded" data-x="{point.x:.6g}" data-y="{run:.4g}" r="2.6" '
                f'transform="translate({x.at(point.x):.1f} {_held(y, run):.1f})"><title>{safe(why)}</title>'
                f"</circle>"
            )
    for point in line.every:
        at = y.at(point.y)
        ends, bar = "", ""
        if point.low is not None and point.high is not None:
            ends = f' data-low="{point.low:.5g}" data-high="{point.high:.5g}"'
            span = f"M0 {_held(y, point.low) - at:.1f}V{_held(y, point.high) - at:.1f}"
            bar = "" if point in line.ahead else f'<path class="bar" d="{span}"/>'
        look = f"point{' hollow' if point.hollow else ''}"
        ring = (
            f'<circle class="ring" r="6.5"/><text x="-8" y="14" text-anchor="end">{point.mark}</text>'
            if point.mark
            else ""
        )
        leads = f'href="#{safe(point.href)}"' if point.href else 'tabindex="0" role="img"'
        yield (
            f'<a class="{look}" {leads} aria-label="{safe(point.label)}" data-x="{point.x:.6g}" '
            f'data-y="{point.y:.6g}"{ends} transform="translate({x.at(point.x):.1f} {at:.1f})">'
            f'{bar}<circle r="3.6"/>{ring}</a>'
        )


def _label_places(wanted: Sequence[tuple[str, float]], chart: Chart) -> dict[str, float]:
    """Place direct labels at the ends of their lines, and move apart those that would overlap."""
    ordered = sorted(wanted, key=lambda one: one[1])
    places: list[float] = []
    for _, place in ordered:
        places.append(max(place, places[-1] + _BETWEEN_LABELS) if places else max(place, _TOP - 8))
    over = (places[-1] if places else 0.0) - (chart.height - _BOTTOM + 6)
    for number in range(len(places) - 1, -1, -1):
        if over <= 0:
            break
        places[number] -= over
        over = 0.0 if number == 0 else places[number - 1] + _BETWEEN_LABELS - places[number]
    return {name: place for (name, _), place in zip(ordered, places, strict=True)}
