"""The anatomy of a step: where its time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean

from markupsafe import Markup

from reports import fields
from reports.analysis.budget import PARTS, BudgetPart, CellBudget, budget, why_no_budget
from reports.analysis.communication import communication
from reports.analysis.figures import CellFigures
from reports.analysis.headline import runs_text
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page import tables
from reports.page.budget_bars import PART_NAMES, budget_bars
from reports.page.section import Block, Bullets, Definition, Drawings, Paragraph, Section, Table
from reports.page.works import cells_by_work
from reports.table import Shown, TextTable, figures, table, words
from reports.text import count, duration, percent
from results.outcome import Evidence
from results.run import RunResult

_ABOUT = Markup(
    'A step\'s time in <a href="#method-budget">parts that add up to it</a>, the mean over ranks, steps and '
    "runs. Rows are named by strategy x size, batch per replica / global."
)
_SYNTHETIC = (
    "the data are synthetic, a few batches made before the first step and given in turn. However slow a "
    "loader of real data is, it does not show; input and data loading are what it takes to hand a batch over."
)
_HINTS: dict[BudgetPart, str] = {
    "input": "waiting for data and moving it",
    "compute": "forward, backward and update in steps without exchange, with what a compressor computes",
    "transfer": "communication that does not hide behind computation",
    "wait": "waiting for the slowest rank of the step",
    "bubble": "stages of a pipeline that wait for each other",
    "other": "the timed step less all other parts, which are of steps taken later",
}


def anatomy_section(study: StudyFigures) -> Section:
    """Bars and table of the budgets, then phases, spread, and what a step's time does not contain."""
    title = "Where a step's time goes"
    if not study.cells:
        return Section(anchor="anatomy", title=title, blocks=(Paragraph("No cell has a figure.", "plain"),))
    return Section(
        anchor="anatomy",
        title=title,
        blocks=(*_budgets(study), *_others(study)),
        definitions=_DEFINITIONS,
    )


def _budgets(study: StudyFigures) -> Iterator[Block]:
    budgets = {cell_id: one for cell_id, cell in study.cells.items() if (one := budget(cell)) is not None}
    cell_words = tables.CellWords(study)
    if budgets:
        labels = {one.cell.id: _label(cell_words, one) for one in budgets.values()}
        groups = [
            (title, [budgets[cell.cell.id] for cell in cells if cell.cell.id in budgets])
            for title, cells in cells_by_work(study)
        ]
        yield Paragraph(_ABOUT)
        yield Drawings(tuple(budget_bars(groups, labels)))
        yield Table(_budget_table(study, list(budgets.values())), "The budget of a step")
    yield from _unmeasured_input(study)
    warnings = {cell_words.label(one.cell): one.warning for one in budgets.values() if one.warning}
    if warnings:
        yield Bullets(tuple(f"{cell}: {warning}." for cell, warning in warnings.items()), "plain")
    encoding = tuple(_encoding(list(budgets.values()), cell_words))
    if encoding:
        yield Bullets(encoding, "plain")
    for reason, cells in _absent(study, cell_words).items():
        yield Paragraph(f"No budget of {', '.join(cells)}: {reason}.", "plain")


def _unmeasured_input(study: StudyFigures) -> Iterator[Paragraph]:
    """That no loader works in the steps of synthetic cells, though tables have a time for input."""
    cells = len(study.cells)
    synthetic = sum(cell.cell.synthetic for cell in study.cells.values())
    if synthetic:
        where = "" if synthetic == cells else f" of {synthetic:,} of {count(cells, 'cell')}"
        yield Paragraph(f"Input{where} was not measured: {_SYNTHETIC}", "plain")


def _encoding(budgets: Sequence[CellBudget], cell_words: tables.CellWords) -> Iterator[str]:
    """Per workload how much of compute is no training: blocks without the exchange encode and decode too.

    The recorder takes waiting for it off compute, so that only the method on-off has it there.
    """
    cells: dict[str, list[str]] = {}
    for one in budgets:
        cpu_ns = communication(one.figures).mean("exchange_cpu_ns")
        if one.method == "on-off" and one.cell.compresses and cpu_ns:
            text = f"{cell_words.label(one.cell)}: {duration(cpu_ns)}"
            cells.setdefault(one.cell.workload, []).append(text)
    for workload, texts in cells.items():
        yield f"{workload}: compute contains encoding and decoding (CPU time): {'; '.join(texts)}."


