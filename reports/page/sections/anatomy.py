"""The anatomy of a step: its budget, for the fastest cell and for plain data parallelism at each size.

Budgets are drawn as stacked bars in SVG: one row for each cell, with parts as shares of its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from markupsafe import Markup

from reports import fields
from reports.analysis.budget import PARTS, BudgetPart, CellBudget, budget, why_no_budget
from reports.analysis.communication import communication
from reports.analysis.scaling import Curve, is_measured
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.looks import ROW, cell_label, works
from reports.page.section import Block, Bullets, Definition, Drawing, Drawings, Section, safe
from reports.table import Column, figures, table, words
from reports.text import count, duration, listed, percent
from results.cell import REFERENCE_STRATEGY
from results.grouping import grouped

_SYNTHETIC = (
    "the data are synthetic and made before the first step, so the time of a loader of real data is not in "
    "it."
)
_NAMED = 3
"""The number of cells that are named with one remark."""


def anatomy_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure."""
    if not study.cells:
        return None
    drawings = [
        budget_bars(f"budget-{place}", f"{title}, {curves[0].key.kind}", rows)
        for place, (title, curves) in enumerate(works(study))
        if (rows := _rows(curves))
    ]
    blocks: list[Block] = [Drawings(tuple(drawings))] if drawings else []
    if remarks := tuple(_remarks(study)):
        blocks.append(Bullets(remarks, "plain"))
    return Section(
        anchor="anatomy", title="Where a step's time goes", blocks=tuple(blocks), definitions=DEFINITIONS
    )


def _rows(curves: Sequence[Curve]) -> Labelled:
    """Choose the fastest of each size, and plain ddp if it is not the fastest."""
    found: dict[str, tuple[str, CellBudget]] = {}
    for size in sorted({point.gpus for curve in curves for point in curve.points}):
        here = [(curve, one) for curve in curves for one in curve.points if one.gpus == size]
        fastest = max(here, key=lambda pair: (is_measured(pair[1]), pair[1].figures.samples_per_s.value))
        plain = [pair for pair in here if pair[0].key.exchange == REFERENCE_STRATEGY]
        for curve, point in (fastest, *plain):
            own = budget(point.figures)
            if own is not None:
                emulated = f", {point.figures.no_claim}" if point.figures.no_claim else ""
                found.setdefault(own.cell.id, (f"{curve.key.exchange} on {size:,}{emulated}", own))
    return list(found.values())


def _remarks(study: StudyFigures) -> Iterator[str]:
    """List the remarks that a reader of the bars needs, each once."""
    cells = list(study.cells.values())
    synthetic = sum(cell.cell.synthetic for cell in cells)
    if synthetic:
        where = "" if synthetic == len(cells) else f" of {synthetic:,} of {count(len(cells), 'cell')}"
        yield f"Input{where} was not measured: {_SYNTHETIC}"
    budgets = {cell.cell.id: one for cell in cells if (one := budget(cell)) is not None}
    warned = [one for one in budgets.values() if one.warning]
    if warned:
        worst = max(warned, key=lambda one: abs(one.part_ns["other"]) / one.step_ns)
        more = f"; {count(len(warned) - 1, 'other cell')} by more than 5 % too" if len(warned) > 1 else ""
        yield f"{cell_label(study, worst.cell)}: {worst.warning}{more}."
    # Blocks without the exchange encode and decode too, so encoding is a part of compute. The recorder
    # subtracts waiting for it, so only the method on-off includes it.
    encoding = [
        f"{cell_label(study, one.cell)}: {duration(cpu_ns)}"
        for one in budgets.values()
        if one.method == "on-off"
        and one.cell.compresses
        and (cpu_ns := communication(one.figures).mean("exchange_cpu_ns"))
    ]
    if encoding:
        named = listed(encoding, most=_NAMED, last="; ")
        yield f"Compute contains encoding and decoding (CPU time): {named}."
    reasons = grouped((why, cell) for cell in cells if (why := why_no_budget(cell)) is not None)
    for reason, those in reasons.items():
        named = listed([cell_label(study, one.cell) for one in those], most=_NAMED)
        yield f"No budget of {named}: {reason}."


