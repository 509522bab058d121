"""The first screen: the answers, their trust, what to run next, and what was asked and where it ran.

A row for each workload and rule of scaling names the size to buy, how well it scales, what an epoch takes,
and how sure that is. A drawing of the first row follows, with three sentences: where growing stops paying,
why, and how certain that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

from markupsafe import Markup

from reports.analysis.assumptions import study_day
from reports.analysis.budget import RESIDUAL_ABOVE
from reports.analysis.cost import CellCost, cell_costs
from reports.analysis.exchange import FEWEST_RUNS
from reports.analysis.figures import CellFigures
from reports.analysis.knee import PAYS_FROM, SURE_FROM
from reports.analysis.next_run import next_run
from reports.analysis.outcomes import NOT_RUN, failures_text
from reports.analysis.scaling import piece_of
from reports.analysis.series import told_settings
from reports.analysis.size_to_buy import LIKELY_FROM, SizeToBuy, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.made_from import made_from
from reports.analysis.verdict.scalability import LITTLE, Configuration, Scalability, reach_of, scalability
from reports.analysis.verdict.sentences import cause
from reports.analysis.verdict.verdict import slow_cells, verdict
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
    number,
    percent,
    whole_percent,
)
from results.cell import DEFAULT_COLLECTIVE, SYNTHETIC, UNCOMPRESSED, label
from results.notation import NO_LINK
from results.run import NOT_PROVEN
from results.statistics import FEWEST_FOR_INTERVAL, Metric
from results.version import VERSION

NOTHING_SUCCEEDED = Markup(
    "Nothing succeeded: no cell of this study has a figure. The reasons are under "
    '<a href="#outcomes">Failures and skips</a>.'
)


_HOW_SURE = "How sure"
_MOST_TOLD = 4
"""The number of workloads and rules of scaling with sentences on growth."""


def summary_section(study: StudyFigures) -> Section:
    """Make the first section of the page."""
    every = shown(study, sizes_to_buy(study))
    return Section(
        anchor="summary", title="In short", blocks=tuple(_blocks(study, every)), definitions=_DEFINITIONS
    )


def _blocks(study: StudyFigures, every: Sequence[Shown]) -> Iterator[Block]:
    answers = [(one.workload, one.answer) for one in verdict(study).workloads if one.answer]
    for workload, words in answers[:_MOST_TOLD]:
        first, _, others = words.removesuffix(".").partition("; ")
        yield Paragraph(f"{workload}: {first}." if len(answers) > 1 else f"{first}.", "finding")
        if others:
            yield Paragraph(f"{capital(others)}.", "plain")
    then = next_run(study)
    subject = f"{then.workload}: " if then and len({one.bought.workload for one in every}) > 1 else ""
    command: tuple[Block, ...] = ()
    if then:
        command = (Command(f"Run next {subject}{then.order}, since {then.why}:", then.command),)
    elif every:
        command = (Paragraph("No further run is needed for these answers.", "plain"),)
    if every:
        yield Answers(_QUESTIONS, tuple(_answer(study, one) for one in every[:_MOST_ROWS]))
    else:
        yield Paragraph(NOTHING_SUCCEEDED, "none")
    yield Row((Tiles((*_slow_tile(study), _trust_tile(study))), *command))
    if every:
        yield from _growth(study, every)
    told = (asked_text(study), f"{capital(ran(study))}; page by bench {VERSION}{called(study)}.")
    yield Paragraph(" ".join((*told, *_beside_the_answers(study, every))), "plain")


def _growth(study: StudyFigures, every: Sequence[Shown]) -> Iterator[Block]:
    """The drawing of the first row with its sentences, and the sentences of the others."""
    first = every[0]
    bought = first.bought
    points = Points(tuple(_sentences(study, first)))
    piece = piece_of(study.curves, bought.workload, bought.scaling)
    drawing = efficiency_chart(
        "first",
        piece.curves if piece else (),
        looks(study.curves),
        study.devices_word,
        chosen=bought.choice,
        first=True,
    )
    title = f"{bought.workload}, {first.work}" if drawing else ""
    yield Beside(drawing, title, (points, Bullets(verdict(study).sentences, "folded")))
    for one in every[1:_MOST_TOLD]:
        told = " ".join(text for head, text in _sentences(study, one) if head != _HOW_SURE)
        yield Paragraph(f"{one.named if one.several else capital(one.named)}: {told}", "plain")


def _sentences(study: StudyFigures, first: Shown) -> Iterator[tuple[str, str]]:
    """Answer where growing stops paying, why, and how certain that is.

    The subject is the chosen strategy, or else plain data parallelism or the best strategy.
    """
    bought, scaling = first.bought, first.scaling
    reach = (scaling.dense or scaling.largest) if scaling else None
    if bought.choice is not None:
        reach = reach_of(study, bought.workload, bought.scaling, bought.choice.strategy)
    if reach is None:
        emulated = scaling is None or scaling.fastest is None
        why = "Every figure is emulated" if emulated else "Only one size was measured"
        yield "Where it stops paying", f"{why}, so scaling is not judged."
    else:
        who = reach.configuration.strategy
        yield "Where it stops paying", f"{capital(bought.scaling)} scaling with {who}: {reach.knee_text}."
        yield "Why", f"{capital(cause(reach))}."
    made = (
        made_from(study, bought.workload).sentence
        or "Every figure is emulated, so the report claims no size."
    )
    if bought.confidence is not None:
        because = f": {'; '.join(bought.doubts)}" if bought.doubts else ""
        made = f"{capital(bought.confidence)} confidence in the size{because}. {made}"
    yield _HOW_SURE, made


_DEFINITIONS = (
    Definition(
        "method-size-to-buy",
        "Size to buy",
        Markup(
            "Chosen from measured, proven cells that train as plain data parallelism does; by default the "
            "knee: growing from n to m devices pays while each added one brings at least {pays} of what each "
            "brought before, <code>(X(m) / X(n) - 1) / (m / n - 1)</code> with X in samples a second. Best "
            "estimates decide; the odds of other sizes come from resamples of the runs. <code>bench report "
            "--goal</code> chooses by throughput, cost, time or efficiency. Ranks on a CPU and emulated "
            "sizes are not recommended."
        ).format(pays=percent(PAYS_FROM)),
    ),
    Definition(
        "method-confidence",
        "Confidence",
        f"Low: fewer than {whole_percent(LIKELY_FROM)} of resamples of the runs name the size, or a size has "
        f"one run. Medium: fewer than {whole_percent(SURE_FROM)} do, a deciding size has fewer than "
        f"{FEWEST_FOR_INTERVAL} runs that count, a size between it and a measured neighbour failed, or the "
        "choice rests on disturbed runs or on code with local changes. High: none of these.",
    ),
    Definition(
        "method-verdict",
        "Why",
        Markup(
            "Lost: <code>step time - C(n0) (W(n) / n) / (W(n0) / n0)</code>, with C the compute of the "
            "baseline's budget and W the samples of a step, at the first size beyond the knee, else at the "
            "largest. No part is named for a loss below {little} of a step, or where the parts miss the "
            "step by more than {rest} of it and by more than half of the part to be named. Only one part is "
            "named if it is the largest in every run, by a one-sided Student's t at 95 %; if not, all parts "
            "that may be the largest are named. With fewer than {runs} runs, the page says that a "
            "configuration seems the best."
        ).format(little=percent(LITTLE), rest=percent(RESIDUAL_ABOVE), runs=FEWEST_RUNS),
    ),
)


_ROOM = 60
"""The number of characters of a command that fit on the first screen."""


def asked_text(study: StudyFigures) -> str:
    """`gpt2-small on 1 to 256 GPUs, weak (8 samples a replica) and strong ...: ddp, fsdp. 85 cells.`"""
    requests = [plan.request for plan in study.plans]
    sizes = sorted({gpus for request in requests for gpus in request.gpus})
    strategies = _all(request.strategies for request in requests)
    more = [
        *_told("compression", _all(request.compressions for request in requests), UNCOMPRESSED),
        *_told("collective", _all(request.collectives for request in requests), DEFAULT_COLLECTIVE),
        *_told("link", _all(request.links for request in requests), NO_LINK),
    ]
    repeats = {request.repeats for request in requests} or {0}
    runs = "up to " * (len(repeats) > 1) + count(max(repeats), "run")
    scalings = []
    for kind, of in (("weak", "a replica"), ("strong", "in all")):
        batches = sorted({curve.key.constant_batch for curve in study.curves if curve.key.kind == kind})
        if batches:
            scalings.append(f"{kind} ({listed([f'{batch:,}' for batch in batches])} samples {of})")
    span = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}" if sizes else "no"
    workloads = listed(_all(request.workloads for request in requests), most=6)
    return (
        f"{workloads} on {span} {study.devices_word}, {' and '.join(scalings) or 'as planned'}, by "
        f"{listed(strategies, most=12)}{''.join(f'; {one}' for one in more)}. "
        f"{count(len(study.pools), 'cell')}, {runs} each."
    )


def ran(study: StudyFigures) -> str:
    """Device, backend, arithmetic, data, settings that are not the default, seed and days of the runs."""
    cells = [pool.cell for pool in study.pools.values()]
    environments = [run.environment for run in study.runs if run.environment is not None]
    names = _all([one.device_name] for one in environments)
    days = sorted({run.started_at[:10] for run in study.runs if run.started_at})
    when = f"ran {days[0]} to {days[-1]}" if len(days) > 1 else f"ran {days[0]}" if days else "nothing ran"
    parts = [
        listed(names) if names else "",
        *(
            ", ".join(_all([str(getattr(cell, field))] for cell in cells))
            for field in ("backend", "precision")
        ),
        ", ".join(
            f"{name} data" if name == SYNTHETIC else name for name in _all([cell.dataset] for cell in cells)
        ),
        *told_settings(study.plans),
        f"seed {', '.join(_all([str(cell.seed)] for cell in cells))}" if cells else "",
        when,
    ]
    return ", ".join(part for part in parts if part)


def called(study: StudyFigures) -> str:
    """`; asked by bench matrix --gpus 1..2`: the first call, shortened to a line; the section on the
    environment has all calls."""
    if not study.commands:
        return ""
    first, *others = study.commands
    more = f" and {count(len(others), 'more call')}" if others else ""
    return f"; asked by {shorten(first, _ROOM, placeholder=' ...', break_on_hyphens=False)}{more}"


def _told(what: str, values: Sequence[str], default: str) -> Iterator[str]:
    if list(values) not in ([], [default]):
        yield f"{what} {listed(values, most=8, last=', ')}"


def _all(groups: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(value for group in groups for value in group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A subject of the first screen: one workload under one rule of scaling."""

    bought: SizeToBuy
    scaling: Scalability | None
    cell: CellFigures | None
    """The chosen cell, or else the best at the largest size measured."""
    several: bool
    """Whether the first screen is about several workloads, so that each is named."""

    @property
    def work(self) -> str:
        """The scaling with its batch: `weak, batch 8`."""
        return f"{self.bought.scaling}, batch {self.bought.batch:,}"

    @property
    def named(self) -> str:
        """The work, with the workload if there are several."""
        return f"{self.bought.workload} {self.work}" if self.several else self.work

    @property
    def short(self) -> str:
        """The scaling: `weak`; with the workload if there are several."""
        return f"{self.bought.workload} {self.bought.scaling}" if self.several else self.bought.scaling