def _label(cell_words: tables.CellWords, one: CellBudget) -> str:
    emulated = one.figures.evidence is Evidence.EMULATED
    return f"{cell_words.label(one.cell)}{', emulated' if emulated else ''}"


def _others(study: StudyFigures) -> Iterator[Block]:
    yield Table(tables.phases_table(study), "Step time by phase")
    yield Table(tables.spread_table(study), "Spread of single steps", folded=True)
    yield Table(_once_table(study), "Data, host and what is done once, beside the steps")


def _absent(study: StudyFigures, cell_words: tables.CellWords) -> dict[str, list[str]]:
    """The cells without a budget, by reason."""
    reasons: dict[str, list[str]] = {}
    for cell in study.cells.values():
        reason = why_no_budget(cell)
        if reason is not None:
            reasons.setdefault(reason, []).append(cell_words.label(cell.cell))
    return reasons


def _budget_table(study: StudyFigures, budgets: Sequence[CellBudget]) -> TextTable:
    columns: list[Shown[CellBudget]] = [
        *tables.CellWords(study).columns(attrgetter("cell")),
        figures("step time", lambda row: fields.figure(row.figures.step_ns), anchor="method-step-time"),
        *(column for part in PARTS for column in _part_columns(part, budgets)),
        words("method", lambda row: row.method, anchor="method-budget", hint="how the parts were told apart"),
        words("runs", lambda row: runs_text(row.figures), anchor="method-evidence"),
    ]
    return table(budgets, columns)


def _part_columns(part: BudgetPart, budgets: Sequence[CellBudget]) -> Iterator[Shown[CellBudget]]:
    """A part that some cell has, and beside the bubble what it would ideally be."""
    anchor = f"method-part-{part}"
    if any(part in row.part_ns for row in budgets):
        yield figures(PART_NAMES[part], _part(part), anchor=anchor, hint=_HINTS[part])
    if part == "bubble" and any(row.bubble_ideal is not None for row in budgets):
        yield figures(
            "ideal bubble",
            lambda row: fields.percent(row.bubble_ideal),
            anchor=anchor,
            hint="the schedule's own, of the step",
        )


def _part(part: BudgetPart) -> Callable[[CellBudget], Field]:
    """`2.50 ms (2.40 to 2.60), 20.0 %`."""

    def shown(row: CellBudget) -> Field:
        share = row.share(part)
        if share is None:
            return NONE
        figure = {"transfer": row.transfer_ns, "wait": row.wait_ns}.get(part)
        if figure is None or row.method == "one rank":
            # What is left of a sum is not exactly 0.
            own = fields.duration(round(row.part_ns[part]))
        else:
            own = fields.figure(figure, ends=True)
        return replace(own, text=f"{own.text}, {percent(share)}")

    return shown


def _once_table(study: StudyFigures) -> TextTable:
    """What takes time beside computing and communicating, and what is done once a run or a launch."""
    columns: list[Shown[CellFigures]] = [
        *tables.CellWords(study).columns(attrgetter("cell")),
        figures("data loading", _mean_of(_data), anchor="method-phases", hint="of a step"),
        figures("host dispatch", _mean_of(_dispatch), anchor="method-dispatch", hint="of a step"),
        figures("first step", _mean_of(lambda run: run.first_step_ns), anchor="method-once"),
        figures("set-up", _mean_of(lambda run: run.setup_ns), anchor="method-once"),
        figures("start-up", _mean_of(lambda run: run.startup_ns), anchor="method-once"),
    ]
    return table(study.cells.values(), columns)


def _data(run: RunResult) -> float | None:
    return run.phase_ns.get("data")


def _dispatch(run: RunResult) -> float | None:
    return None if run.communication is None else run.communication.dispatch_ns


