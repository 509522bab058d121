"""Drawings of lines: what lies beyond an axis, names, crosses, values, and the small drawings of rows."""

from __future__ import annotations

import re
from dataclasses import replace

from reports.page.chart import drawn, short_names, small
from reports.page.description import Chart, Line, Point, Rule

NORMAL = Line(
    name="ddp",
    colour="blue",
    points=tuple(Point(x=gpus, y=y, low=y - 2, high=y + 2) for gpus, y in ((2, 95), (4, 90), (8, 80))),
)
CHART = Chart(
    name="chart",
    title="Efficiency",
    y_title="efficiency, %",
    x_title="GPUs",
    lines=(NORMAL,),
    rules=(Rule(text="100 % ideal", y=100),),
    y_most=150.0,
)


def top(chart: Chart) -> float:
    """The value at the upper end of the vertical axis."""
    return float(re.search(r'data-y-axis="\S+ (\S+) ', drawn(chart).svg)[1])


def test_an_interval_that_is_wide_does_not_squash_the_lines_and_has_an_arrow() -> None:
    wide = replace(NORMAL, points=(*NORMAL.points[:2], Point(x=8, y=80, low=10, high=700)))
    chart = replace(CHART, lines=(wide,))
    # Values reach from 80 to 100: intervals extend the axis by half of that at most.
    assert top(CHART) < 105
    assert top(chart) < 115
    (bar,) = re.findall(r'data-high="700"[^>]*><path class="bar" d="([^"]*)"', drawn(chart).svg)
    assert bar.endswith("m-3 4l3 -4l3 4")
    assert "m-3 -4l3 4l3 -4" in bar
    assert "l3 -4" not in drawn(CHART).svg


def test_a_point_beyond_the_axis_is_at_its_end_with_an_arrow() -> None:
    beyond = Line(name="odd", colour="green", points=(Point(x=2, y=400.0), Point(x=4, y=90.0)))
    svg = drawn(replace(CHART, lines=(NORMAL, beyond))).svg
    assert top(replace(CHART, lines=(NORMAL, beyond))) < 160
    assert svg.count('class="beyond"') == 1
    start, end = map(float, re.search(r'data-y-axis="\S+ \S+ (\S+) (\S+) ', svg).groups())
    places = [float(y) for y in re.findall(r'class="point"[^>]*translate\(\S+ (\S+)\)', svg)]
    assert all(end <= place <= start for place in places)


def test_names_are_cut_only_as_far_as_they_differ() -> None:
    long = ["fsdp:reshard=false,units=2,one-switch", "fsdp:reshard=false,units=3,one-switch"]
    assert short_names(["ddp", "a" * 40]) == {"ddp": "ddp", "a" * 40: f"{'a' * 13}...{'a' * 10}"}
    assert len(set(short_names(long).values())) == 2


def test_a_cross_has_a_name_and_a_figure_has_its_values() -> None:
    drawing = drawn(replace(CHART, missing=((16, "no result on 16: ddp: out of memory"),)))
    assert "<title>no result on 16: ddp: out of memory</title>" in drawing.svg
    assert drawing.values.texts == (
        ("ddp", "95.0 (93.0 to 97.0)", "90.0 (88.0 to 92.0)", "80.0 (78.0 to 82.0)"),
    )
    by_point = drawn(replace(CHART, sizes=False)).values
    assert by_point.titles == ("series", "GPUs", "efficiency, %")
    assert len(by_point.rows) == 3


def test_a_small_drawing_has_the_lines_and_no_words() -> None:
    svg = small(replace(CHART, y_from=0.0))
    assert svg.count("<polyline") == 1
    assert "<text" not in svg
