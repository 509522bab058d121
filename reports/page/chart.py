"""Charts of lines over sizes as SVG, which also work by keyboard, on paper and without scripts.

Each point is a link to its row of the full table and shows its value, interval and runs. Positions are
computed here; the attributes `data-x` and `data-y` have the values, so that the page's script can change an
axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from markupsafe import Markup

from reports.page.description import Axis, Chart, Line, Point, Rule, values_table
from reports.page.section import Drawing, safe
from reports.text import tick

_LEFT, _TOP, _BOTTOM = 46.0, 36.0, 40.0
_SMALL = (170.0, 52.0)
"""Width and height of a small drawing."""
_LETTER = 6.1
"""Width of a letter of a direct label, in the drawing's units."""
_LABEL_ROOM = (70.0, 0.4)
"""The least room for direct labels, and the largest as a share of the drawing's width."""
_NAME_LENGTHS = (26, 36)
_BETWEEN_LABELS = 13.0
_NARROW = 26.0
"""The distance below which neighbouring sizes share one label."""


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


def drawn(chart: Chart) -> Drawing:
    """The chart as an `svg` element with a title and a description."""
    x, y = _scales(chart)
    parts = [*_ticks(chart, x, y), *_rules(chart, x, y)]
    for size, what in chart.missing:
        # A cross at the foot for each size at which something has no result.
        parts.append(
            f'<g class="gap" data-x="{size:.6g}" transform="translate({x.at(size):.1f} {y.start + 8:.1f})" '
            f'role="img" aria-label="{safe(what)}"><title>{safe(what)}</title>'
            f'<path d="M-3.5 -3.5L3.5 3.5M-3.5 3.5L3.5 -3.5"/></g>\n'
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
        name=chart.name,
        title=chart.title,
        svg=Markup(f"{head}{''.join(parts)}</svg>"),
        width=chart.width,
        note=chart.note,
        chart=chart,
        values=values_table(chart),
    )


