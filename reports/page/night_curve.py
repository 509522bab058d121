"""A series of nights as a drawing: the figures, their levels, and the nights between which a level ended."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from statistics import median

from reports.gate.text import figure_text, step_sentence
from reports.gate.trends import Trend
from reports.page.chart import Chart, Line, Point, Rule, drawn
from reports.page.drawing import Drawing

_SCALES = {"ns": (1e6, ", ms"), "bytes": (2**20, ", MiB")}
"""What a unit of the axis is of a metric's unit, and its name."""


def night_curve(trend: Trend, *, name: str) -> Drawing:
    """The nights of one series. `name` is unique on the page.

    The new level begins after the last night of the old one: between the two, at the commits that the rule
    names, is where the cause is.
    """
    scale, unit = _SCALES.get(trend.metric.unit, (1, ""))
    title = trend.metric.title
    days = [_day(night.measured_at, trend) for night in trend.nights]
    starts = [0, *(trend.nights.index(step.after) for step in trend.steps), len(days)]
    levels = tuple(
        Line(
            name="level",
            colour="muted",
            dash="",
            points=tuple(
                _place(days[at], median(night.value for night in trend.nights[first:end]) / scale)
                for at in (first, end - 1)
            ),
            plain=True,
            pale=True,
        )
        for first, end in pairwise(starts)
    )
    marks = tuple(
        Point(
            x=day,
            y=night.value / scale,
            low=None,
            high=None,
            runs=(),
            label=f"{night.measured_at[:10]}, {(night.commit or 'unknown')[:7]}: "
            f"{figure_text(trend.metric, night.value)}",
            href="",
        )
        for day, night in zip(days, trend.nights, strict=True)
    )
    rules = tuple(
        Rule(
            text=" to ".join((night.commit or "unknown")[:7] for night in (step.before, step.after)),
            x=days[first],
        )
        for step, first in zip(trend.steps, starts[1:], strict=False)
    )
    changes = " ".join(f"{step_sentence(trend, step)}." for step in trend.steps)
    return drawn(
        Chart(
            name=name,
            title=f"{title[0].upper()}{title[1:]} of each night, {trend.label}, {trend.machine}",
            y_title=f"{title}{unit}",
            x_title=f"days since {trend.nights[0].measured_at[:10]}",
            lines=(*levels, Line(name="nights", colour="blue", dash="", points=marks)),
            rules=rules,
            x_axis="linear",
            height=220,
            note=changes or "No change.",
            sizes=False,
            switchable=False,
        )
    )


def _place(x: float, y: float) -> Point:
    return Point(x=x, y=y, low=None, high=None, runs=(), label="", href="")


def _day(moment: str, trend: Trend) -> float:
    first, this = (datetime.fromisoformat(text) for text in (trend.nights[0].measured_at, moment))
    return (this - first).total_seconds() / 86400
