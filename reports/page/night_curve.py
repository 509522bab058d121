"""A series of nights as a drawing: the figures, their levels, and the nights between which a level ended."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from statistics import median

from reports.gate.text import step_sentence
from reports.gate.trends import Trend
from reports.page.svg import BLUE, MUTED, VERMILLION, Drawing, axes, inline
from reports.text import count, duration

_WIDTH, _HEIGHT = 7.2, 2.4


def night_curve(trend: Trend, *, name: str) -> Drawing:
    """The nights of one series. `name` is unique on the page.

    The new level begins after the last night of the old one: the band between the two, with both commits, is
    where the cause is.
    """
    days = [_day(night.measured_at, trend) for night in trend.nights]
    values = [night.value / 1e6 for night in trend.nights]
    starts = [0, *(trend.nights.index(step.after) for step in trend.steps), len(values)]
    title = f"Step time of each night, {trend.label}, {trend.machine}"
    with axes(width=_WIDTH, height=_HEIGHT) as drawn:
        drawn.plot(days, values, marker=".", linestyle="none", color=BLUE)
        for first, end in pairwise(starts):
            level = median(values[first:end])
            drawn.plot([days[first], days[end - 1]], [level, level], color=MUTED, linewidth=1)
        for step, first in zip(trend.steps, starts[1:], strict=False):
            drawn.axvspan(days[first - 1], days[first], color=VERMILLION, alpha=0.3)
            commits = " to ".join((night.commit or "unknown")[:7] for night in (step.before, step.after))
            drawn.annotate(
                commits,
                (days[first], max(values)),
                textcoords="offset points",
                xytext=(4, 0),
                color=VERMILLION,
            )
        drawn.set_title("step time [ms]")
        drawn.set_xlabel(f"days since {trend.nights[0].measured_at[:10]}")
        drawn.grid(axis="y")
        ends = [duration(night.value) for night in (trend.nights[0], trend.nights[-1])]
        changes = " ".join(f"{step_sentence(trend, step)}." for step in trend.steps)
        described = (
            f"{title}. {count(len(values), 'night')}, from {ends[0]} to {ends[1]}. {changes or 'No change.'}"
        )
        return Drawing(title=title, svg=inline(drawn, name=name, title=title, description=described))


def _day(measured_at: str, trend: Trend) -> float:
    """Days since the first night."""
    begun, then = (datetime.fromisoformat(text) for text in (trend.nights[0].measured_at, measured_at))
    return (then - begun).total_seconds() / 86_400