DEFINITIONS = (
    Definition(
        "method-budget",
        "Budget of a step",
        Markup(
            "<code>Step = input + compute + transfer + wait + bubble + other</code>, the mean over ranks, "
            "steps and runs. <em>Input</em>: waiting for a batch and moving it, on the slowest rank of each "
            "timed step. <em>Compute</em>: the mean of c(r, s), the time of rank r for step s without "
            "exchange, with encoding. <em>Exposed transfer</em>: mean step with exchange to the last rank "
            "less the mean over s of the largest c(r, s), less the bubble. <em>Exposed wait</em>: the mean "
            "over s of the largest c(r, s) less compute. <em>Bubble</em>: stages of a pipeline that wait. "
            "<em>Other</em>: the rest. All parts except the input are measured in later blocks of the run; "
            "an other above 5 % is a warning, and a bar whose parts are longer than its step is drawn in "
            "proportion. If the exchange cannot be switched off, the recorder's time blocked is used "
            "instead of blocks without it."
        ),
    ),
)


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
"""Space for `263 ms`, and for `263 ms of 293 ms`."""
_LONGER_FROM = 1.005
"""Ratio of the parts of a bar to its step from which the bar shows both."""
_LONGEST = 29

Labelled = Sequence[tuple[str, CellBudget]]


def budget_bars(name: str, title: str, rows: Labelled) -> Drawing:
    """Draw the bars. A bar is a complete step, or its parts if these are longer; the text at its end says
    which."""
    longer = any(_is_longer(one) for _, one in rows)
    scale = (_WIDTH - _LEFT - (_RIGHT_OF_TWO if longer else _RIGHT)) / 100
    height = _TOP + _ROW * len(rows) + _FOOT
    shown = [part for part in PARTS if any(one.part_ns.get(part, 0.0) > 0 for _, one in rows)]
    parts, x = [], _LEFT
    for part in shown:
        # The legend.
        parts.append(
            f'<rect x="{x:.0f}" y="4" width="10" height="10" style="fill: var(--{_COLOURS[part]})"/>'
            f'<text x="{x + 14:.0f}" y="13">{PART_NAMES[part]}</text>\n'
        )
        x += 26 + 6.2 * len(PART_NAMES[part])
    for share in (0, 25, 50, 75, 100):
        x = _LEFT + share * scale
        parts.append(
            f'<g class="tick"><path d="M{x:.1f} {_TOP - 4:.0f}V{height - _FOOT:.0f}"/>'
            f'<text x="{x:.1f}" y="{height - 8:.0f}" text-anchor="middle">{share}</text></g>\n'
        )
    for place, (label, one) in enumerate(rows):
        parts += _bar(label, one, _TOP + place * _ROW, scale)
    full = f"{title}: where a step's time goes, %"
    head = (
        f'<svg class="chart bars" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="group" '
        f'aria-labelledby="{name}-title">\n<title id="{name}-title">{safe(full)}</title>\n'
    )
    note = (
        "A bar labelled X of Y shows shares of Y, the sum of the parts, which are from slower steps."
        if longer
        else ""
    )
    columns: list[Column[tuple[str, CellBudget]]] = [
        words("configuration", lambda row: row[0]),
        figures("step", lambda row: fields.duration(row[1].step_ns), anchor="method-step-time"),
    ]
    columns += [figures(PART_NAMES[part], partial(_part, part), anchor="method-budget") for part in shown]
    return Drawing(
        name=name,
        title=full,
        svg=Markup(f"{head}{''.join(parts)}</svg>"),
        width=_WIDTH,
        note=note,
        values=table(rows, columns),
    )


def _part(part: BudgetPart, row: tuple[str, CellBudget]) -> Field:
    return fields.duration(row[1].part_ns.get(part))


def _drawn_ns(one: CellBudget) -> dict[BudgetPart, float]:
    """The parts that are drawn: a part below zero counts as 0."""
    return {part: max(0.0, ns) for part, ns in one.part_ns.items()}


def _is_longer(one: CellBudget) -> bool:
    """Whether the parts are longer than the step: most are from later steps, which may have been slower."""
    return sum(_drawn_ns(one).values()) > _LONGER_FROM * one.step_ns


def _bar(label: str, one: CellBudget, top: float, scale: float) -> Iterator[str]:
    """Draw the parts in their shares of the step, or of their sum if that is longer."""
    parts = _drawn_ns(one)
    whole = max(one.step_ns, sum(parts.values()))
    said = ", ".join(f"{PART_NAMES[part]} {percent(ns / one.step_ns)}" for part, ns in parts.items() if ns)
    short = label if len(label) <= _LONGEST else f"{label[:16]}...{label[-10:]}"
    together = f"; the parts together {duration(whole)}" if _is_longer(one) else ""
    end = _LEFT + 100 * scale + 5
    length = f"{duration(one.step_ns)} of {duration(whole)}" if _is_longer(one) else duration(one.step_ns)
    full = "" if short == label else f" ({label})"
    # The name begins with the words that are seen: who speaks to the browser says these.
    yield (
        f'<a class="point" href="#{safe(ROW + one.cell.id)}" '
        f'aria-label="{safe(f"{short} {length}, of which {said}{together}{full}")}">'
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
    yield f' <text x="{end:.1f}" y="{top + 11.5:.1f}">{length}</text></a>\n'