def shown(study: StudyFigures, sizes: Sequence[SizeToBuy]) -> list[Shown]:
    """Return the subjects of all sizes to buy, in their order."""
    found, several = [], len({bought.workload for bought in sizes}) > 1
    for bought in sizes:
        scaling = scalability(study, bought.workload, bought.scaling)
        cell = study.cells.get(bought.choice.cell_id) if bought.choice else _best(study, scaling)
        found.append(Shown(bought=bought, scaling=scaling, cell=cell, several=several))
    return found


_QUESTIONS = (
    ("Size to buy", "method-size-to-buy"),
    ("Efficiency", "method-efficiency"),
    ("An epoch", "method-epoch"),
    ("Confidence", "method-confidence"),
)
_MOST_ROWS = 8
"""The number of rows that leave the trust and the next run on the first screen."""


def _answer(study: StudyFigures, one: Shown) -> Answer:
    """Make the row of one workload and rule of scaling."""
    piece = piece_of(study.curves, one.bought.workload, one.bought.scaling)
    curves = piece.curves if piece else ()
    drawing = efficiency_chart("", curves, looks(study.curves), study.devices_word, chosen=one.bought.choice)
    chart = drawing.chart if drawing else None
    # From 0, so that the rows can be compared.
    return Answer(
        work=one.bought.workload,
        how=one.work,
        told=(_size(one), _efficiency(one), _epoch(study, one), _confidence(one)),
        drawing=small(replace(chart, y_from=0.0)) if chart else None,
    )


