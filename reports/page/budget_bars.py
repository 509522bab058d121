"""The budget of a step as stacked bars, one row a cell, one scale for each piece of work."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from reports.analysis.budget import PARTS, BudgetPart, CellBudget
from reports.page.bars import BarGroup, Labels, drawings
from reports.page.svg import BLUE, GREEN, MUTED, ORANGE, PURPLE, VERMILLION, Drawing

PART_NAMES: dict[BudgetPart, str] = {
    "input": "input",
    "compute": "compute",
    "transfer": "exposed transfer",
    "wait": "exposed wait",
    "bubble": "bubble",
    "other": "other",
}
_COLOURS: dict[BudgetPart, str] = {
    "input": GREEN,
    "compute": BLUE,
    "transfer": VERMILLION,
    "wait": ORANGE,
    "bubble": PURPLE,
    "other": MUTED,
}


def budget_bars(groups: Sequence[BarGroup[CellBudget]], labels: Labels) -> list[Drawing]:
    """Stacked bars of the parts of a step."""
    return drawings(groups, labels, ("where a step's time goes", "ms"), _budget)


def _budget(drawn: Axes, budgets: Sequence[CellBudget], sheet: Sequence[CellBudget]) -> None:
    places = list(range(len(sheet)))
    lefts = [0.0] * len(sheet)
    shown = [part for part in PARTS if any(part in budget.part_ns for budget in budgets)]
    for part in shown:
        widths = [_width(budget, part) for budget in sheet]
        drawn.barh(places, widths, left=lefts, height=0.66, color=_COLOURS[part], label=PART_NAMES[part])
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    drawn.set_xlim(0, 1.03 * max(sum(_width(budget, part) for part in PARTS) for budget in budgets))
    figure = drawn.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside lower left", ncols=3, columnspacing=1.2, handlelength=1.0)


def _width(budget: CellBudget, part: BudgetPart) -> float:
    """In ms. Differences can be a little below zero, a bar cannot: the table has them as they are."""
    return max(0.0, budget.part_ns.get(part, 0.0)) / 1e6
