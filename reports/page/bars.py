"""The budget of a step as stacked bars, by hand: a row a cell, each in shares of its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from reports.analysis.budget import PARTS, BudgetPart, CellBudget
from reports.page.drawing import Drawing, safe
from reports.page.scaling_charts import ROW
from reports.text import duration, percent

PART_NAMES: Mapping[BudgetPart, str] = {
    "input": "input",
    "compute": "compute",
    "transfer": "exposed transfer",
    "wait": "exposed wait",
    "bubble": "bubble",
    "other": "other",
}
_COLOURS: Mapping[BudgetPart, str] = {
    "input": "green",
    "compute": "blue",
    "transfer": "vermillion",
    "wait": "orange",
    "bubble": "purple",
    "other": "muted",
}
_WIDTH, _LEFT, _TOP, _ROW, _FOOT = 630.0, 190.0, 26.0, 17.0, 24.0
_RIGHT, _RIGHT_OF_TWO = 58.0, 112.0
"""Room for `263 ms`, and for `263 ms of 293 ms`."""
_LONGER_FROM = 1.005
"""Times its step that the parts of a bar must be before the bar says so."""
_LONGEST = 29

Labelled = Sequence[tuple[str, CellBudget]]


def budget_bars(name: str, title: str, rows: Labelled) -> Drawing:
    """Each bar is a whole step, or its parts where these are longer; the words at its end say which."""
    longer = any(_is_longer(one) for _, one in rows)
    scale = (_WIDTH - _LEFT - (_RIGHT_OF_TWO if longer else _RIGHT)) / 100
    height = _TOP + _ROW * len(rows) + _FOOT
    shown = [part for part in PARTS if any(one.part_ns.get(part, 0.0) > 0 for _, one in rows)]
    parts = [*_legend(shown), *_axis(scale, height)]
    for place, (label, one) in enumerate(rows):
        parts += _bar(label, one, _TOP + place * _ROW, scale)
    full = f"{title}: where a step's time goes, %"
    head = (
        f'<svg class="chart bars" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="group" '
        f'aria-labelledby="{name}-title">\n<title id="{name}-title">{safe(full)}</title>\n'
    )
    note = (
        "A bar of X of Y shows shares of Y, the parts together: they are of slower steps." if longer else ""
    )
    return Drawing(title=full, svg=Markup(f"{head}{''.join(parts)}</svg>"), width=_WIDTH, note=note)


def _drawn_ns(one: CellBudget) -> dict[BudgetPart, float]:
    """A part below zero has no bar."""
    return {part: max(0.0, ns) for part, ns in one.part_ns.items()}


def _is_longer(one: CellBudget) -> bool:
    """All parts but the input are of steps taken later than the timed ones, which may have been slower."""
    return sum(_drawn_ns(one).values()) > _LONGER_FROM * one.step_ns


def _legend(shown: Sequence[BudgetPart]) -> Iterator[str]:
    x = _LEFT
    for part in shown:
        yield (
            f'<rect x="{x:.0f}" y="4" width="10" height="10" style="fill: var(--{_COLOURS[part]})"/>'
            f'<text x="{x + 14:.0f}" y="13">{PART_NAMES[part]}</text>\n'
        )
        x += 26 + 6.2 * len(PART_NAMES[part])


def _axis(scale: float, height: float) -> Iterator[str]:
    for share in (0, 25, 50, 75, 100):
        x = _LEFT + share * scale
        yield (
            f'<g class="tick"><path d="M{x:.1f} {_TOP - 4:.0f}V{height - _FOOT:.0f}"/>'
            f'<text x="{x:.1f}" y="{height - 8:.0f}" text-anchor="middle">{share}</text></g>\n'
        )


def _bar(label: str, one: CellBudget, top: float, scale: float) -> Iterator[str]:
    """The parts in their shares of the step, or of their sum where that is longer."""
    parts = _drawn_ns(one)
    whole = max(one.step_ns, sum(parts.values()))
    said = ", ".join(f"{PART_NAMES[part]} {percent(ns / one.step_ns)}" for part, ns in parts.items() if ns)
    short = label if len(label) <= _LONGEST else f"{label[:16]}...{label[-10:]}"
    together = f"; the parts together {duration(whole)}" if _is_longer(one) else ""
    yield (
        f'<a class="point" href="#{safe(ROW + one.cell.id)}" '
        f'aria-label="{safe(f"{label}: {duration(one.step_ns)}, of which {said}{together}")}">'
        f'<text x="{_LEFT - 8:.0f}" y="{top + 11.5:.1f}" text-anchor="end">{safe(short)}</text>'
    )
    x = _LEFT
    for part in PARTS:
        width = 100 * parts.get(part, 0.0) / whole * scale
        if width > 0:
            yield (
                f'<rect x="{x:.1f}" y="{top + 2:.1f}" width="{width:.1f}" height="{_ROW - 4:.0f}" '
                f'style="fill: var(--{_COLOURS[part]})"/>'
            )
        x += width
    end = _LEFT + 100 * scale + 5
    length = f"{duration(one.step_ns)} of {duration(whole)}" if _is_longer(one) else duration(one.step_ns)
    yield f'<text x="{end:.1f}" y="{top + 11.5:.1f}">{length}</text></a>\n'
