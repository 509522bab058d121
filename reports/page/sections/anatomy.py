"""The ideal step, and the time that is lost in each part, drawn for every strategy and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from markupsafe import Markup

from reports import fields
from reports.analysis.budget import (
    LOSS_NAMES,
    PARTS,
    BudgetPart,
    CellBudget,
    Lost,
    budget,
    loss_of,
    why_no_budget,
)
from reports.analysis.communication import CellCommunication, communication
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.chart import nice_ticks, short_names
from reports.page.columns import dimension
from reports.page.looks import ROW, cell_label, works
from reports.page.section import Block, Bullets, Definition, Drawing, Drawings, Section, Table, safe
from reports.table import Column, TextTable, figures, table, words
from reports.text import DURATIONS, count, duration, listed, percent, tick
from results.grouping import grouped
from results.groups import DIMENSIONS

_MOST_ROWS = 30
"""The most rows of a table, of the largest sizes; cells.csv has all."""
_NAMED = 3
"""The number of cells that are named with one remark."""
Bar = tuple[str, Lost]
"""The name of a bar, and what its step loses."""


def anatomy_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure."""
    if not study.cells:
        return None
    drawings = [
        loss_bars(f"budget-{place}", f"{title}, {curves[0].key.kind}", bars)
        for place, (title, curves) in enumerate(works(study))
        if (bars := _bars(curves))
    ]
    blocks: list[Block] = [Drawings(tuple(drawings))] if drawings else []
    cells = [communication(one) for one in sorted(study.cells.values(), key=lambda one: one.cell.gpus)]
    blocks += [Table(data, caption) for data, caption in (_bubbles(study, cells), _dimensions(study, cells))]
    if remarks := tuple(_remarks(study)):
        blocks.append(Bullets(remarks, "plain"))
    return Section(
        anchor="anatomy", title="Where a step's time goes", blocks=tuple(blocks), definitions=DEFINITIONS
    )


def _bars(curves: Sequence[Curve]) -> list[Bar]:
    """The bars of every series by size, or of the largest sizes if they are many."""
    points = [(curve.key.exchange, point) for curve in curves for point in curve.points]
    sizes = sorted((point.gpus for _, point in points), reverse=True)
    found = []
    for exchange, point in points:
        if point.gpus >= sizes[:_MOST_BARS][-1] and (loss := loss_of(point)):
            alone = f", {point.figures.no_claim or 'no baseline'}" * (point.efficiency.metric is None)
            found.append((f"{exchange} on {point.gpus:,}{alone}", loss))
    return found


def _bubbles(study: StudyFigures, cells: Sequence[CellCommunication]) -> tuple[TextTable, str]:
    """The bubble of each pipeline as a share of the step, by formula, by replay and as it was measured."""
    staged = [one for one in cells if any(run.bubble_ideal is not None for run in one.figures.runs)]
    columns: list[Column[CellCommunication]] = [
        words("configuration", lambda one: cell_label(study, one.cell)),
        figures(
            "by the formula", lambda one: fields.percent(one.of_run("bubble_ideal")), anchor="method-bubble"
        ),
        figures(
            "replayed", lambda one: fields.percent(one.of_run("bubble_replayed")), anchor="method-bubble"
        ),
        figures(
            "measured",
            lambda one: fields.percent(one.budget.share("bubble") if one.budget else None),
            anchor="method-budget",
        ),
    ]
    return table(staged[-_MOST_ROWS:], columns), "The bubble of pipelines, share of a step"


