"""The network: how long collectives take over groups of ranks with nothing else running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports import fields
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Point
from reports.page.looks import COLOURS
from reports.page.section import Block, Definition, Drawing, Drawings, Paragraph, Section, Table
from reports.table import TextTable, figures, table, words
from reports.text import capital, count, duration, moment, si, size
from results.grouping import grouped
from results.network import NETWORK_FILE, Measurement, NetworkFacts, NetworkTable
from results.notation import link_text
from results.outcome import Evidence

DEFINITION = Definition(
    "method-network",
    "Bandwidth of a collective",
    Markup(
        "As in nccl-tests: <code>algbw = array / time</code>, and <code>busbw = algbw &times; 2 (p - 1) / p"
        "</code> for an all-reduce over p ranks, <code>(p - 1) / p</code> for all-gather, reduce-scatter and "
        "all-to-all, and 1 for broadcast and send. The time is the slowest rank's, a median with its "
        "95 % interval; the array of an all-gather is what a rank ends with."
    ),
)


Rows = Sequence[Measurement]
"""The measurements of one collective over one group, the smallest array first."""


def place(rows: Rows) -> str:
    """`8 ranks inside a node`, `16 ranks on 2 nodes`."""
    nodes = rows[0].nodes
    return f"{count(rows[0].ranks, 'rank')} {'inside a node' if nodes == 1 else f'on {nodes} nodes'}"


def groups_of(known: NetworkTable) -> list[Rows]:
    """The groups of a table, by collective, then nodes and ranks."""
    order = list(dict.fromkeys(row.collective for row in known.measurements))
    keys = sorted(known.groups, key=lambda key: (order.index(key[0]), key[2], key[1]))
    return [known.groups[key] for key in keys]


def network_section(study: StudyFigures) -> Section | None:
    """Make the section; None if the study has no network table."""
    known: NetworkTable | None = study.added.get("network")
    if known is None:
        return None
    foreign = stranger(known, study)
    wrong = f"This table is of another network than the runs ({foreign}): measure theirs by bench network."
    return Section(
        anchor="network",
        title="Network by group of ranks",
        blocks=(
            Paragraph(_about(known)),
            *([Paragraph(wrong, "none")] if foreign else []),
            Drawings(tuple(_drawings(known))),
            *_remarks(known),
            Table(_table(known), f"Collectives by group and array ({NETWORK_FILE})", tools=True),
        ),
        definitions=(DEFINITION,),
    )


def _about(known: NetworkTable) -> str:
    facts, rows = known.facts, known.measurements
    where = [facts.device_name, facts.library or facts.backend, facts.network]
    if facts.link_mbit_per_s is not None:
        where.append(f"links of {link_text(facts.link_mbit_per_s)}")
    source = "Measured by bench network" if known.source == "bench" else "Read from nccl-tests"
    shared = "; emulated, as ranks share cores or nodes a host"
    emulated = shared if known.evidence is Evidence.EMULATED else ""
    return (
        f"{source}, {moment(known.measured_at)}: {', '.join(word for word in where if word)}{emulated}. "
        f"{count(len(rows), 'time')} of collectives over groups of 2 to {max(row.ranks for row in rows)} "
        f"ranks with nothing else running."
    )


def _remarks(known: NetworkTable) -> Iterator[Block]:
    """Make the remarks that prevent wrong conclusions from the bandwidths."""
    most = max(row.nodes for row in known.measurements)
    if most == 2:
        yield Paragraph(
            "A busbw over 2 nodes is not the bandwidth between nodes: two may reduce over a tree, at half "
            "the traffic of the ring over more.",
            "plain",
        )
    if known.facts.backend == "gloo" and any(
        row.collective == "reduce-scatter" for row in known.measurements
    ):
        yield Paragraph(
            "Gloo runs torch's reduce-scatter as an all-reduce: its busbw is at most half of what the wire "
            "carries.",
            "plain",
        )


def _drawings(known: NetworkTable) -> Iterator[Drawing]:
    for name, groups in grouped((group[0].collective, group) for group in groups_of(known)).items():
        lines = tuple(
            Line(name=place(group), colour=colour, points=tuple(map(_point, group)))
            for group, colour in zip(_drawn(groups), COLOURS, strict=False)
        )
        yield drawn(
            Chart(
                name=f"network-{name}",
                title=f"{capital(name)}: bus bandwidth by array",
                y_title="busbw, GB/s",
                x_title="array, MiB",
                lines=lines,
                y_axis="log",
                width=500,
                height=270,
                sizes=False,
                switchable=False,
                about="A point is one size over one group, and a row of the table below.",
            )
        )


def _drawn(groups: Sequence[Rows]) -> Sequence[Rows]:
    """At most as many groups as there are colours, evenly from the smallest to the largest."""
    most = len(COLOURS)
    if len(groups) <= most:
        return groups
    return [groups[round(at * (len(groups) - 1) / (most - 1))] for at in range(most)]


def _point(row: Measurement) -> Point:
    took = f"{size(row.array_bytes)} in {duration(row.median_s * 1e9)}"
    moved = row.busbw * row.median_s / 1e9
    return Point(
        x=row.array_bytes / 2**20,
        y=moved / row.median_s,
        low=moved / row.high_s,
        high=moved / row.low_s,
        label=f"{took}, busbw {si(row.busbw, 'B/s')}, {count(row.runs, 'sample')}",
    )


def _table(known: NetworkTable) -> TextTable:
    rows = [(group, row) for group in groups_of(known) for row in group]
    return table(
        rows,
        [
            words("collective", lambda one: one[1].collective),
            words("group", lambda one: place(one[0])),
            figures("array", lambda one: fields.size(one[1].array_bytes), anchor=DEFINITION.anchor),
            figures("time", lambda one: fields.duration(one[1].median_s * 1e9), anchor=DEFINITION.anchor),
            figures("95 % interval", lambda one: _ends(one[1]), anchor=DEFINITION.anchor),
            figures("algbw", lambda one: fields.si(one[1].algbw, "B/s"), anchor=DEFINITION.anchor),
            figures("busbw", lambda one: fields.si(one[1].busbw, "B/s"), anchor=DEFINITION.anchor),
            figures("samples", lambda one: fields.whole(one[1].runs), anchor=DEFINITION.anchor),
        ],
    )


def _ends(row: Measurement) -> Field:
    return Field(f"{duration(row.low_s * 1e9)} to {duration(row.high_s * 1e9)}")


def summary_table(known: NetworkTable) -> TextTable:
    """One row for each collective and group, with its measurement of the highest bandwidth."""
    return table(
        [(group, max(group, key=lambda row: row.busbw)) for group in groups_of(known)],
        [
            words("collective", lambda one: one[1].collective),
            words("group", lambda one: place(one[0])),
            figures("smallest array", lambda one: fields.size(one[0][0].array_bytes)),
            figures("its time", lambda one: fields.duration(one[0][0].median_s * 1e9)),
            figures("highest busbw", lambda one: fields.si(one[1].busbw, "B/s")),
            figures("at", lambda one: fields.size(one[1].array_bytes)),
        ],
    )


def stranger(known: NetworkTable, study: StudyFigures) -> str | None:
    """Why a table is of another network than all runs of a study; None if it may be of one of them."""
    found: list[str] = []
    for figure in study.cells.values():
        cell, environment = figure.cell, figure.newest.environment
        if environment is None:
            continue
        unlike = known.facts.unlike(NetworkFacts.of(environment, cell))
        if not unlike:
            return None
        found.append("; ".join(unlike))
    return min(found, key=len, default=None)
