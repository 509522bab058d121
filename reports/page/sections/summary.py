"""The first screen: the answers, their trust, what to run next, and what was asked and where it ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from markupsafe import Markup

from reports.analysis.assumptions import study_day
from reports.analysis.budget import RESIDUAL_ABOVE
from reports.analysis.cost import CellCost, cell_costs
from reports.analysis.knee import PAYS_FROM, SURE_FROM
from reports.analysis.scaling import Named, Piece, piece_of
from reports.analysis.series import told_settings
from reports.analysis.size_to_buy import LIKELY_FROM, SizeToBuy, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.answer import lead_of, times
from reports.analysis.verdict.verdict import LITTLE, StudyVerdict, slow_cells, verdict
from reports.page.chart import small
from reports.page.looks import looks
from reports.page.section import (
    Answer,
    Answers,
    Beside,
    Block,
    Bullets,
    Command,
    Definition,
    Folded,
    Paragraph,
    Points,
    Row,
    Section,
    Tile,
    Tiles,
    Told,
)
from reports.page.sections.scaling import efficiency_chart
from reports.text import (
    NOTHING,
    capital,
    count,
    device_word,
    duration,
    listed,
    metric,
    moment,
    number,
    percent,
    whole_percent,
)
from results.cell import label
from results.statistics import FEWEST_FOR_INTERVAL, Metric

NOTHING_SUCCEEDED = Markup(
    "Nothing succeeded: no cell of this study has a figure. The reasons are under "
    '<a href="#outcomes">Failures and skips</a>.'
)
_MOST_TOLD = 4
"""The number of workloads whose answer is on the first screen."""
_MOST_ROWS = 8
"""The number of rows that leave the trust and the next run on the first screen."""
_MOST_POINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One workload under one rule of scaling."""

    bought: SizeToBuy
    piece: Piece | None
    lead: Named | None
    """The size to buy, or the best at the largest size measured."""
    cost: CellCost | None

    @property
    def work(self) -> str:
        """The scaling with its batch: `weak, batch 8`."""
        return f"{self.bought.scaling}, batch {self.bought.batch:,}"


def summary_section(study: StudyFigures) -> Section:
    """Make the first section of the page."""
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    rows = []
    for bought in sizes_to_buy(study):
        piece = piece_of(study.curves, bought.workload, bought.scaling)
        lead = lead_of(piece, bought, study.assumptions.smallest_effect) if piece else None
        cost = costs.get(lead[1].cell.id) if lead else None
        rows.append(_Shown(bought=bought, piece=piece, lead=lead, cost=cost))
    blocks = tuple(_blocks(study, rows, verdict(study)))
    return Section(anchor="summary", title="In short", blocks=blocks, definitions=_DEFINITIONS)


def _blocks(study: StudyFigures, rows: Sequence[_Shown], found: StudyVerdict) -> Iterator[Block]:
    several = len(found.workloads) > 1
    noted = [entry for entry in study.review.entries if entry.what == "noted"]
    for entry in noted:
        yield Paragraph(f"Note by {entry.author}, {moment(entry.at)}: {entry.why}", "plain")
    for one in list(filter(attrgetter("answer"), found.workloads))[:_MOST_TOLD]:
        yield Paragraph(f"{f'{one.workload}: ' * several}{one.answer}", "finding")
        if one.beside:
            yield Bullets(one.beside, "plain")
    if rows:
        epochs = any(one.cost and one.cost.epoch_ns for one in rows)
        yield Answers(_questions(epochs=epochs), tuple(_answer(study, one) for one in rows[:_MOST_ROWS]))
    else:
        yield Paragraph(NOTHING_SUCCEEDED, "none")
    yield Row((Tiles((*_slow_tile(study), _trust_tile(study))), _next(found, answered=bool(rows))))
    if rows:
        yield _growth(study, rows[0], found)
    yield Paragraph(" ".join((*_asked(study), *_beside_the_answers(study, rows))), "plain")


def _next(found: StudyVerdict, *, answered: bool) -> Block:
    """The command of the next run, and why to run it."""
    run = found.next_run
    if run is None:
        return Paragraph("No further run is needed for these answers." if answered else "", "plain")
    workload = f"{run.workload}: " if len(found.workloads) > 1 else ""
    return Command(f"Run next {workload}{run.order}, since {run.why}:", run.command)


def _growth(study: StudyFigures, first: _Shown, found: StudyVerdict) -> Beside:
    """The drawing of the first row with the records of where growing stops to pay, and all sentences."""
    several = len(found.workloads) > 1
    points = [
        (f"{one.workload}, {record.what}" if several else capital(record.what), f"{record.short}.")
        for one in found.workloads
        for record in one.records
        if record.growth
    ]
    sentences = tuple(
        f"{one.workload}: {record.sentence}" if several else record.sentence
        for one in found.workloads
        for record in one.records
    )
    curves = first.piece.curves if first.piece else ()
    chosen = first.bought.choice
    drawing = efficiency_chart(
        "first", curves, looks(study.curves), study.devices_word, chosen=chosen, first=True
    )
    title = f"{first.bought.workload}, {first.work}" if drawing else ""
    return Beside(
        drawing,
        title,
        (Points(tuple(points[:_MOST_POINTS])), Folded("The whole verdict", (Bullets(sentences),))),
    )