def _dimensions(study: StudyFigures, cells: Sequence[CellCommunication]) -> tuple[TextTable, str]:
    """Transfer and wait of the groups of each dimension, of cells that exchange along several."""
    along = [one for one in cells if len(one.dimensions) > 1]
    columns: list[Column[CellCommunication]] = [
        words("configuration", lambda one: cell_label(study, one.cell)),
        *(
            figures(f"{name or 'several'}, {part}", _recorded(name, part), anchor="method-dimensions")
            for name in (*reversed(DIMENSIONS), None)
            for part in ("transfer", "wait")
        ),
        figures(
            "stages waited", lambda one: fields.duration(one.mean("bubble_ns")), anchor="method-dimensions"
        ),
        figures("less overlap", lambda one: fields.duration(one.overlap_ns), anchor="method-dimensions"),
        figures("exposed", lambda one: fields.duration(one.exposed_total_ns), anchor="method-budget"),
    ]
    return table(along[-_MOST_ROWS:], columns), "The exchange of a step by dimension"


def _recorded(name: str | None, part: str) -> Callable[[CellCommunication], Field]:
    found = dimension(lambda one: one.dimensions, name, part)
    return lambda one: fields.duration(found(one))


def _remarks(study: StudyFigures) -> Iterator[str]:
    """List the remarks that a reader of the bars needs, each once."""
    cells = list(study.cells.values())
    synthetic = sum(cell.cell.synthetic for cell in cells)
    if synthetic:
        where = "" if synthetic == len(cells) else f" of {synthetic:,} of {count(len(cells), 'cell')}"
        made = "the data are synthetic and made before the first step, without a loader of real data"
        yield f"Input{where} was not measured: {made}."
    budgets = [one for cell in cells if (one := budget(cell)) is not None]
    yield from _unexplained(study, budgets)
    yield from _with_encoding(study, budgets)
    reasons = grouped((why, cell) for cell in cells if (why := why_no_budget(cell)) is not None)
    for reason, those in reasons.items():
        named = listed([cell_label(study, one.cell) for one in those], most=_NAMED)
        yield f"No budget of {named}: {reason}."


def _unexplained(study: StudyFigures, budgets: Sequence[CellBudget]) -> Iterator[str]:
    """The budget whose parts miss its step most."""
    warned = [one for one in budgets if one.warning]
    if warned:
        worst = max(warned, key=lambda one: abs(one.part_ns["other"]) / one.step_ns)
        more = f"; {count(len(warned) - 1, 'other cell')} by more than 5 % too" if len(warned) > 1 else ""
        yield f"{cell_label(study, worst.cell)}: {worst.warning}{more}."


def _with_encoding(study: StudyFigures, budgets: Sequence[CellBudget]) -> Iterator[str]:
    """The budgets whose compute contains the encoding.

    Blocks without the exchange encode and decode too. The recorder subtracts waiting for it, so only the
    method on-off includes it.
    """
    encoding = [
        f"{cell_label(study, one.cell)}: {duration(cpu_ns)}"
        for one in budgets
        if one.method == "on-off"
        and one.cell.compresses
        and (cpu_ns := communication(one.figures).mean("exchange_cpu_ns"))
    ]
    if encoding:
        named = listed(encoding, most=_NAMED, last="; ")
        yield f"Compute contains encoding and decoding (CPU time): {named}."


