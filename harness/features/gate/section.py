"""The nights of the study's cells in a history, and the changes between them.

A drawing of a series shows its figures, their levels, and the nights between which a level changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from harness.features.gate.metrics import TIMED
from harness.features.gate.nights import nights_in
from harness.features.gate.records.baseline import Baseline
from harness.features.gate.reduce import seedless, subject_key
from harness.features.gate.text import commits_text, figure_text, odds_text, step_sentence
from harness.features.gate.trends import (
    BEFORE,
    RANGE_ODDS,
    RECENT,
    SMALLEST,
    THRESHOLD,
    Night,
    Step,
    Trend,
    trends,
)
from harness.terminal.console import Console
from reports import fields
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Point, Rule
from reports.page.section import Block, Bullets, Definition, Drawing, Drawings, Paragraph, Section, Table
from reports.table import Column, figures, table, words
from reports.text import capital, percent

_ABOUT = (
    "The step times of cells in the nights of the history, a series for each cell and machine; "
    "other metrics ({others}) where one changed. A change is named with the range of nights and commits in "
    "which it lies and the odds of that, and with what changed in the environment between them."
)
_OTHERS = ("exposed", "wait", "peak_memory", "startup", "loss")
"""Metrics that are searched too and shown where they changed. Throughput changes with step time."""
_DRAWN = 8
"""The number of series that are drawn, beginning with changed ones; the table has all."""


def history_section(study: StudyFigures) -> Section | None:
    """Make the section; None without a history that has two nights of a cell of this study."""
    cells = (pool.cell for pool in study.pools.values())
    keys = {subject_key(seedless(cell) if study.kind.losses else cell) for cell in cells}
    return nights_section(
        {
            machine: [
                msgspec.structs.replace(
                    night, subjects=tuple(one for one in night.subjects if one.key in keys)
                )
                for night in found
            ]
            for machine, found in (study.added.get("nights") or {}).items()
        }
    )


def nights_of(folder: Path, console: Console) -> Section | None:
    """The section of all nights in a folder; None if no series has two."""
    return nights_section(nights_in(folder, console))


def nights_section(nights: Mapping[str, Sequence[Baseline]]) -> Section | None:
    """The nights by machine; None if no series has two."""
    searched = [trend for trend in trends(nights, ("step_time", *_OTHERS)) if len(trend.nights) > 1]
    found = [trend for trend in searched if trend.metric.name == "step_time" or trend.steps]
    if not found:
        return None
    found.sort(key=lambda trend: not trend.steps)
    about = _ABOUT.format(others=", ".join(TIMED[name].title for name in _OTHERS))
    return Section(
        anchor="history",
        title="Nights",
        blocks=(Paragraph(about), *_blocks(found, searched=len(searched))),
        definitions=_DEFINITIONS,
    )


def _blocks(found: Sequence[Trend], *, searched: int) -> Iterator[Block]:
    sentences = tuple(f"{step_sentence(trend, step)}." for trend in found for step in trend.steps)
    if sentences:
        yield Bullets(sentences)
    else:
        yield Paragraph(f"No change in {searched:,} series.", "finding")
    yield Drawings(
        tuple(night_curve(trend, name=f"nights-{number}") for number, trend in enumerate(found[:_DRAWN]))
    )
    for metric in dict.fromkeys(trend.metric for trend in found):
        title = f"{capital(metric.title)}, first and last night of each series"
        columns: list[Column[Trend]] = [
            words("machine", lambda trend: trend.machine),
            words("cell", lambda trend: trend.label),
            figures("nights", lambda trend: fields.whole(len(trend.nights)), anchor="method-night"),
            words("from", lambda trend: trend.nights[0].measured_at[:10]),
            words("to", lambda trend: trend.nights[-1].measured_at[:10]),
            figures("first", lambda trend: _figure(trend, trend.nights[0]), anchor="method-night"),
            figures("last", lambda trend: _figure(trend, trend.nights[-1]), anchor="method-night"),
            figures("changes", lambda trend: fields.whole(len(trend.steps)), anchor="method-change-point"),
        ]
        yield Table(table([trend for trend in found if trend.metric is metric], columns), title)


def _figure(trend: Trend, night: Night) -> fields.Field:
    forms = {"ns": fields.duration, "bytes": fields.size}
    return forms.get(trend.metric.unit, fields.number)(night.value)


_DEFINITIONS = (
    Definition(
        "method-night",
        "Night",
        "One entry of bench history add. Its figure is the median over its runs of the cell; nights are "
        "ordered by when they were measured.",
    ),
    Definition(
        "method-change-point",
        "Change in a history",
        f"The median of the last {RECENT[0]} to {RECENT[-1]} nights is compared with the median of up to "
        f"{BEFORE} nights before them; a change is at least {THRESHOLD} standard errors of the series' "
        f"noise, and at least {percent(SMALLEST)}. The search is repeated with every night, and never "
        "changes what it found on an earlier night. The change lies in its range of commits with the odds "
        f"named, at least {percent(RANGE_ODDS)}: by the likelihood of each place, if the noise is normal and "
        "a night in twenty is disturbed. Series of a machine that changed at places that fit together are "
        "pooled, and have one range.",
    ),
)


def _rule_text(step: Step) -> str:
    if step.drift:
        return "drift"
    return f"{commits_text(step.range, 7).partition(' ')[2]}, {odds_text(step.range.odds)}"


_SCALES = {"ns": (1e6, ", ms"), "bytes": (2**20, ", MiB")}
"""The unit of the axis, in units of the metric, and its name."""


def night_curve(trend: Trend, *, name: str) -> Drawing:
    """The nights of one series. `name` is unique on the page.

    The new level begins at the likeliest night. The cause lies in the range of commits that the rule names.
    """
    scale, unit = _SCALES.get(trend.metric.unit, (1, ""))
    title = trend.metric.title
    moments = [datetime.fromisoformat(night.measured_at) for night in trend.nights]
    days = [(moment - moments[0]).total_seconds() / 86400 for moment in moments]
    starts = [0, *(trend.nights.index(step.after) for step in trend.steps), len(days)]
    levels = tuple(
        Line(
            name="level",
            colour="muted",
            points=tuple(
                Point(x=days[at], y=median(night.value for night in trend.nights[first:end]) / scale)
                for at in (first, end - 1)
            ),
            plain=True,
            pale=True,
        )
        for first, end in pairwise(starts)
    )
    marks = tuple(
        Point(
            x=day,
            y=night.value / scale,
            label=f"{night.measured_at[:10]}, {(night.commit or 'unknown')[:7]}: "
            f"{figure_text(trend.metric, night.value)}",
        )
        for day, night in zip(days, trend.nights, strict=True)
    )
    rules = tuple(
        Rule(text=_rule_text(step), x=days[first])
        for step, first in zip(trend.steps, starts[1:], strict=False)
    )
    changes = " ".join(f"{step_sentence(trend, step)}." for step in trend.steps)
    return drawn(
        Chart(
            name=name,
            title=f"{capital(title)} of each night, {trend.label}, {trend.machine}",
            y_title=f"{title}{unit}",
            x_title=f"days since {trend.nights[0].measured_at[:10]}",
            lines=(*levels, Line(name="nights", colour="blue", points=marks)),
            rules=rules,
            x_axis="linear",
            height=220,
            note=changes or "No change.",
            sizes=False,
            switchable=False,
        )
    )
