"""Failures and skips: points without a figure, grouped by rule, each reason once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from reports import fields
from reports.analysis.outcomes import SkippedSizes, outcome_words, reason_of
from reports.analysis.study import StudyFigures
from reports.page.section import Block, Paragraph, Section, Table
from reports.table import Column, figures, table, words
from reports.text import count, listed, moment
from results.cell import label
from results.grouping import grouped
from results.plan import Plan, Skip
from results.store import utc_now

_NAMED = 6


_Group = tuple[str, int, Sequence[str], str]
"""The points that one rule or reason left without a figure: outcome, their number, their names, reason."""


def running_section(study: StudyFigures) -> Section | None:
    """Make the section on what runs, is left and failed; None for a study that does not run."""
    if not study.running:
        return None
    states = Counter(row["state"] for row in study.running)
    counts = ", ".join(f"{number:,} {state}" for state, number in states.items())
    left = [row for row in study.running if row["state"] != "done"]
    shown = table(left, [words(head, itemgetter(head)) for head in study.running[0]])
    note = (
        f"As of {moment(utc_now())}. The page loads itself again every 10 seconds, unless text is selected "
        f"or a field is in use, until the study has ended."
    )
    found = Paragraph(f"{count(len(study.running), 'cell')}: {counts}.", "finding")
    blocks = (found, Paragraph(note, "plain"), Table(shown, "Cells that are not done"))
    return Section(anchor="running", title="Running", blocks=blocks)


def outcomes_section(study: StudyFigures) -> Section:
    groups = [*_without_figure(study), *_skipped(study)]
    every = "" if study.complete else "every planned cell has a figure, and "
    found: Block = Paragraph(f"nothing is missing: {every}no run failed", "absent")
    if groups:
        columns: list[Column[_Group]] = [
            words("what", lambda row: row[0]),
            figures("points", lambda row: fields.whole(row[1]), hint="cells, runs or points of the matrix"),
            words("where", lambda row: listed(row[2], most=_NAMED, last="; ")),
            words("reason", lambda row: row[3]),
        ]
        found = Table(table(groups, columns), "What has no figure, or lost runs: one row a reason")
    blocks = [found]
    if study.strangers:
        strangers = listed(study.strangers)
        blocks.append(
            Paragraph(f"Results of cells that are not in a plan are not shown: {strangers}.", "plain")
        )
    return Section(anchor="outcomes", title="Failures and skips", blocks=tuple(blocks))


def _without_figure(study: StudyFigures) -> Iterator[_Group]:
    """Cells that failed, and runs that were lost.

    A run that trained its cell to the end has no step time, but it is not a failure.
    """
    several = len({pool.cell.workload for pool in study.pools.values()}) > 1
    lost = ((f"a run: {outcome_words(run.outcome)}", reason_of(run), cell) for cell, run in study.lost)
    failed = ((outcome_words(one.outcome), one.reason, one.cell) for one in study.failures)
    groups = grouped(
        ((what, reason), f"{f'{cell.workload}, ' * several}{label(cell)} on {cell.gpus:,}")
        for what, reason, cell in (*failed, *lost)
        if cell.id not in study.complete
    )
    for (what, reason), names in groups.items():
        counted = [f"{name} ({n:,} times)" if n > 1 else name for name, n in Counter(names).items()]
        yield what, len(names), counted, reason


def _skipped(study: StudyFigures) -> Iterator[_Group]:
    """A row for each reason, over all workloads: `gpt-nano: single on 2, 4; weak 8`."""
    every = skipped_points(study.skipped, global_batches(study.plans))
    for reason, those in grouped((one.reason, one) for one in every).items():
        names = []
        for one in those:
            sizes = listed([f"{gpus:,}" for gpus in one.gpus], most=9, last=", ")
            strategies = listed(one.strategies, most=_NAMED, last=", ")
            names.append(f"{one.workload}: {strategies} on {sizes}; {', '.join(one.series)}")
        points = sum(len(one.gpus) * len(one.strategies) * len(one.series) for one in those)
        yield "skipped", points, names, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPoints:
    """Points of one workload left out for one reason: every strategy, in every series, at every size."""

    workload: str
    strategies: tuple[str, ...]
    series: tuple[str, ...]
    """Scaling and its batch: `weak 8`, per replica; `strong 32`, global; `strong, batch size 8` where no plan
    has a cell of such a series."""
    gpus: tuple[int, ...]
    reason: str
    """The reason, without the strategy's name if that is its subject, so that it is equal for all
    strategies."""


def global_batches(plans: Sequence[Plan]) -> dict[tuple[str, int], int]:
    """The global batch of strong series, by workload and `--batch-size`, the two facts that a skip has."""
    return {
        (series.workload, series.batch_size): series.global_batch
        for plan in plans
        for series in plan.series
        if series.global_batch is not None
    }


def skipped_points(
    skipped: Sequence[SkippedSizes], batches: Mapping[tuple[str, int], int]
) -> list[SkippedPoints]:
    """Skipped points, joined by series and then by strategy if all other fields are the same."""
    series = grouped(
        (
            (group.skip.workload, group.gpus, group.skip.predicate or group.skip.reason, label(group.skip)),
            _series(group.skip, batches),
        )
        for group in skipped
    )
    alike = grouped(
        ((workload, gpus, reason, tuple(dict.fromkeys(names))), strategy)
        for (workload, gpus, reason, strategy), names in series.items()
    )
    return [
        SkippedPoints(workload=workload, strategies=tuple(those), series=names, gpus=gpus, reason=reason)
        for (workload, gpus, reason, names), those in alike.items()
    ]


def _series(skip: Skip, batches: Mapping[tuple[str, int], int]) -> str:
    if skip.scaling == "weak":
        return f"weak {skip.batch_size:,}"
    batch = batches.get((skip.workload, skip.batch_size))
    return f"strong, batch size {skip.batch_size:,}" if batch is None else f"strong {batch:,}"
