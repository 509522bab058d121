"""The nights that a history has of the study's cells, and where they changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from reports import fields
from reports.analysis.study import StudyFigures
from reports.gate.change_points import BEFORE, RECENT, SMALLEST, THRESHOLD
from reports.gate.reduce import subject_key
from reports.gate.text import step_sentence
from reports.gate.trends import Trend, trends
from reports.page.night_curve import night_curve
from reports.page.section import Block, Bullets, Definition, Drawings, Paragraph, Section, Table
from reports.table import TextTable, figures, table, words
from reports.text import percent
from results.baseline import Baseline

_ABOUT = (
    "The step times of this study's cells in the nights of the history, a series for each cell and machine. "
    "A change is named with the nights and commits on either side, and with what changed in the environment "
    "between them."
)
_DRAWN = 8
"""Series that are drawn, those with a change first; the table has all."""


def history_section(study: StudyFigures) -> Section | None:
    """None where no history is given, or none of its series has two nights of a cell of this study."""
    keys = {subject_key(pool.cell) for pool in study.pools.values()}
    nights = {machine: [_own(night, keys) for night in found] for machine, found in study.nights.items()}
    found = [trend for trend in trends(nights, ("step_time",)) if len(trend.nights) > 1]
    if not found:
        return None
    found.sort(key=lambda trend: not trend.steps)
    return Section(
        anchor="history",
        title="Nights",
        blocks=(Paragraph(_ABOUT), *_blocks(found)),
        definitions=_DEFINITIONS,
    )


def _own(night: Baseline, keys: set[str]) -> Baseline:
    subjects = tuple(subject for subject in night.subjects if subject.key in keys)
    return msgspec.structs.replace(night, subjects=subjects)


def _blocks(found: Sequence[Trend]) -> Iterator[Block]:
    sentences = tuple(f"{step_sentence(trend, step)}." for trend in found for step in trend.steps)
    if sentences:
        yield Bullets(sentences)
    else:
        yield Paragraph(f"No change in {len(found):,} series.", "finding")
    yield Drawings(
        tuple(night_curve(trend, name=f"nights-{number}") for number, trend in enumerate(found[:_DRAWN]))
    )
    yield Table(_table(found), "Step time, first and last night of each series")


def _table(found: Sequence[Trend]) -> TextTable:
    return table(
        found,
        [
            words("machine", lambda trend: trend.machine),
            words("cell", lambda trend: trend.label),
            figures("nights", lambda trend: fields.whole(len(trend.nights)), anchor="method-night"),
            words("from", lambda trend: trend.nights[0].measured_at[:10]),
            words("to", lambda trend: trend.nights[-1].measured_at[:10]),
            figures("first", lambda trend: fields.duration(trend.nights[0].value), anchor="method-night"),
            figures("last", lambda trend: fields.duration(trend.nights[-1].value), anchor="method-night"),
            figures("changes", lambda trend: fields.whole(len(trend.steps)), anchor="method-change-point"),
        ],
    )


_DEFINITIONS = (
    Definition(
        "method-night",
        "Night",
        "One entry of bench history add. Its step time is the median over its runs of the cell; nights are "
        "ordered by when they were measured.",
    ),
    Definition(
        "method-change-point",
        "Change in a history",
        f"The median of the last {RECENT[0]} to {RECENT[-1]} nights is compared with that of up to {BEFORE} "
        f"nights before them; a change is at least {THRESHOLD} standard errors of the series' own noise, and "
        f"at least {percent(SMALLEST)}. It is searched again with every night, and what was said of a night "
        "never changes.",
    ),
)