def _size(one: Shown) -> Told:
    choice = one.bought.choice
    if choice is None:
        return Told(figure="none", lines=(one.bought.absent or "",))
    return Told(figure=choice.size, lines=(choice.how,))


def _confidence(one: Shown) -> Told:
    bought = one.bought
    if bought.choice is None or bought.confidence is None:
        return Told(figure=NOTHING)
    odds = None if bought.choice.between else bought.choice.odds
    named = [f"{whole_percent(odds[bought.choice.gpus])} of resamples name this size"] if odds else []
    return Told(figure=bought.confidence, lines=(*named, *bought.doubts))


def _efficiency(one: Shown) -> Told:
    value, against, where = _claim(one)
    if value is None:
        baseline = "the others are measured against it"
        return (
            Told(figure="baseline", lines=(baseline,))
            if one.bought.choice
            else Told(figure="not claimed", lines=(against,))
        )
    said = metric(value)
    lines = (said.note, f"{where}against {against}")
    return (
        Told(figure=said.value, lines=lines)
        if value.tells
        else Told(figure="cannot be told", lines=(_too_far_apart(one), *lines))
    )


def _epoch(study: StudyFigures, one: Shown) -> Told:
    cost = next((cost for cost in cell_costs(study) if one.cell and cost.cell.id == one.cell.cell.id), None)
    if cost is None:
        return Told(figure="unknown", lines=("no measured cell",))
    time, usd = _basis(cost)
    ends = [] if time.low is None or time.high is None else [f"{_time(time.low)} to {_time(time.high)}"]
    ends += [f"{metric(usd).ends} USD"] if usd and metric(usd).ends else []
    samples = f"{cost.epoch_samples:,}" if cost.epoch_ns and cost.epoch_samples else "a million"
    on = "" if one.bought.choice else f", {label(cost.cell)} on {cost.cell.gpus:,}"
    return Told(
        figure=_took(cost) if time.tells else "cannot be told",
        lines=(
            *([] if time.tells else [_too_far_apart(one)]),
            *([", ".join(ends)] if ends else []),
            f"{samples} samples{on}",
        ),
    )