DEFINITIONS = (
    Definition(
        "method-budget",
        "Budget of a step",
        Markup(
            "<code>Step = input + compute + transfer + wait + imbalance + bubble + other</code>, the mean "
            "over ranks, steps and runs. <em>Input</em>: waiting for a batch and moving it, on the slowest "
            "rank of each timed step. <em>Compute</em>: the mean of c(r, s), the time of rank r for step s "
            "without exchange, with encoding. <em>Exposed transfer</em>: mean step with exchange to the "
            "last rank less the mean over s of the largest c(r, s), less the bubble. <em>Exposed wait</em>: "
            "the mean over s of the largest c(r, s) less compute. <em>Imbalance</em>: the part of the wait "
            "that the rows of the ranks' experts explain: the median of c, times the share that rows take "
            "in it, times the largest less the mean number of rows over the median. <em>Bubble</em>: stages "
            "of a pipeline that wait. <em>Other</em>: the rest. All parts except the input are measured in "
            "later blocks of the run, and an other above 5 % is a warning. If the exchange cannot be "
            "switched off, the recorder's time blocked is used instead of blocks without it. The <em>ideal "
            "step</em> of a bar is the baseline's compute for the work of one device, or its own compute "
            "without a baseline."
        ),
    ),
    Definition(
        "method-bubble",
        "Bubble",
        Markup(
            "The share of a step in which a pipeline's stages idle because of their schedule. <em>By the "
            "formula</em>, for equal stages: with p ranks, v stages a rank and m microbatches, the idle time "
            "is (p - 1) / (v m) of the computation (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), "
            "and less if the schedule divides the backward pass (Qi et al. 2023, arXiv:2401.10241). "
            "<em>Replayed</em>: the busiest rank's, if each part of a pass through a stage takes its mean "
            "recorded time, and messages take none. <em>Measured</em>: the bubble of the budget, with "
            "messages. What other ranks idle more, as their stages take less time, is exposed wait."
        ),
    ),
    Definition(
        "method-dimensions",
        "Exchange by dimension",
        Markup(
            "<code>Transfer + wait of all dimensions + stages waited - overlap = exposed</code>, a step. A "
            "collective belongs to the dimension in which the ranks of its group differ, or to "
            "<em>several</em>. Its transfer is its shortest duration over the ranks, its wait the rest, both "
            "recorded, exposed or not. <em>Stages waited</em>: for messages of other stages, the bubble "
            "included. <em>Exposed</em>: transfer, wait and bubble of the budget. <em>Overlap</em> is what "
            "remains: dimensions hide behind computation and behind each other, so the exposed total is not "
            "divided among them. Below zero, the exchange slows the computation by more than it hides."
        ),
    ),
)


_COLOURS = dict(zip(PARTS, ("green", "blue", "vermillion", "orange", "sky", "purple", "muted"), strict=True))
_IDEAL, _IDEAL_COLOUR = "ideal step", "rule"
_WIDTH, _LEFT, _RIGHT, _ROW, _LINE, _FOOT = 630.0, 170.0, 116.0, 12.5, 15.0, 20.0
"""The width of a drawing, the room for names and for `263 ms, 23.4 % lost`, the heights of a bar, a line of
the legend and the foot."""
_MOST_BARS, _SMALL = 60, 0.01
"""The number of bars of a drawing, and the share of a step from which a part below zero is explained."""


def loss_bars(name: str, title: str, bars: Sequence[Bar]) -> Drawing:
    """Draw each step in time: the ideal, then what is lost, each piece as long as it takes."""
    unit, units_ns = _units(bars)
    end = max(loss.budget.step_ns / unit_ns for (_, loss), unit_ns in zip(bars, units_ns, strict=True))
    per = (_WIDTH - _LEFT - _RIGHT) / end
    shown = [part for part in PARTS if any(loss.part_ns.get(part) for _, loss in bars)]
    parts, top = _legend({_IDEAL: _IDEAL_COLOUR} | {LOSS_NAMES[part]: _COLOURS[part] for part in shown})
    height = top + _ROW * len(bars) + _FOOT
    for value in nice_ticks(0, end):
        x = _LEFT + value * per
        parts.append(
            f'<g class="tick"><path d="M{x:.1f} {top - 3:.0f}V{height - _FOOT + 3:.0f}"/>'
            f'<text x="{x:.1f}" y="{height - 6:.0f}" text-anchor="middle">{tick(value)}</text></g>\n'
        )
    names = short_names([label for label, _ in bars])
    for place, (label, loss) in enumerate(bars):
        parts += _bar(names[label], label, loss, top + place * _ROW, per / units_ns[place])
    full = f"{title}: where a step's time goes, {unit}"
    head = (
        f'<svg class="chart bars" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="group" '
        f'aria-labelledby="{name}-title">\n<title id="{name}-title">{safe(full)}</title>\n'
    )
    columns: list[Column[Bar]] = [
        words("configuration", lambda bar: bar[0]),
        figures("step", lambda bar: fields.duration(bar[1].budget.step_ns), anchor="method-step-time"),
        figures(_IDEAL, lambda bar: fields.duration(bar[1].ideal_ns), anchor="method-verdict"),
        *(figures(LOSS_NAMES[part], partial(_part, part), anchor="method-verdict") for part in shown),
    ]
    svg = Markup(f"{head}{''.join(parts)}</svg>")
    return Drawing(
        name=name, title=full, svg=svg, width=_WIDTH, values=table(bars, columns), note=_note(bars)
    )


