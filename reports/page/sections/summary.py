"""The first screen: what was asked and where it ran, four tiles, one drawing, and what to run next.

Three sentences follow the drawing: where growing stops paying, why, and how sure that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten

from markupsafe import Markup

from reports.analysis.budget import RESIDUAL_ABOVE
from reports.analysis.exchange import FEWEST_RUNS
from reports.analysis.knee import PAYS_FROM
from reports.analysis.next_run import next_run
from reports.analysis.scaling import piece_of
from reports.analysis.series import told_settings
from reports.analysis.size_to_buy import sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.made_from import made_from
from reports.analysis.verdict.scalability import LITTLE, reach_of
from reports.analysis.verdict.sentences import cause
from reports.analysis.verdict.verdict import verdict
from reports.page.looks import looks
from reports.page.section import (
    Beside,
    Block,
    Bullets,
    Command,
    Definition,
    Paragraph,
    Points,
    Section,
    Tiles,
)
from reports.page.sections.scaling import efficiency_chart
from reports.page.tiles import Shown, shown, tiles
from reports.text import capital, count, listed, percent
from results.cell import DEFAULT_COLLECTIVE, SYNTHETIC, UNCOMPRESSED
from results.notation import NO_LINK
from results.version import VERSION

NOTHING_SUCCEEDED = Markup(
    "Nothing succeeded: no cell of this study has a figure. The reasons are under "
    '<a href="#outcomes">Failures and skips</a>.'
)


def summary_section(study: StudyFigures) -> Section:
    """The first thing on the page."""
    every = shown(study, sizes_to_buy(study))
    return Section(
        anchor="summary", title="In short", blocks=tuple(_blocks(study, every)), definitions=_DEFINITIONS
    )


def _blocks(study: StudyFigures, every: Sequence[Shown]) -> Iterator[Block]:
    yield Paragraph(asked_text(study), "finding")
    yield Paragraph(f"{ran(study)}; page by bench {VERSION}{called(study)}", "plain")
    yield Tiles(tiles(study, every))
    then = next_run(study)
    command = [Command(f"Run next {then.what}, since {then.why}:", then.command)] if then else []
    if not every:
        yield Paragraph(NOTHING_SUCCEEDED, "none")
        yield from command
        return
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
    yield Beside(drawing, title, (points, *command, Bullets(verdict(study).sentences, "folded")))


def _sentences(study: StudyFigures, first: Shown) -> Iterator[tuple[str, str]]:
    """Say where growing stops paying, why, and how sure that is.

    The subject is the chosen strategy; else plain data parallelism, or the best.
    """
    bought, scaling = first.bought, first.scaling
    reach = (scaling.dense or scaling.largest) if scaling else None
    if bought.choice is not None:
        reach = reach_of(study, bought.workload, bought.scaling, bought.choice.strategy)
    if reach is None:
        emulated = scaling is None or scaling.fastest is None
        why = "Every figure is emulated" if emulated else "One size alone was measured"
        yield "Where it stops paying", f"{why}, so that nothing is said of scaling."
    else:
        who = reach.configuration.strategy
        yield "Where it stops paying", f"{capital(bought.scaling)} scaling with {who}: {reach.knee_text}."
        yield "Why", f"{capital(cause(reach))}."
    made = made_from(study, bought.workload).sentence or "Every figure is emulated: nothing is claimed."
    if bought.confidence is not None:
        because = f": {'; '.join(bought.doubts)}" if bought.doubts else ""
        made = f"{capital(bought.confidence)} confidence in the size{because}. {made}"
    yield "How sure", made


_DEFINITIONS = (
    Definition(
        "method-size-to-buy",
        "Size to buy",
        Markup(
            "Chosen from measured, proven cells that train as plain data parallelism does; by default the "
            "knee: growing from n to m devices pays while each added one brings at least {pays} of what each "
            "brought before, <code>(X(m) / X(n) - 1) / (m / n - 1)</code> with X in samples a second. An "
            "interval must lie below as a whole. <code>bench report --goal</code> chooses by throughput, "
            "cost, time or efficiency. Ranks on a CPU and emulated sizes are not bought."
        ).format(pays=percent(PAYS_FROM)),
    ),
    Definition(
        "method-verdict",
        "Why",
        Markup(
            "Lost: <code>step time - C(n0) (W(n) / n) / (W(n0) / n0)</code>, with C the compute of the "
            "baseline's budget and W the samples of a step, at the first size beyond the knee, else at the "
            "largest. Below {little} of a step nothing is blamed; nor where the parts miss the step by more "
            "than {rest} of it and by more than half of the part to be named. A part is named alone if it is "
            "the largest in every run, by a one-sided Student's t at 95 %; else all that may be the largest "
            "are named. Fewer than {runs} runs make no more than a seeming best."
        ).format(little=percent(LITTLE), rest=percent(RESIDUAL_ABOVE), runs=FEWEST_RUNS),
    ),
)


_ROOM = 60
"""Characters of a command that the first screen has room for."""


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
    repeats = max((request.repeats for request in requests), default=0)
    span = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}" if sizes else "no"
    workloads = listed(_all(request.workloads for request in requests), most=6)
    return (
        f"{workloads} on {span} {study.devices_word}, {' and '.join(_scalings(study)) or 'as planned'}, by "
        f"{listed(strategies, most=12)}{''.join(f'; {one}' for one in more)}. "
        f"{count(len(study.pools), 'cell')}, {count(repeats, 'run')} each."
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
    """`; asked by bench matrix --gpus 1..2`: the first call, as far as a line has room; the environment has
    all."""
    if not study.commands:
        return ""
    first, *others = study.commands
    more = f" and {count(len(others), 'more call')}" if others else ""
    return f"; asked by {shorten(first, _ROOM, placeholder=' ...', break_on_hyphens=False)}{more}"


def _scalings(study: StudyFigures) -> Iterator[str]:
    """`weak (8 samples a replica)`."""
    for kind, of in (("weak", "a replica"), ("strong", "in all")):
        batches = sorted({curve.key.constant_batch for curve in study.curves if curve.key.kind == kind})
        if batches:
            yield f"{kind} ({listed([f'{batch:,}' for batch in batches])} samples {of})"


def _told(what: str, values: Sequence[str], default: str) -> Iterator[str]:
    if list(values) not in ([], [default]):
        yield f"{what} {listed(values, most=8, last=', ')}"


def _all(groups: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(value for group in groups for value in group))
