"""Summarise a network table: each group at its smallest array and at its highest bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports import fields
from reports.analysis.study import StudyFigures
from reports.table import TextTable, figures, table, words
from reports.text import count
from results.network import Measurement, NetworkFacts, NetworkTable


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The measurements of one collective over one group, the smallest array first."""

    rows: Sequence[Measurement]

    @property
    def first(self) -> Measurement:
        return self.rows[0]

    @property
    def best(self) -> Measurement:
        """The measurement with the highest bandwidth."""
        return max(self.rows, key=lambda row: row.busbw)

    @property
    def place(self) -> str:
        """`8 ranks inside a node`, `16 ranks on 2 nodes`."""
        row = self.first
        where = "inside a node" if row.nodes == 1 else f"on {row.nodes} nodes"
        return f"{count(row.ranks, 'rank')} {where}"


def groups_of(known: NetworkTable) -> list[GroupRows]:
    """The groups of a table, by collective, then nodes and ranks."""
    order = list(dict.fromkeys(row.collective for row in known.measurements))
    keys = sorted(known.groups, key=lambda key: (order.index(key[0]), key[2], key[1]))
    return [GroupRows(known.groups[key]) for key in keys]


def summary_table(known: NetworkTable) -> TextTable:
    """One row for each collective and group."""
    return table(
        groups_of(known),
        [
            words("collective", lambda group: group.first.collective),
            words("group", lambda group: group.place),
            figures("smallest array", lambda group: fields.size(group.first.array_bytes)),
            figures("its time", lambda group: fields.duration(group.first.median_s * 1e9)),
            figures("highest busbw", lambda group: fields.si(group.best.busbw, "B/s")),
            figures("at", lambda group: fields.size(group.best.array_bytes)),
        ],
    )


def stranger(known: NetworkTable, study: StudyFigures) -> str | None:
    """Why a table is of another network than all runs of a study; None if it may be of one of them."""
    found: list[str] = []
    for figure in study.cells.values():
        cell, environment = figure.cell, figure.newest.environment
        if environment is None:
            continue
        unlike = known.facts.unlike(NetworkFacts.of(environment, cell.backend, cell.link_mbit_per_s))
        if not unlike:
            return None
        found.append("; ".join(unlike))
    return min(found, key=len, default=None)