def _note(bars: Sequence[Bar]) -> str:
    gains = any(ns < -_SMALL * loss.budget.step_ns for _, loss in bars for ns in loss.part_ns.values())
    return "A part below zero is taken from the ideal, which ends at the mark." * gains


def _units(bars: Sequence[Bar]) -> tuple[str, list[float]]:
    """The unit of the axis, in ns for each bar: its own ideal where the ideals differ, as under strong
    scaling."""
    ideals, longest_ns = [loss.ideal_ns for _, loss in bars], max(loss.budget.step_ns for _, loss in bars)
    if 0 < 1.01 * min(ideals) < max(ideals):
        return "in ideal steps of each bar", ideals
    unit_ns, unit = next((one for one in DURATIONS if longest_ns >= one[0]), DURATIONS[-1])
    return unit, [unit_ns] * len(bars)


def _part(part: BudgetPart, bar: Bar) -> Field:
    return fields.duration(bar[1].part_ns.get(part))


def _legend(names: Mapping[str, str]) -> tuple[list[str], float]:
    """The names with their colours, in as many lines as they need, and where the bars begin."""
    parts, x, y = [], 0.0, 4.0
    for name, colour in names.items():
        width = 24 + 5.9 * len(name)
        if x + width > _WIDTH:
            x, y = 0.0, y + _LINE
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" style="fill: var(--{colour})"/>'
            f'<text x="{x + 14:.0f}" y="{y + 9:.0f}">{name}</text>\n'
        )
        x += width
    return parts, y + 22


def _bar(short: str, label: str, loss: Lost, top: float, per: float) -> Iterator[str]:
    """Draw the pieces end to end, and a mark at the ideal."""
    lost = {part: ns for part in PARTS if (ns := loss.part_ns.get(part))}
    ideal_ns = loss.ideal_ns + sum(min(0.0, ns) for ns in lost.values())
    pieces = [(_IDEAL_COLOUR, ideal_ns), *((_COLOURS[part], ns) for part, ns in lost.items())]
    length = f"{duration(loss.budget.step_ns)}, {percent(loss.share)} lost"
    said = ", ".join(f"{LOSS_NAMES[part]} {duration(ns)}" for part, ns in lost.items())
    full = "" if short == label else f" ({label})"
    # The name begins with the words that are seen: who speaks to the browser says these.
    yield (
        f'<a class="point" href="#{safe(ROW + loss.budget.cell.id)}" '
        f'aria-label="{safe(f"{short} {length}: {_IDEAL} {duration(loss.ideal_ns)}, {said}{full}")}">'
        f'<text x="{_LEFT - 7:.0f}" y="{top + 9.8:.1f}" text-anchor="end">{safe(short)}</text>'
    )
    x = _LEFT
    for colour, ns in pieces:
        if ns > 0:
            yield (
                f'<rect x="{x:.1f}" y="{top + 1:.1f}" width="{ns * per:.1f}" height="{_ROW - 2.5:.1f}" '
                f'style="fill: var(--{colour})"/>'
            )
            x += ns * per
    mark = _LEFT + loss.ideal_ns * per
    yield (
        f'<path d="M{mark:.1f} {top:.1f}v{_ROW - 0.5:.1f}" style="stroke: var(--ink)"/>'
        f' <text x="{x + 5:.1f}" y="{top + 9.8:.1f}">{length}</text></a>\n'
    )