def _beside_the_answers(study: StudyFigures, every: Sequence[Shown]) -> Iterator[str]:
    """Say what the answers rest on: the price, and the points that they were not chosen from."""
    if any(one.bought.choice for one in every):
        yield f"Size to buy: {every[0].bought.goal}."
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    prices = [
        _price_text(study, costs[one.cell.cell.id]) for one in every if one.cell and one.cell.cell.id in costs
    ]
    yield from (f"{capital(price)}." for price in dict.fromkeys(prices))
    left_out = list(dict.fromkeys(point for one in every for point in one.bought.left_out))
    yield from (f"{capital(text)}." for text in _left_out(left_out))
    if len(every) > _MOST_ROWS:
        rest = [f"{one.named}: {one.bought.text}" for one in every[_MOST_ROWS:]]
        yield f"Further: {listed(rest, most=6)}."


def _best(study: StudyFigures, scaling: Scalability | None) -> CellFigures | None:
    """The best cell at the largest size, or the fastest."""
    best = _configuration(scaling)
    wanted = best and (best.strategy, best.gpus, best.throughput)
    cells = study.cells.values()
    return next((one for one in cells if (label(one.cell), one.cell.gpus, one.throughput) == wanted), None)


def _configuration(scaling: Scalability | None) -> Configuration | None:
    if scaling is None:
        return None
    return scaling.largest.configuration if scaling.largest else scaling.fastest


def _left_out(points: Sequence[str]) -> Iterator[str]:
    """Name the points that could not be chosen, and why, with the first of each kind."""
    unproven = [point for point in points if point.endswith(f"({NOT_PROVEN})")]
    other = [point for point in points if point not in unproven]
    doubts = "that may need more samples for the same loss", "whose training was not checked or was wrong"
    for found, doubt in zip((other, unproven), doubts, strict=True):
        if found:
            yield f"not chosen from: {count(len(found), 'cell')} {doubt}, such as {found[0]}"


def _too_far_apart(one: Shown) -> str:
    """Return why a figure of a cell is not shown, and what to do."""
    runs = one.cell.runs if one.cell else ()
    disturbed = sum(run.disturbed for run in runs)
    if not disturbed:
        return "the runs are too far apart: run more"
    return f"{disturbed:,} of its {count(len(runs), 'run')} were disturbed: run again on a quiet machine"


