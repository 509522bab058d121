"""Describe a drawing of lines over sizes once, for the page (SVG) and for paper (matplotlib)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from reports.fields import NONE, Field
from reports.table import TextTable, figures, table, words
from reports.text import number, tick
from results.statistics import Metric

Axis = Literal["log", "linear"]
_MOST_POINTS = 400
"""Largest number of points of a line without marks, as a screen cannot show more."""
_MOST_ROWS = 12


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

    @property
    def way(self) -> list[tuple[float, float]]:
        """Its vertices, without the projected ones."""
        return [*([self.start] if self.start else []), *((point.x, point.y) for point in self.points)]


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
    y_most: float | None = None
    """Highest sensible end of the axis: what lies beyond is drawn there, with an arrow. None: no limit."""
    width: float = 630
    height: float = 330
    sizes: bool = True
    """Whether x is a size, so that each has a tick."""
    switchable: bool = True
    """Whether a script may change its axes: all of its lines have marks."""
    note: str = ""
    about: str = "A point is a cell and links to its row of the full table."
    """Its description for who does not see it."""

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines for point in line.every]


def interval_point(x: float, metric: Metric, scale: float = 1.0, **more: Any) -> Point:
    """The point of a figure with its interval, times `scale`."""
    low, high = (None if end is None else end * scale for end in (metric.low, metric.high))
    return Point(x=x, y=metric.value * scale, low=low, high=high, **more)


def thinned(values: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
    """The points of a line without marks: at most about `_MOST_POINTS`, always with the last one."""
    kept = list(values)
    every = -(-len(kept) // _MOST_POINTS)
    return tuple(Point(x=x, y=y) for x, y in (*kept[:-1:every], kept[-1]))


def values_table(chart: Chart) -> TextTable:
    """Return the values of a chart: a row a line and a column a size. Where x has no sizes: a row a point.

    Lines without marks have at most `_MOST_ROWS` rows, as far apart as can be.
    """
    lines = [line for line in chart.lines if not line.pale]
    if not chart.sizes:
        return _points_table(chart, lines)
    sizes = sorted({point.x for line in lines for point in line.every})
    at = {(line.name, point.x): _value(point) for line in lines for point in line.every}
    columns = [
        figures(
            tick(size),
            partial(lambda size, line: at.get((line.name, size), NONE), size),
            hint=f"on {tick(size)}",
        )
        for size in sizes
    ]
    return table(lines, [words(chart.y_title, lambda line: line.name), *columns])


def _points_table(chart: Chart, lines: Iterable[Line]) -> TextTable:
    points = [
        (line.name, point)
        for line in lines
        for point in line.points[:: -(-len(line.points) // _MOST_ROWS) if line.plain else 1]
    ]
    return table(
        points,
        [
            words("series", lambda row: row[0]),
            figures(chart.x_title, lambda row: Field(number(row[1].x), row[1].x), hint=chart.x_title),
            figures(chart.y_title, lambda row: _value(row[1]), hint=chart.title),
        ],
    )


def _value(point: Point) -> Field:
    ends = (
        "" if point.low is None or point.high is None else f" ({number(point.low)} to {number(point.high)})"
    )
    return Field(f"{number(point.y)}{ends}", point.y)
