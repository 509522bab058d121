"""Training loss by step: one drawing for a piece of work at one size."""

from __future__ import annotations

from matplotlib.lines import Line2D

from reports.analysis.losses import LossGroup
from reports.page.groups import LineStyles
from reports.page.svg import MUTED, Drawing, axes, inline
from reports.text import count, number, tick

_WIDTH, _HEIGHT, _LEGEND_ROW = 4.6, 2.7, 0.19


def loss_curves(group: LossGroup, styles: LineStyles, *, name: str, common: str) -> Drawing:
    """The smoothed losses, the single ones pale behind them, and the target as a line.

    `name` is unique on the page; `common` says in words what the curves share.
    """
    title = "Training loss by step"
    with axes(width=_WIDTH, height=_HEIGHT + _LEGEND_ROW * (1 + len(group.curves) // 2)) as drawn:
        for curve in group.curves:
            colour = styles[curve.label].colour
            drawn.plot(curve.steps, curve.losses, color=colour, linewidth=0.7, alpha=0.35, zorder=2)
            dashes = _dashes(curve.label, group)
            drawn.plot(curve.steps, group.smoothed(curve), color=colour, linestyle=dashes, zorder=3)
        drawn.axhline(group.target, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        drawn.yaxis.set_major_formatter(lambda value, _: tick(value))
        drawn.set_xlabel("step, from the first of the warm-up")
        drawn.grid(axis="y")
        figure = drawn.get_figure(root=True)
        assert figure is not None
        figure.legend(handles=_entries(group, styles), loc="outside lower left", ncols=2, borderaxespad=0.1)
        drawn.set_title("loss")
        labels = "; ".join(f"{curve.label} {number(group.final(curve))}" for curve in group.curves)
        after = f"After {count(group.samples, 'sample')}: {labels}."
        described = f"{title}, {common}. {after} The numbers are in the table below."
        return Drawing(
            title=f"{title}, {common}", svg=inline(drawn, name=name, title=title, description=described)
        )


def _dashes(label: str, group: LossGroup) -> tuple[int, tuple[int, ...]]:
    """A pattern a curve, beside its colour: curves of equal arithmetic lie on each other."""
    patterns: tuple[tuple[int, ...], ...] = ((1, 0), (6, 2), (2, 2), (8, 2, 2, 2))
    labels = [curve.label for curve in group.curves]
    return (0, patterns[labels.index(label) % len(patterns)])


def _entries(group: LossGroup, styles: LineStyles) -> list[Line2D]:
    entries = [
        Line2D(
            [], [], color=styles[curve.label].colour, linestyle=_dashes(curve.label, group), label=curve.label
        )
        for curve in group.curves
    ]
    target = f"target: {number(group.target)}"
    return [*entries, Line2D([], [], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=target)]