def _mean_of(value: Callable[[RunResult], float | None]) -> Callable[[CellFigures], Field]:
    """Of the runs that have one: what is done once a launch is known of its first run alone."""

    def shown(row: CellFigures) -> Field:
        known = [found for run in row.runs if (found := value(run)) is not None]
        return fields.duration(fmean(known) if known else None)

    return shown


_DEFINITIONS = (
    Definition(
        "method-budget",
        "Budget of a step",
        Markup(
            "<code>Step time = input + compute + transfer + wait + bubble + other</code>. Method "
            "<em>on-off</em>: blocks with and without the exchange, interleaved on, off, off, on in the same "
            "run. <em>Recorded</em>, where there are no such blocks: the time in which the training thread "
            "was blocked (CPU), or in which kernels communicated while none computed (CUDA), in a block of "
            "its own with the recorder on. <em>One rank</em>: nothing is exchanged. Runs of unlike methods "
            "are not mixed. Transfer and wait carry an interval: over the runs, or of one run over its quads."
        ),
    ),
    Definition(
        "method-part-input",
        "Input",
        "The data phase of the timed steps, on the slowest rank of each, which the others wait for: waiting "
        "for a batch, and moving it. Blocks with and without the exchange get batches drawn before, and "
        "contain none of it. Synthetic batches are made before the first step: no loader is measured with "
        "them.",
    ),
    Definition(
        "method-part-compute",
        "Compute",
        Markup(
            "On-off: <code>mean over ranks r and steps s of c(r, s)</code>, with c(r, s) the time "
            "that a rank needs for a step without exchange. Compressed gradients are encoded and decoded in "
            "these steps too, and compute contains what of it does not run beside the computation. "
            "Recorded: <code>step - time blocked - input</code>. One rank: the step less its input and what "
            "lies outside of its phases."
        ),
    ),
    Definition(
        "method-part-transfer",
        "Exposed transfer",
        Markup(
            "On-off: <code>mean step with exchange, to the last rank - mean over s of max over r of c(r, "
            "s) - bubble</code>: what the exchange adds to the slowest rank, with what it slows the "
            "computation by. Recorded: <code>time blocked - bubble - wait</code>."
        ),
    ),
    Definition(
        "method-part-wait",
        "Exposed wait",
        Markup(
            "On-off: <code>mean over s of max over r of c(r, s) - mean of c</code>: what the mean rank loses "
            "because the slowest of each step is slower. Recorded: the durations of the collectives less "
            "the shortest of each over its ranks, at most the time blocked less the bubble. Where ranks "
            "meet once in several steps, c is the mean over such a period."
        ),
    ),
    Definition(
        "method-part-bubble",
        "Bubble",
        "Time in which a pipeline's stage waited for another one, by the recorder, the mean over ranks and "
        "steps: for what it is to receive, and on CPU for what it sends to be taken. Transfers of "
        "activations that nothing hides are in it. That stages take unlike times is the wait of on-off "
        "blocks, and is taken off; recorded blocks alone do not tell the two apart. On CUDA the "
        "thread that trains does not wait, and there is none. The ideal is the share of the step that its "
        "schedule leaves idle when all stages take equally long and sending takes no time.",
    ),
    Definition(
        "method-part-other",
        "Other, of the budget",
        "The step time less all other parts. The step time is of the timed blocks; all parts but the input "
        "are of blocks taken later in the run, whose mean step they add up to. So of several ranks it is "
        "what changed on the machine in between, of one rank what lies outside of its phases. Above 5 % of "
        "the step, either way, it is a warning. A bar ends at zero, the table does not.",
    ),
    Definition(
        "method-dispatch",
        "Host dispatch",
        "On CUDA: host time to queue a step on the device, in the recorded steps. A CPU has none.",
    ),
    Definition(
        "method-once",
        "First step, set-up, start-up",
        "First step: with what is done once, such as allocation, tuning of kernels and compilation. Set-up: "
        "building model, data and strategy, without proof and warm-up. Start-up: from the start of a launch "
        "to its first cell; it belongs to the launch, and is shown with the cells that know it. No step time "
        "contains any of them.",
    ),
)