def _questions(*, epochs: bool) -> tuple[tuple[str, str], ...]:
    """The heads of the answers; an epoch is one of them only where the number of its samples is known."""
    return (
        ("Size to buy", "method-size-to-buy"),
        ("Efficiency", "method-efficiency"),
        ("An epoch" if epochs else "A million samples", "method-epoch"),
        ("Confidence", "method-confidence"),
    )


def _answer(study: StudyFigures, one: _Shown) -> Answer:
    """Make the row of one workload and rule of scaling."""
    bought, choice = one.bought, one.bought.choice
    size = Told(figure="none", lines=(bought.absent or "",))
    sure = Told(figure=NOTHING)
    if choice is not None:
        size = Told(figure=choice.size, lines=(choice.how,))
        odds = None if choice.between else choice.odds
        resamples = [f"{whole_percent(odds[choice.gpus])} of resamples name this size"] if odds else []
        sure = Told(figure=bought.confidence or NOTHING, lines=(*resamples, *bought.doubts))
    curves = one.piece.curves if one.piece else ()
    drawing = efficiency_chart("", curves, looks(study.curves), study.devices_word, chosen=choice)
    # From 0, so that the rows can be compared.
    chart = replace(drawing.chart, y_from=0.0) if drawing and drawing.chart else None
    return Answer(
        work=bought.workload,
        how=one.work,
        told=(size, _efficiency(one), _work_done(one), sure),
        drawing=small(chart) if chart else None,
    )


def _efficiency(one: _Shown) -> Told:
    if one.lead is None:
        return Told(figure="not claimed", lines=("every figure is emulated",))
    claim, where = one.lead[1].efficiency, "" if one.bought.choice else f"{one.lead[1].figures.name}, "
    if claim.is_baseline:
        return Told(figure="baseline", lines=(f"{where}the others are measured against it",))
    if claim.metric is None or claim.baseline is None:
        return Told(figure="not claimed", lines=(f"{where}{claim.reason}",))
    said, faster = metric(claim.metric), times(one.lead)
    speed_up = f"{number(faster.value)} times as fast as " if faster else ""
    return _told(one, claim.metric, said.value, (said.note, f"{where}{speed_up}{claim.baseline.name}"))


def _work_done(one: _Shown) -> Told:
    """The time and the cost of an epoch, or of a million samples."""
    cost = one.cost
    if cost is None:
        return Told(figure="unknown", lines=("no measured cell",))
    time, usd, _ = cost.basis
    ends = [] if time.low is None or time.high is None else [f"{duration(time.low)} to {duration(time.high)}"]
    ends += [f"{metric(usd).ends} USD"] if usd and metric(usd).ends else []
    samples = f"{cost.epoch_samples:,}" if cost.epoch_ns else "a million"
    on = "" if one.bought.choice else f", {label(cost.cell)} on {cost.cell.gpus:,}"
    took = f"{duration(time.value)}{f', {metric(usd).value}' if usd else ''}"
    return _told(one, time, took, (*([", ".join(ends)] if ends else []), f"{samples} samples{on}"))


def _told(one: _Shown, figure: Metric, text: str, lines: Sequence[str]) -> Told:
    """A figure with its lines; if its interval is wider than it, what to do instead of the figure."""
    if figure.tells:
        return Told(figure=text, lines=tuple(lines))
    runs = one.lead[1].figures.runs if one.lead else ()
    disturbed = sum(run.disturbed for run in runs)
    why = "the runs are too far apart: run more"
    if disturbed:
        why = f"{disturbed:,} of its {count(len(runs), 'run')} were disturbed: run again on a quiet machine"
    return Told(figure="cannot be told", lines=(why, *lines))


def _asked(study: StudyFigures) -> Iterator[str]:
    """Say what was asked, on what and when it ran."""
    pools = study.pools.values()
    if not pools:
        return
    cells, sizes = [pool.cell for pool in pools], sorted({pool.cell.gpus for pool in pools})
    keys = [curve.key for curve in study.curves]
    scalings = dict.fromkeys(f"{key.kind} (batch {key.constant_batch:,})" for key in keys)
    yield (
        f"{_all(cell.workload for cell in cells)} on {_ends([f'{size:,}' for size in sizes])} "
        f"{study.devices_word}, {_all(scalings)}, by {_all(key.label for key in keys)}: "
        f"{count(len(cells), 'cell')} of {count(max(pool.planned for pool in pools), 'run')}."
    )
    settings = (f"{cell.precision}, {cell.dataset} data" for cell in cells)
    told = (*_devices(study), *settings, *told_settings(study.plans), _ran(study))
    yield f"{', '.join(dict.fromkeys(told))}."


