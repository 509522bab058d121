"""The index of a site: a row a study, with its answer and what changed since the last study like it.

It is made of the blocks and the script of a study's page, so that its table is searched and sorted without a
server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import TypeVar
from urllib.parse import quote

from markupsafe import Markup

from reports import fields
from reports.analysis.outcomes import outcome_words
from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from reports.fields import Field
from reports.page.render import render_sections
from reports.page.section import Block, Definition, Paragraph, Section, Table
from reports.table import Column, figures, table, words
from reports.text import NOTHING, count, listed, percent
from results.cell import label
from results.errors import BenchError
from results.run import RunResult

NIGHTS = "nights.html"
G = TypeVar("G")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStudy:
    """A study of the site."""

    figures: StudyFigures
    page: str
    """The path of its page, relative to the index."""
    answer: str
    """The words of `answer_of`."""

    @property
    def ran(self) -> str:
        """When its newest run started, as ISO 8601; empty if nothing ran."""
        return max((run.started_at or "" for run in self._runs), default="")

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that it ran on."""
        environments = [run.environment for run in self._runs if run.environment is not None]
        return tuple(dict.fromkeys(one.device_name for one in environments))

    @property
    def _runs(self) -> list[RunResult]:
        """All runs, failed ones too."""
        return [run for pool in self.figures.pools.values() for run in (*pool.runs, *pool.lost)]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a study, or a part of it, cannot be shown."""

    why: str


def tried(make: Callable[[G], T], given: G) -> T | Failed:
    """Return what `make` gives, or why it failed."""
    try:
        return make(given)
    except (BenchError, OSError) as error:
        return Failed(str(error))
    except Exception as error:
        # One study, in whose files nobody expected what is there, must not prevent the pages of the others.
        return Failed(f"{type(error).__name__}: {error}; this is a defect of bench: report it with the study")


_Row = tuple[str, SiteStudy | Failed]
"""A study by its name."""


def _of(
    value: Callable[[SiteStudy], str], failed: Callable[[str], str] = lambda why: NOTHING
) -> Callable[[_Row], str]:
    return lambda row: failed(row[1].why) if isinstance(row[1], Failed) else value(row[1])


def site_index(studies: Sequence[SiteStudy], unreadable: Mapping[str, str], *, nights: bool) -> str:
    """Render the index. `unreadable` has the reason for each study that has no page."""
    ordered = sorted(studies, key=lambda one: one.ran)
    changes = {one.page: _change(one, ordered[:place]) for place, one in enumerate(ordered)}
    reviewed: Column[_Row] = words("review", _of(lambda one: one.figures.review_text or NOTHING))
    columns: list[Column[_Row]] = [
        Column(title="study", value=_linked, form=lambda shown: shown),
        words("ran", _of(lambda one: one.ran[:16].replace("T", " ") or NOTHING)),
        words("machine", _of(lambda one: listed(one.devices) if one.devices else NOTHING)),
        words("answer", _of(lambda one: one.answer, "it has no page: {}".format), anchor="method-answer"),
        words("change", _of(lambda one: changes[one.page]), anchor="method-change"),
        figures("cells", _cells),
        words("without a figure", _of(lambda one: _missing(one.figures))),
        *([reviewed] if any(one.figures.review.entries for one in studies) else []),
    ]
    rows: list[_Row] = [
        *((name, Failed(why)) for name, why in unreadable.items()),
        *((one.figures.name, one) for one in reversed(ordered)),
    ]
    blocks: list[Block] = [Table(table(rows, columns), "Studies, the newest first", tools=True)]
    if nights:
        link = Markup('<a href="{}">Nights, and where they changed</a>').format(NIGHTS)
        blocks.insert(0, Paragraph(link))
    section = Section(anchor="table", title="Studies", blocks=tuple(blocks), definitions=_DEFINITIONS)
    return render_sections("Studies", [section])


def _linked(row: _Row) -> Field:
    name, one = row
    return Field(name) if isinstance(one, Failed) else Field(name, link=quote(one.page))


def _cells(row: _Row) -> Field:
    return fields.NONE if isinstance(row[1], Failed) else fields.whole(len(row[1].figures.pools))


def answer_of(study: StudyFigures) -> str:
    """The first two records of the verdict on each workload, as the terminal has them."""
    found = verdict(study).workloads
    answers = []
    for one in found:
        told = "; ".join(f"{record.what}: {record.short}" for record in one.records[:2])
        if told:
            answers.append(f"{one.workload}: {told}" if len(found) > 1 else told)
    return ". ".join(answers) or NOTHING


def _missing(study: StudyFigures) -> str:
    """The cells without a figure, by outcome: `2 out of memory, 1 not run`."""
    failures = [one for one in study.failures if one.cell.id not in study.complete]
    outcomes = Counter(outcome_words(one.outcome) for one in failures)
    return ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.most_common()) or NOTHING


def _change(this: SiteStudy, earlier: Sequence[SiteStudy]) -> str:
    """The change since the last study like it; NOTHING where the two cannot be compared."""
    found = tried(partial(_compared, this), earlier)
    return NOTHING if isinstance(found, Failed) else found


def _plans_the_same(this: SiteStudy, other: SiteStudy) -> bool:
    """Whether two studies planned the same cells on the same devices, and both have figures of one."""
    shared = this.figures.cells.keys() & other.figures.cells.keys()
    same_plan = this.figures.pools.keys() == other.figures.pools.keys()
    return this.devices == other.devices and same_plan and bool(shared)


def _compared(this: SiteStudy, earlier: Sequence[SiteStudy]) -> str:
    """The largest change of a cell since the last study of the same cells on the same devices."""
    before = next((one for one in reversed(earlier) if _plans_the_same(this, one)), None)
    if before is None:
        return NOTHING
    shared = [one[1] for one in side_by_side([before.figures, this.figures]).cells]
    changed = [one for one in shared if one.change in ("faster", "slower") and one.ratio is not None]
    if not changed:
        return f"none shown in {count(len(shared), 'cell')} since {before.figures.name}"
    most = max(changed, key=lambda one: abs(log(one.ratio.value)) if one.ratio else 0.0)
    assert most.ratio is not None
    cell = most.figures.cell
    largest = f"{label(cell)} on {cell.gpus:,}: {percent(abs(1 / most.ratio.value - 1))} {most.change}"
    changed_of = f"{len(changed):,} of {count(len(shared), 'cell')} changed"
    return f"{largest}; {changed_of} since {before.figures.name}"


_DEFINITIONS = (
    Definition(
        "method-answer",
        "Answer",
        "The size to buy with its confidence, and how far the fastest configuration scales, of each "
        "workload.",
    ),
    Definition(
        "method-change",
        "Change",
        "Cells whose step time differs by the smallest effect or more from the last study before it that "
        "planned the same cells on the same devices; the largest change is named. bench report BEFORE AFTER "
        "has the conditions that differ.",
    ),
)
