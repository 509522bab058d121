"""Failures and skips: what has no figure, grouped by rule, each reason once.

Points that were never to run take few rows, whatever the matrix leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reports import fields
from reports.analysis.outcomes import SkippedSizes, outcome_words, reason_of
from reports.analysis.study import StudyFigures
from reports.page.section import Block, Paragraph, Section, Table
from reports.table import Column, TextTable, figures, table, words
from reports.text import listed
from results.cell import Cell
from results.label import label
from results.plan import Plan, Skip

_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """All that one rule, or one reason, left without a figure."""

    what: str
    """`out of memory`, `skipped`, `a run crashed`."""
    points: int
    names: tuple[str, ...]
    reason: str


def outcomes_section(study: StudyFigures) -> Section:
    groups = [*_failed(study), *_lost(study), *_skipped(study)]
    blocks: list[Block] = []
    if groups:
        blocks.append(Table(_table(groups), "What has no figure, or lost runs: one row a reason"))
    else:
        every = (
            "Nothing is missing: no run failed."
            if study.training
            else "Nothing is missing: every planned cell has a figure, and no run failed."
        )
        blocks.append(Paragraph(every, "plain"))
    if study.strangers:
        strangers = listed(study.strangers)
        blocks.append(
            Paragraph(f"Results of cells that stand in no plan are not shown: {strangers}.", "plain")
        )
    return Section(anchor="outcomes", title="Failures and skips", blocks=tuple(blocks))


def _table(groups: Sequence[_Group]) -> TextTable:
    columns: list[Column[_Group]] = [
        words("what", lambda row: row.what),
        figures("points", lambda row: fields.whole(row.points), hint="cells, runs or points of the matrix"),
        words("where", lambda row: listed(row.names, most=_NAMED, last="; ")),
        words("reason", lambda row: row.reason),
    ]
    return table(groups, columns)


def _missing(study: StudyFigures, cell: Cell) -> bool:
    """A run that trained its cell to the end has no step time, and nothing is missing."""
    trained = study.training.get(cell.id)
    return trained is None or trained.log.ended is None


def _failed(study: StudyFigures) -> Iterator[_Group]:
    missing = (one for one in study.failures if _missing(study, one.cell))
    found = ((outcome_words(one.outcome), one.reason, one.cell) for one in missing)
    yield from _grouped(study, found, "")


def _lost(study: StudyFigures) -> Iterator[_Group]:
    missing = (one for one in study.lost if _missing(study, one.cell))
    found = ((outcome_words(one.run.outcome), reason_of(one.run), one.cell) for one in missing)
    yield from _grouped(study, found, "a run: ")


def _grouped(study: StudyFigures, found: Iterable[tuple[str, str, Cell]], before: str) -> Iterator[_Group]:
    several = len({pool.cell.workload for pool in study.pools.values()}) > 1
    groups: dict[tuple[str, str], list[str]] = {}
    for what, reason, cell in found:
        workload = f"{cell.workload}, " if several else ""
        groups.setdefault((what, reason), []).append(f"{workload}{label(cell)} on {cell.gpus:,}")
    for (what, reason), names in groups.items():
        yield _Group(what=f"{before}{what}", points=len(names), names=_counted(names), reason=reason)


def _counted(names: Sequence[str]) -> tuple[str, ...]:
    """`ddp on 2 (3 times)`."""
    times = {name: names.count(name) for name in names}
    return tuple(f"{name} ({n:,} times)" if n > 1 else name for name, n in times.items())


def _skipped(study: StudyFigures) -> Iterator[_Group]:
    """Each reason once, over all workloads."""
    groups: dict[str, list[SkippedPoints]] = {}
    for one in skipped_points(study.skipped, global_batches(study.plans)):
        groups.setdefault(one.reason, []).append(one)
    for reason, those in groups.items():
        points = sum(len(one.gpus) * len(one.strategies) * len(one.series) for one in those)
        yield _Group(what="skipped", points=points, names=tuple(map(_where, those)), reason=reason)


def _where(one: SkippedPoints) -> str:
    """`gpt-nano: single on 2, 4; weak 8`."""
    sizes = listed([f"{gpus:,}" for gpus in one.gpus], most=9, last=", ")
    strategies = listed(one.strategies, most=_NAMED, last=", ")
    return f"{one.workload}: {strategies} on {sizes}; {', '.join(one.series)}"


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
    """Without the strategy's name where it is the subject of the sentence: equal for all."""


def global_batches(plans: Sequence[Plan]) -> dict[tuple[str, int], int]:
    """Of strong series, by workload and `--batch-size`: a skip has no more than these of its series."""
    return {
        (series.workload, series.batch_size): series.global_batch
        for plan in plans
        for series in plan.series
        if series.global_batch is not None
    }


def skipped_points(
    skipped: Sequence[SkippedSizes], batches: Mapping[tuple[str, int], int]
) -> list[SkippedPoints]:
    """Joined by series and then by strategy, and only where all else is the same: no row says too much."""
    series: dict[SkippedPoints, list[str]] = {}
    for group in skipped:
        skip = group.skip
        alike = SkippedPoints(
            workload=skip.workload,
            strategies=(label(skip),),
            series=(),
            gpus=group.gpus,
            reason=skip.predicate or skip.reason,
        )
        series.setdefault(alike, []).append(_series(skip, batches))
    strategies: dict[SkippedPoints, list[str]] = {}
    for one, found in series.items():
        alike = replace(one, strategies=(), series=tuple(dict.fromkeys(found)))
        strategies.setdefault(alike, []).extend(one.strategies)
    return [replace(one, strategies=tuple(found)) for one, found in strategies.items()]


def _series(skip: Skip, batches: Mapping[tuple[str, int], int]) -> str:
    if skip.scaling == "weak":
        return f"weak {skip.batch_size:,}"
    batch = batches.get((skip.workload, skip.batch_size))
    return f"strong, batch size {skip.batch_size:,}" if batch is None else f"strong {batch:,}"
