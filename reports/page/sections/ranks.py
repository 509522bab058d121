"""Ranks beside each other: who is slow, whether it always is, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from markupsafe import Markup

from reports import fields
from reports.analysis.stragglers import (
    FALSE_ALARM,
    SLOW_ABOVE,
    Component,
    Stragglers,
    numbered,
    stragglers,
)
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.rank_map import MapRow, rank_maps
from reports.page.section import Block, Bullets, Definition, Drawings, Paragraph, Section, Table
from reports.page.tables import CellWords
from reports.table import Shown, TextTable, figures, table, words
from reports.text import count, duration, percent
from results.cell import Cell

_ABOUT = (
    "The compute of each rank, that is a step without any exchange, in which nobody waits for anybody. A "
    "rank that is slow in every run is persistently slow, and all others wait for it; where another one is "
    "the slowest in each step, it is random skew, which grows with the number of ranks."
)
_NAMED = 8
"""Cells with slow ranks beyond so many are in the table alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    cell: Cell
    label: str
    found: Stragglers


def ranks_section(study: StudyFigures) -> Section | None:
    """None where no cell of several ranks recorded them."""
    label = CellWords(study).label
    rows = [
        _Row(cell=cell.cell, label=label(cell.cell), found=found)
        for cell in study.cells.values()
        if (found := stragglers(cell)) is not None
    ]
    if not rows:
        return None
    return Section(
        anchor="ranks",
        title="Ranks and stragglers",
        blocks=(Paragraph(_ABOUT), *_findings(rows), *_shown(study, rows)),
        definitions=_DEFINITIONS,
    )


def _findings(rows: Sequence[_Row]) -> Iterator[Block]:
    slow = [row for row in rows if row.found.persistent]
    if slow:
        named = [f"{row.label}: {row.found.finding}" for row in slow[:_NAMED]]
        rest = len(slow) - len(named)
        more = [f"Slow ranks of {count(rest, 'more cell')} are in the table below."] if rest else []
        yield Bullets((*named, *more))
    else:
        yield Paragraph(f"No rank is persistently slow in any of {count(len(rows), 'cell')}.", "finding")


def _shown(study: StudyFigures, rows: Sequence[_Row]) -> Iterator[Block]:
    map_rows = [MapRow(label=row.label, stragglers=row.found) for row in rows]
    yield Drawings(tuple(rank_maps(map_rows, study.devices_word)))
    yield Table(_waits_table(study, rows), "Slow ranks, and what waiting for the slowest costs a step")
    yield Table(_variance_table(study, rows), "Where the steps of ranks differ", folded=True)


def _waits_table(study: StudyFigures, rows: Sequence[_Row]) -> TextTable:
    columns: list[Shown[_Row]] = [
        *CellWords(study).columns(attrgetter("cell")),
        words("persistently slow", _slow, anchor="method-slow-rank"),
        figures("slowest rank", _slowest, anchor="method-slow-rank"),
        figures("most often the slowest", _most_often, anchor="method-slowest"),
        figures("by chance", lambda row: fields.percent(1 / row.found.ranks), anchor="method-slowest"),
        figures(
            "persistent wait",
            lambda row: fields.duration(row.found.persistent_wait_ns),
            anchor="method-wait-split",
        ),
        figures("random wait", _random_wait, anchor="method-wait-split"),
        figures("steps", lambda row: fields.whole(row.found.steps), hint="without exchange, of all runs"),
        figures("runs", lambda row: fields.whole(row.found.runs), anchor="method-evidence"),
    ]
    return table(rows, columns)


def _variance_table(study: StudyFigures, rows: Sequence[_Row]) -> TextTable:
    columns: list[Shown[_Row]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("nodes", lambda row: fields.whole(len(set(row.found.nodes))), anchor="method-variance"),
        figures("node", lambda row: _component(row.found.variance.node), anchor="method-variance"),
        figures(
            "rank of the node", lambda row: _component(row.found.variance.rank), anchor="method-variance"
        ),
        figures("step", lambda row: _component(row.found.variance.step), anchor="method-variance"),
    ]
    return table(rows, columns)


def _slow(row: _Row) -> str:
    """`rank 3`; of a node that is slow as a whole its name and its ranks."""
    found = row.found
    if not found.persistent:
        return "none"
    ranks = numbered("rank", found.persistent)
    return f"{ranks} ({numbered('node', found.slow_nodes)})" if found.slow_nodes else ranks


def _slowest(row: _Row) -> Field:
    """`rank 3: +8.1 %`."""
    excess = row.found.excess
    rank = max(range(len(excess)), key=excess.__getitem__)
    return Field(f"rank {rank}: +{percent(excess[rank])}")


def _most_often(row: _Row) -> Field:
    rank = row.found.most_often_slowest
    return Field(f"rank {rank}: {percent(row.found.slowest_share[rank])}")


def _random_wait(row: _Row) -> Field:
    wait_ns = row.found.random_wait_ns
    # The means of the ranks are whole nanoseconds, and so is what they leave of a wait.
    return fields.duration(None if wait_ns is None else round(wait_ns))


def _component(component: Component | None) -> Field:
    """`1.20 ms, 34.0 %`."""
    if component is None:
        return NONE
    return Field(f"{duration(component.sd_ns)}, {percent(component.share)}", component.sd_ns, "ns")


_DEFINITIONS = (
    Definition(
        "method-slow-rank",
        "Persistently slow",
        f"A rank whose mean compute is more than {SLOW_ABOVE:.0%} above the median of the ranks in each run "
        "of the cell, on the same node, and by more than the spread of its own steps explains: a one-sided "
        "t-test over its steps, with Bonferroni's correction over the ranks. Of equal ranks whose steps are "
        f"independent, one run of {1 / FALSE_ALARM:,.0f} would have such a rank by chance; several runs must "
        "agree, which makes it rarer. A node all of whose ranks are slow is named as a node. The slowest "
        "rank is that of the highest mean, slow or not.",
    ),
    Definition(
        "method-slowest",
        "Most often the slowest",
        Markup(
            "Share of the steps without exchange in which that rank was the slowest of all. If all were "
            "equal it would be <code>1 / ranks</code> on the mean; the highest of several shares is above "
            "it by chance."
        ),
    ),
    Definition(
        "method-wait-split",
        "Persistent and random wait",
        Markup(
            "<code>persistent = largest mean compute of a rank - mean over the ranks</code>, what the mean "
            "rank loses a step because one is slower on the mean; <code>random = exposed wait of the budget "
            "- persistent</code>, at least 0, what it loses because in each step another one is the "
            "slowest. Balancing the ranks can save the first; fewer ranks to a barrier, or longer steps, "
            "the second."
        ),
    ),
    Definition(
        "method-variance",
        "Variance of node, rank and step",
        Markup(
            "Standard deviation and share of the variance of a single step's compute, as <code>mean + node "
            "+ rank of the node + step</code> by the method of moments (nested classes; Searle, Casella "
            "&amp; McCulloch, Variance Components, 1992). With n steps a rank: <code>step = mean of the "
            "ranks' variances</code>, <code>rank = variance of the ranks' means on their node - step / "
            "n</code>, <code>node</code> what the means of nodes vary beyond that; a negative estimate is "
            "0. Empty where there is one node, or one rank a node, which the node then contains."
        ),
    ),
)
