"""The anatomy of a step: where its time goes, of the fastest and of plain data parallelism at each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports.analysis.budget import CellBudget, budget, why_no_budget
from reports.analysis.communication import communication
from reports.analysis.figures import CellFigures
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from reports.page.bars import Labelled, budget_bars
from reports.page.labels import cell_label
from reports.page.section import Block, Bullets, Definition, Drawings, Section
from reports.page.works import works
from reports.text import count, duration, listed
from results.cell import REFERENCE_STRATEGY
from results.outcome import Evidence

_TITLE = "Where a step's time goes"
_SYNTHETIC = (
    "the data are synthetic, made before the first step, so that however slow a loader of real data is, it "
    "does not show."
)
_NAMED = 3
"""Cells named of those with one remark."""


def anatomy_section(study: StudyFigures) -> Section | None:
    """None where no cell has a figure."""
    if not study.cells:
        return None
    return Section(anchor="anatomy", title=_TITLE, blocks=tuple(_blocks(study)), definitions=DEFINITIONS)


def _blocks(study: StudyFigures) -> Iterator[Block]:
    drawings = []
    for place, (title, curves) in enumerate(works(study)):
        rows = _rows(curves)
        if rows:
            drawings.append(budget_bars(f"budget-{place}", f"{title}, {curves[0].key.kind}", rows))
    if drawings:
        yield Drawings(tuple(drawings))
    remarks = tuple(_remarks(study))
    if remarks:
        yield Bullets(remarks, "plain")


def _rows(curves: Sequence[Curve]) -> Labelled:
    """By size the fastest, and plain ddp where that is another."""
    found: dict[str, tuple[str, CellBudget]] = {}
    for size in sorted({point.gpus for curve in curves for point in curve.points}):
        here = [(curve, one) for curve in curves for one in curve.points if one.gpus == size]
        fastest = max(here, key=lambda pair: pair[1].figures.samples_per_s.value)
        plain = [pair for pair in here if pair[0].key.exchange == REFERENCE_STRATEGY]
        for curve, point in (fastest, *plain):
            own = budget(point.figures)
            if own is not None:
                emulated = ", emulated" if point.figures.evidence is Evidence.EMULATED else ""
                found.setdefault(own.cell.id, (f"{curve.key.exchange} on {size:,}{emulated}", own))
    return list(found.values())


def _remarks(study: StudyFigures) -> Iterator[str]:
    """What a reader of the bars must know, each once."""
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
    yield from _encoding(study, list(budgets.values()))
    reasons: dict[str, list[CellFigures]] = {}
    for cell in cells:
        if (reason := why_no_budget(cell)) is not None:
            reasons.setdefault(reason, []).append(cell)
    for reason, those in reasons.items():
        named = listed([cell_label(study, one.cell) for one in those], most=_NAMED)
        yield f"No budget of {named}: {reason}."


def _encoding(study: StudyFigures, budgets: Sequence[CellBudget]) -> Iterator[str]:
    """How much of compute is no training: blocks without the exchange encode and decode too.

    The recorder takes waiting for it off compute, so that only the method on-off has it there.
    """
    texts = [
        f"{cell_label(study, one.cell)}: {duration(cpu_ns)}"
        for one in budgets
        if one.method == "on-off"
        and one.cell.compresses
        and (cpu_ns := communication(one.figures).mean("exchange_cpu_ns"))
    ]
    if texts:
        yield f"Compute contains encoding and decoding (CPU time): {listed(texts, most=_NAMED, last='; ')}."


DEFINITIONS = (
    Definition(
        "method-budget",
        "Budget of a step",
        Markup(
            "<code>Step = input + compute + transfer + wait + bubble + other</code>, the mean over ranks, "
            "steps and runs. <em>Input</em>: waiting for a batch and moving it, on the slowest rank of each "
            "timed step. <em>Compute</em>: the mean of c(r, s), what rank r needs for step s without "
            "exchange, encoding in it. <em>Exposed transfer</em>: mean step with exchange to the last rank "
            "less the mean over s of the largest c(r, s), less the bubble. <em>Exposed wait</em>: the mean "
            "over s of the largest c(r, s) less compute. <em>Bubble</em>: stages of a pipeline that wait. "
            "<em>Other</em>: the rest. All but the input are of blocks later in the run; above 5 % other is "
            "a warning, and a bar whose parts are longer than its step is drawn in proportion. Where the "
            "exchange cannot be switched off, the recorder's time blocked takes the place of the blocks "
            "without it."
        ),
    ),
)