def small(chart: Chart) -> Markup:
    """Draw the chart's lines and rules without words, for a row of a table."""
    width, height = _SMALL
    x, y = _scales(chart)
    x, y = replace(x, start=5, end=width - 5), replace(y, start=height - 5, end=5)
    parts = []
    for rule in chart.rules:
        at = f"M{x.at(rule.x):.1f} 0V{height:.0f}" if rule.x is not None else ""
        at = f"M0 {_held(y, rule.y):.1f}H{width:.0f}" if rule.y is not None else at
        parts.append(f'<g class="{"ideal" if rule.x is None else "chosen"}"><path d="{at}"/></g>')
    for line in chart.lines:
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(
            f'<g class="series" data-series="{safe(line.name)}" style="--c: var(--{line.colour})">'
            f'<polyline points="{_way(line, x, y)}"{dash}/></g>'
        )
    cross = "m-2.5 -2.5l5 5m-5 0l5 -5"
    gaps = "".join(f"M{x.at(size):.1f} {height - 4:.0f}{cross}" for size, _ in chart.missing)
    missing = f'<g class="gap"><path d="{gaps}"/></g>' if gaps else ""
    return Markup(
        f'<svg class="chart small" viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true">'
        f"{''.join(parts)}{missing}</svg>"
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Cut long names in the middle; no two names become equal."""
    for most in _NAME_LENGTHS:
        head, tail = most // 2, most // 2 - 3
        cut = {name: name if len(name) <= most else f"{name[:head]}...{name[-tail:]}" for name in names}
        if len(set(cut.values())) == len(cut):
            return cut
    return {name: name for name in names}


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
    sizes = _sizes(chart)
    across = _Scale(
        min(0.0, *sizes) if chart.x_axis == "linear" else min(sizes),
        max(sizes),
        _LEFT + 8,
        chart.width - _label_room(chart),
        chart.x_axis,
    )
    foot = chart.height - _BOTTOM - (12 if chart.missing else 0)
    return across, _Scale(*_y_ends(chart), foot, _TOP, chart.y_axis)


def _sizes(chart: Chart) -> set[float]:
    """Every x of the drawing."""
    starts = {line.start[0] for line in chart.lines if line.start}
    return starts | {point.x for point in chart.points} | {x for x, _ in chart.missing}


def _y_ends(chart: Chart) -> tuple[float, float]:
    """Return the lowest and the highest value of the axis, with room around the values."""
    values = [point.y for point in chart.points] + [line.start[1] for line in chart.lines if line.start]
    values += [rule.y for rule in chart.rules if rule.y is not None]
    least, most = min(values), max(values)
    low, high = least, _held_by_most(chart, least, most)
    # Wide intervals extend an axis by half of the values' range at most, so that they do not squash lines.
    reach = 0.5 * _span(low, high)
    intervals = [end for point in chart.points for end in (point.low, point.high) if end is not None]
    low, high = min((low, *intervals)), max((high, *intervals))
    if chart.y_axis == "log":
        return max(low, least / 2) / 1.15, min(high, 2 * most) * 1.15
    low, high = max(low, least - reach), _held_by_most(chart, least, min(high, most + reach))
    if chart.y_from is not None and chart.y_from <= low:
        return chart.y_from, high + 0.05 * _span(chart.y_from, high)
    room = 0.05 * _span(low, high)
    return low - room, high + room


def _held_by_most(chart: Chart, least: float, high: float) -> float:
    """The upper end, kept below the highest sensible one if some value is below it."""
    return high if chart.y_most is None or least >= chart.y_most else min(high, chart.y_most)


def _span(low: float, high: float) -> float:
    """The distance of two ends, or else a distance by which they can be moved apart."""
    return (high - low) or abs(high) or 1.0


def _label_room(chart: Chart) -> float:
    """The width for the direct labels."""
    shown = short_names([line.name for line in chart.lines if not line.pale])
    levels = (rule.text for rule in chart.rules if rule.x is None)
    letters = max(map(len, (*shown.values(), *levels)), default=0)
    return min(_LABEL_ROOM[1] * chart.width, max(_LABEL_ROOM[0], letters * _LETTER + 16))


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
    if chart.sizes:
        return _sizes(chart)
    return set(log_ticks(x.low, x.high) if x.axis == "log" else nice_ticks(x.low, x.high))


def _rules(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    for rule in chart.rules:
        if rule.y is not None:
            yield (
                f'<g class="ideal" data-y="{rule.y:.6g}" transform="translate(0 {_held(y, rule.y):.1f})">'
                f'<path d="M{_LEFT:.0f} 0H{x.end:.0f}"/></g>\n'
            )
        elif rule.slope is not None:
            # The ideal, as far as the drawing goes.
            last = min(x.high, y.high / rule.slope)
            first = max(x.low, y.low / rule.slope)
            if first < last:
                ends = " ".join(f"{x.at(at):.1f},{y.at(at * rule.slope):.1f}" for at in (first, last))
                yield f'<polyline class="ideal" data-slope="{rule.slope:.6g}" points="{ends}"/>\n'
    yield from _upright_rules(chart, x)


def _upright_rules(chart: Chart, x: _Scale) -> Iterator[str]:
    """Draw vertical lines with their names above the drawing, as far as there is room."""
    free = _LEFT
    for place, name in sorted((rule.x, rule.text) for rule in chart.rules if rule.x is not None):
        # Its name is on its right, or on its left where there is no room.
        at, width = x.at(place), _LETTER * 1.1 * len(name)
        left = at + width > chart.width
        side = 'x="-5" text-anchor="end"' if left else 'x="5"'
        begin = at - width - 5 if left else at + 5
        text = f'<text {side} y="{_TOP - 7:.0f}">{safe(name)}</text>' if begin >= free else ""
        free = begin + width + 5 if text else free
        yield (
            f'<g class="chosen" data-x="{place:.6g}" transform="translate({at:.1f} 0)">'
            f'<path d="M0 {_TOP - 16:.0f}V{chart.height - _BOTTOM:.0f}"/>{text}</g>\n'
        )


def _way(line: Line, x: _Scale, y: _Scale) -> str:
    """The vertices of a line as positions."""
    return " ".join(f"{x.at(right):.1f},{_held(y, up):.1f}" for right, up in line.way)


def _series(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    named = [line for line in chart.lines if not line.pale]
    ends = [(line, _held(y, line.every[-1].y)) for line in named]
    levels = [(rule, _held(y, rule.y)) for rule in chart.rules if rule.y is not None and rule.text]
    places = _label_places([*ends, *levels], chart)
    for rule, _ in levels:
        yield (
            f'<text class="level" data-level="{rule.y:.6g}" x="{x.end + 8:.1f}" '
            f'y="{places[rule] + 3.5:.1f}">{safe(rule.text)}</text>\n'
        )
    yield from (
        f'<polyline class="pale" style="--c: var(--{line.colour})" points="{_way(line, x, y)}"/>\n'
        for line in chart.lines
        if line.pale
    )
    names = short_names([line.name for line in named])
    taken: list[_Box] = []
    for line, end in ends:
        # The leader joins a line to its label, which may be moved or beyond the line's end.
        begin = f"M{x.at(line.every[-1].x) + 5:.1f} {end:.1f}"
        leader = f'<path class="leader" d="{begin}L{x.end + 6:.1f} {places[line]:.1f}"/>'
        marks = "" if line.plain else "".join(_marks(line, x, y, taken))
        yield _named_line(line, names[line.name], places[line], f"{leader}{marks}", x, y)


def _named_line(line: Line, name: str, place: float, above: str, x: _Scale, y: _Scale) -> str:
    """Draw a line, what is `above` it, and its name at the position `place` of y."""
    start = f' data-start="{line.start[0]:.6g} {line.start[1]:.6g}"' if line.start else ""
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    full = "" if name == line.name else f"<title>{safe(line.name)}</title>"
    return (
        f'<g class="series" data-series="{safe(line.name)}"{start} style="--c: var(--{line.colour})">'
        f'{_ahead(line, x, y)}<polyline points="{_way(line, x, y)}"{dash}/>{above}'
        f'<text class="name" x="{x.end + 8:.1f}" y="{place + 3.5:.1f}">{full}{safe(name)}</text></g>\n'
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


_Box = tuple[float, float, float, float]
"""Left, right, top, bottom."""


def _marks(line: Line, x: _Scale, y: _Scale, taken: list[_Box]) -> Iterator[str]:
    """Draw the points with their intervals over the dots of the runs; arrows lead beyond the axis."""
    yield from _dots(line, x, y)
    for point in line.every:
        ends, bar = _interval(point, y)
        bar = "" if point in line.ahead else bar
        look = f"point{' hollow' if point.hollow else ''}"
        ring = f'<circle class="ring" r="6.5"/>{_mark(point, x, y, taken)}' if point.mark else ""
        beyond = '<path class="beyond" d="M-4 -7L0 -12L4 -7"/>' if point.y > y.high else ""
        leads = f'href="#{safe(point.href)}"' if point.href else 'tabindex="0" role="img"'
        yield (
            f'<a class="{look}" {leads} aria-label="{safe(point.label)}" data-x="{point.x:.6g}" '
            f'data-y="{point.y:.6g}"{ends} {_moved(point.x, point.y, x, y)}>'
            f'{bar}<circle r="3.6"/>{ring}{beyond}</a>'
        )


def _dots(line: Line, x: _Scale, y: _Scale) -> Iterator[str]:
    """Draw the runs of the points that have several, and those that reviewers excluded."""
    for point in line.points:
        runs = [("run", run, "1.6", "") for run in (point.runs if len(point.runs) > 1 else ())]
        runs += [("run excluded", run, "2.6", why) for run, why in point.excluded]
        for kind, run, radius, why in runs:
            end = f"><title>{safe(why)}</title></circle>" if why else "/>"
            yield (
                f'<circle class="{kind}" data-x="{point.x:.6g}" data-y="{run:.4g}" r="{radius}" '
                f"{_moved(point.x, run, x, y)}{end}"
            )


def _moved(right: float, up: float, x: _Scale, y: _Scale) -> str:
    return f'transform="translate({x.at(right):.1f} {_held(y, up):.1f})"'


def _interval(point: Point, y: _Scale) -> tuple[str, str]:
    """The attributes and the bar of a point's interval, with arrows where it leaves the drawing."""
    if point.low is None or point.high is None:
        return "", ""
    at = _held(y, point.y)
    down = "m-3 -4l3 4l3 -4m-3 4" if point.low < y.low else ""
    up = "m-3 4l3 -4l3 4" if point.high > y.high else ""
    low, high = _held(y, point.low) - at, _held(y, point.high) - at
    ends = f' data-low="{point.low:.5g}" data-high="{point.high:.5g}"'
    return ends, f'<path class="bar" d="M0 {low:.1f}{down}V{high:.1f}{up}"/>'


def _mark(point: Point, x: _Scale, y: _Scale, taken: list[_Box]) -> str:
    """Draw the label of a ring at the first place near it that is free and in the drawing."""
    across, down, width = x.at(point.x), _held(y, point.y), _LETTER * 1.1 * len(point.mark)
    for left, base in product((True, False), (14, -7, 27, -20)):
        begin = across - 8 - width if left else across + 8
        box = (begin, begin + width, down + base - 10, down + base + 2)
        covers = any(_overlap(box, other) for other in taken)
        if not covers and begin >= x.start - 2 and box[1] <= x.end + 4:
            taken.append(box)
            anchor = 'x="-8" text-anchor="end"' if left else 'x="8"'
            return f'<text {anchor} y="{base}">{safe(point.mark)}</text>'
    return ""


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _label_places(wanted: Sequence[tuple[Line | Rule, float]], chart: Chart) -> dict[Line | Rule, float]:
    """Place direct labels at the ends of their lines, and move apart those that would overlap."""
    ordered = sorted(wanted, key=lambda one: one[1])
    places: list[float] = []
    for _, place in ordered:
        places.append(max(place, places[-1] + _BETWEEN_LABELS) if places else max(place, _TOP - 8))
    over = (places[-1] if places else 0.0) - (chart.height - _BOTTOM - 2)
    for number in range(len(places) - 1, -1, -1):
        if over <= 0:
            break
        places[number] -= over
        over = 0.0 if number == 0 else places[number - 1] + _BETWEEN_LABELS - places[number]
    return {one: place for (one, _), place in zip(ordered, places, strict=True)}
