"""Training loss by step: one drawing for a piece of work at one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.analysis.losses import LossCurve, LossGroup
from reports.page.chart import Chart, Line, Point, Rule, drawn
from reports.page.drawing import Drawing
from reports.page.looks import Looks
from reports.text import count, number

_MOST = 400
"""Points of a line: more than a screen tells apart."""


def loss_curves(group: LossGroup, shown: Looks, *, name: str, common: str) -> Drawing:
    """The smoothed losses, the single ones pale behind them, and the target as a line.

    `name` is unique on the page; `common` says in words what the curves share.
    """
    labels = "; ".join(f"{curve.label} {number(group.final(curve))}" for curve in group.curves)
    return drawn(
        Chart(
            name=name,
            title=f"Training loss by step, {common}",
            y_title="loss",
            x_title="step, from the first of the warm-up",
            lines=tuple(_lines(group, shown)),
            rules=(Rule(text=f"target: {number(group.target)}", y=group.target),),
            x_axis="linear",
            note=f"After {count(group.samples, 'sample')}: {labels}.",
            sizes=False,
            switchable=False,
        )
    )


def _lines(group: LossGroup, shown: Looks) -> Iterator[Line]:
    for curve in group.curves:
        yield _line(curve, curve.losses, shown, pale=True)
    for curve in group.curves:
        yield _line(curve, group.smoothed(curve), shown, pale=False)


def _line(curve: LossCurve, losses: Sequence[float], shown: Looks, *, pale: bool) -> Line:
    look = shown[curve.label]
    every = -(-len(losses) // _MOST)
    kept = [*zip(curve.steps, losses, strict=True)]
    points = tuple(
        Point(x=step, y=loss, low=None, high=None, runs=(), label="", href="")
        for step, loss in (*kept[:-1:every], kept[-1])
    )
    return Line(
        name=curve.label,
        colour=look.colour,
        dash="" if pale else look.dash,
        points=points,
        plain=True,
        pale=pale,
    )