def _claim(one: Shown) -> tuple[Metric | None, str, str]:
    """Return the efficiency, its baseline (or why it is missing), and where it is not of the chosen size."""
    choice = one.bought.choice
    if choice is not None:
        return choice.efficiency, choice.against or "", ""
    best = _configuration(one.scaling)
    if best is None:
        return None, "every figure is emulated", ""
    where = f"{best.strategy} on {best.gpus:,}"
    return best.efficiency, best.against or f"{where} has no baseline to compare with", f"{where}, "


def _basis(cost: CellCost) -> tuple[Metric, Metric | None]:
    """Return the time and the cost of an epoch, or of a million samples if its size is unknown."""
    if cost.epoch_ns:
        return cost.epoch_ns, cost.usd_per_epoch
    return cost.million_samples_ns, cost.usd_per_million_samples


def _took(cost: CellCost) -> str:
    """`3 h 20 min, 434 USD`."""
    time, usd = _basis(cost)
    return _time(time.value) + (f", {metric(usd).value}" if usd else "")


def _time(ns: float) -> str:
    """`21.2 h`, and below an hour as a duration."""
    return f"{number(ns / 3.6e12)} h" if ns >= 3.6e12 else duration(ns)


def _price_text(study: StudyFigures, cost: CellCost) -> str:
    """Describe the price with its date and range, or the reason why it is missing."""
    quote = cost.quote
    if quote is None:
        return f"no cost: {cost.absent}"
    price, day = quote.price, study_day(study.runs)
    dated = f", of {price.date}" if price.date else ""
    unit = f"USD a {device_word(cost.cell.device)} and hour"
    told = f"{price.usd_per_gpu_hour:,.2f} {unit} ({price.place or quote.origin}{dated}"
    if len(quote.alternatives) > 1:
        dollars = [other.usd_per_gpu_hour for other in quote.alternatives]
        told += f"; others {min(dollars):,.2f} to {max(dollars):,.2f}"
    warning = quote.warning(day)
    return f"{told}{f'; {warning}' if warning else ''})"


def _slow_tile(study: StudyFigures) -> Iterator[Tile]:
    """Name what is slow, by the name of its host, if anything is."""
    for _, ranks in slow_cells(study.cells.values())[:1]:
        yield Tile(
            title="Slow",
            figure=ranks.slow_names,
            lines=(f"{ranks.clause}.",),
            anchor="method-slow-rank",
            alarm=True,
        )


def _trust_tile(study: StudyFigures) -> Tile:
    proven = sum(one.proven for one in study.cells.values())
    cells, runs = len(study.cells), study.runs
    out = sum(pool.disturbed_out for pool in study.pools.values())
    disturbed = sum(run.disturbed for run in runs) + out
    dirty = sum(bool(run.environment and run.environment.code.dirty) for run in runs)
    not_run = sum(failure.outcome == NOT_RUN for failure in study.failures)
    failed = [failure for failure in study.failures if failure.runs]
    left_out = len(study.failures) - len(failed) - not_run
    lost = f", and {count(len(study.lost), 'run')} of other cells" if study.lost else ""
    skipped = sum(len(group.gpus) for group in study.skipped)
    gone = [
        f"failed: {failures_text(failed) or 'none'}{lost}",
        f"not run: {not_run:,}",
        *([f"left out: {left_out:,}"] if left_out else []),
        *([f"planned not to run: {skipped:,}"] if skipped else []),
    ]
    return Tile(
        title="Trust",
        figure=f"{cells:,} of {count(len(study.pools), 'cell')} have a figure",
        lines=(
            f"training checked: {proven:,} of {cells:,}; disturbed: {disturbed:,} of "
            f"{count(len(runs) + out, 'run')}{f' ({out:,} left out)' if out else ''}; "
            f"code with local changes: {dirty:,}",
            "; ".join(gone) + ("" if slow_cells(study.cells.values()) else "; slow hosts or ranks: none"),
            *([f"why: {study.logs_call(failed[0].cell.id)}"] if failed else []),
            *([study.review_text] if study.review_text else []),
        ),
        anchor="method-proof",
        alarm=proven < len(study.pools) or bool(disturbed or dirty),
    )