def _devices(study: StudyFigures) -> list[str]:
    return [run.environment.device_name for run in study.runs if run.environment is not None]


def _ran(study: StudyFigures) -> str:
    days = sorted({run.started_at[:10] for run in study.runs if run.started_at})
    return f"ran {_ends(days)}" if days else "nothing ran"


def _ends(texts: Sequence[str]) -> str:
    """Join the first and the last of sorted words: `2 to 16`, or `2` if they are equal."""
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def _beside_the_answers(study: StudyFigures, rows: Sequence[_Shown]) -> Iterator[str]:
    """Say what the answers rest on."""
    if any(one.bought.choice for one in rows):
        yield f"Size to buy: {rows[0].bought.goal}."
    yield from dict.fromkeys(f"{capital(_price(study, one.cost))}." for one in rows if one.cost)
    if further := [f"{one.bought.workload} {one.work}: {one.bought.text}" for one in rows[_MOST_ROWS:]]:
        yield f"Further: {_all(further)}."


def _all(texts: Iterable[str]) -> str:
    return listed(list(dict.fromkeys(texts)), most=12)


def _price(study: StudyFigures, cost: CellCost) -> str:
    """Describe the price with its date, or the reason why it is missing."""
    quote = cost.quote
    if quote is None:
        return f"no cost: {cost.absent}"
    price, warning = quote.price, quote.warning(study_day(study.runs))
    origin = ", of ".join(filter(None, (price.place or quote.origin, str(price.date or ""))))
    usd = f"{price.usd_per_gpu_hour:,.2f} USD a {device_word(cost.cell.device)} and hour"
    return f"{usd} ({origin}{f'; {warning}' if warning else ''})"


def _slow_tile(study: StudyFigures) -> Iterator[Tile]:
    """Name what is slow, by the name of its host, if anything is."""
    for _, ranks in slow_cells(study.cells.values())[:1]:
        told, anchor = (f"{ranks.clause}.",), "method-slow-rank"
        title = "Slow" if ranks.persistent else "Laden"
        yield Tile(title=title, figure=ranks.slow_names, lines=told, anchor=anchor, alarm=True)


def _trust_tile(study: StudyFigures) -> Tile:
    proven = sum(one.proven for one in study.cells.values())
    dirty = sum(bool(run.environment and run.environment.code.dirty) for run in study.runs)
    failed = [f"why: {study.logs_call(failure.cell.id)}" for failure in study.failures if failure.runs]
    skipped = sum(len(group.gpus) for group in study.skipped)
    slow = "" if slow_cells(study.cells.values()) else "; slow hosts or ranks: none"
    figure, *missing = study.cells_text.split("; ", 1)
    lines = (
        f"{study.run_counts.text}; code with local changes: {dirty:,}",
        f"training checked: {proven:,} of {len(study.cells):,}; planned not to run: {skipped:,}{slow}",
        *map(capital, missing),
        *failed[:1],
        study.review_text,
    )
    return Tile(
        title="Trust",
        figure=capital(figure),
        lines=tuple(filter(None, lines)),
        anchor="method-proof",
        alarm=proven < len(study.pools) or bool(study.run_counts.disturbed or dirty),
    )


_DEFINITIONS = (
    Definition(
        "method-size-to-buy",
        "Size to buy",
        Markup(
            "Chosen from measured, proven cells that train as plain data parallelism does; by default the "
            "knee: growing from n to m devices pays while each added one brings at least {pays} of what each "
            "brought before, <code>(X(m) / X(n) - 1) / (m / n - 1)</code> with X in samples a second. Best "
            "estimates decide; the odds come from resamples of the runs. <code>bench report --goal</code> "
            "chooses by throughput, cost, time or efficiency. Ranks on a CPU are not recommended."
        ).format(pays=percent(PAYS_FROM)),
    ),
    Definition(
        "method-confidence",
        "Confidence",
        f"Low: fewer than {whole_percent(LIKELY_FROM)} of resamples name the size, it may lie where sizes "
        f"have no figure, or one has one run. Medium: fewer than {whole_percent(SURE_FROM)} do, a deciding "
        f"size has fewer than {FEWEST_FOR_INTERVAL} runs, or the choice rests on disturbed runs or on code "
        "with local changes. High: none of these.",
    ),
    Definition(
        "method-verdict",
        "Time lost",
        Markup(
            "<code>step time - C(n0) (W(n) / n) / (W(n0) / n0)</code>, with C the compute of the baseline "
            "and W the samples of a step, at the first size beyond the knee, else at the largest. No part is "
            "named for less than {little} of a step, or where the parts miss the step by more than {rest} of "
            "it and by more than half of that part; only one, if it is the largest in every run, by a "
            "one-sided Student's t at 95 %."
        ).format(little=percent(LITTLE), rest=percent(RESIDUAL_ABOVE)),
    ),
)
