"""The nodes that a preflight has examined, and the runs of a study that were on slow or wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.features.preflight.verdict import PREFLIGHT, PREFLIGHT_FILE, UNITS, NodeVerdict, Verdict
from harness.reporting.reading import Reading
from reports import fields
from reports.analysis.study import StudyFigures
from reports.page.looks import cell_label
from reports.page.section import Block, Definition, Paragraph, Section, Table
from reports.table import Column, TextTable, figures, table, words
from reports.text import count, moment, percent
from results.errors import SchemaError
from results.job_store import JobStore
from results.launch import Launch
from results.store import Study

DEFINITION = Definition(
    "method-preflight",
    "Figures of a preflight",
    "FLOP/s of matrix products on the slowest device of the node when it is hot, its free memory before any "
    "work, and the bus bandwidth of an all-reduce inside of the node and of its best pair with another node.",
)


class Preflighted(NamedTuple):
    """A verdict, as a study sees it."""

    verdict: Verdict
    marked: Mapping[str, frozenset[str]]
    """The ids of the study's runs on each node that the verdict names, by its name."""


def read_preflight(reading: Reading) -> Preflighted | None:
    """The verdict in the folder of the study, or in the folder around it; None under a redaction, too."""
    root = reading.study.root.resolve()
    path = next((one for one in (root, root.parent) if (one / PREFLIGHT_FILE).exists()), None)
    if path is None or reading.redact:
        return None
    try:
        verdict = PREFLIGHT.read(path / PREFLIGHT_FILE)
    except SchemaError as error:
        # It is no file of this study.
        reading.console.warn(f"no run is marked by the preflight: {error}")
        return None
    marked = {} if path == root else _marked(reading, verdict)
    if marked:
        runs = count(len(frozenset().union(*marked.values())), "run")
        reading.console.warn(f"{runs} used {', '.join(marked)}, which a preflight found slow or wrong")
    return Preflighted(verdict, marked)


def _marked(reading: Reading, verdict: Verdict) -> Mapping[str, frozenset[str]]:
    """A run was on a node if its job says so, or if it was on the node's host and this has one node."""
    launches = {one.launch_id: node_names(reading.study, one) for one in reading.study.launches()}
    runs = [run for pool in reading.figures.pools.values() for run in pool.every]
    used = {run.run_id: {*run.hosts, *launches.get(run.launch_id, ())} for run in runs}
    hosts = [node.host for node in verdict.nodes]
    marked = {}
    for node in verdict.named:
        names = {node.name, *([node.host] if hosts.count(node.host) == 1 else [])}
        marked[node.name] = frozenset(run for run, own in used.items() if own & names)
    return {name: ids for name, ids in marked.items() if ids}


def node_names(study: Study, launch: Launch) -> Sequence[str]:
    """The scheduler's names of a launch's nodes in the last start of its job; empty if it had no job."""
    starts = JobStore(study.root).starts(launch.job_id) if launch.job_id else ()
    return starts[-1].nodes[: launch.placement.nodes] if starts else ()


def node_table(verdict: Verdict) -> TextTable:
    """A row a node."""

    def column(name: str) -> Column[NodeVerdict]:
        unit, anchor = UNITS.get(name, "B/s"), DEFINITION.anchor
        return figures(name, lambda node: fields.si(node.figures.get(name), unit), anchor=anchor)

    columns: list[Column[NodeVerdict]] = [
        words("node", lambda node: node.name),
        *map(column, dict.fromkeys(name for node in verdict.nodes for name in node.figures)),
        words("verdict", lambda node: count(len(node.faults), "fault") if node.faults else "fine"),
    ]
    return table(verdict.nodes, columns)


def preflight_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study that used no node which a preflight names."""
    found: Preflighted | None = study.added.get("preflight")
    if found is None or not (found.marked or study.kind.name == "preflight"):
        return None
    verdict, blocks = found.verdict, list[Block]()
    for node in verdict.named:
        runs = found.marked.get(node.name, frozenset())
        pools = [pool for pool in study.pools.values() if runs & {run.run_id for run in pool.every}]
        used = f"; {count(len(runs), 'run')} used it: " if runs else ""
        cells = "; ".join(cell_label(study, pool.cell) for pool in pools)
        blocks.append(Paragraph(f"{node.name}: {'; '.join(node.faults)}{used}{cells}.", "finding"))
    blocks += [Paragraph(note, "plain") for note in verdict.notes]
    caption = f"Nodes, examined {moment(verdict.measured_at)}: slow is below {percent(verdict.slow_below)}"
    blocks.append(Table(node_table(verdict), f"{caption} of the median"))
    title = "Slow or wrong nodes, by a preflight"
    return Section(anchor="preflight", title=title, blocks=tuple(blocks), definitions=(DEFINITION,))
