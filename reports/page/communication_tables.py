"""The tables of communication: its time, what it carries, and each kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from reports import fields
from reports.analysis.communication import ON_LESS_OFF, CellCommunication
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.tables import CellWords
from reports.table import Shown, TextTable, figures, table, words
from reports.text import NOTHING, metric
from results.budget import OperationSummary
from results.cell import Cell

Cells = Sequence[CellCommunication]
_HIDDEN = "1 - (exposed transfer + exposed wait) / in flight, between 0 and 1"


def time_table(study: StudyFigures, cells: Cells) -> TextTable:
    """The three times of communication, how they were found, and what hides."""
    columns: list[Shown[CellCommunication]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("in flight", lambda row: fields.duration(row.total_ns), anchor="method-in-flight"),
        figures(
            "exposed transfer", lambda row: fields.figure(row.transfer_ns), anchor="method-part-transfer"
        ),
        figures("exposed wait", lambda row: fields.figure(row.wait_ns), anchor="method-part-wait"),
        words("method", lambda row: row.method or NOTHING, anchor="method-exposed-methods"),
        figures("hidden", _hidden, anchor="method-overlap", hint=_HIDDEN),
        figures(
            "over compute",
            lambda row: fields.percent(row.over_compute),
            anchor="method-over-compute",
            hint="exposed transfer over the compute of the budget",
        ),
        figures("blocked", lambda row: fields.duration(row.mean("blocked_ns")), anchor="method-blocked"),
        figures(
            "on less off",
            lambda row: fields.figure(row.exposed_ns),
            anchor="method-exposed",
            hint=ON_LESS_OFF,
        ),
        figures(
            "share of step",
            lambda row: fields.figure(row.figures.exposed_share),
            anchor="method-exposed",
            hint="on less off over step time",
        ),
        words("interval of the share", _share_interval, anchor="method-interval"),
    ]
    return table(cells, columns)


def traffic_table(study: StudyFigures, cells: Cells) -> TextTable:
    """What is carried, and at which bandwidth."""
    columns: list[Shown[CellCommunication]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("payload a step and rank", _payload, anchor="method-payload"),
        figures("operations a step", _of_newest("exchange_operations"), anchor="method-payload"),
        figures("buckets a step", _of_newest("exchange_buckets"), anchor="method-buckets"),
        figures("of them early", _of_newest("exchange_buckets_early"), anchor="method-buckets"),
        figures("an operation", lambda row: fields.size(row.bytes_per_operation), anchor="method-payload"),
        figures(
            "transfer inside", lambda row: fields.duration(row.mean("transfer_ns")), anchor="method-inside"
        ),
        figures("wait inside", lambda row: fields.duration(row.mean("wait_ns")), anchor="method-inside"),
        figures("bandwidth", lambda row: fields.si(row.bus_bytes_per_s, "B/s"), anchor="method-bandwidth"),
        figures(
            "peak",
            _peak,
            anchor="method-link-peak",
            hint="of plain all-reduces alone: the median and range of the launches on this network and size",
        ),
        figures(
            "of the peak",
            lambda row: fields.percent(row.bandwidth_share),
            anchor="method-link-peak",
            hint="bandwidth over peak; empty where the launches' peaks differ more than twofold",
        ),
    ]
    return table(cells, columns)


@dataclass(frozen=True, slots=True)
class _Kind:
    cell: Cell
    operation: OperationSummary


def operations_table(study: StudyFigures, cells: Cells) -> TextTable:
    """One row a kind of operation and size of group."""
    rows = [_Kind(one.cell, operation) for one in cells for operation in one.operations]
    columns: list[Shown[_Kind]] = [
        *CellWords(study).columns(attrgetter("cell")),
        words("operation", lambda row: row.operation.name, hint="as the process group calls it"),
        figures(
            "ranks of the group", lambda row: fields.whole(row.operation.group_size), hint="that take part"
        ),
        figures("a step", lambda row: fields.number(row.operation.count), anchor="method-payload"),
        figures(
            "payload a step", lambda row: fields.size(row.operation.payload_bytes), anchor="method-payload"
        ),
        figures("duration", lambda row: fields.duration(row.operation.duration_ns), anchor="method-inside"),
        figures("transfer", lambda row: fields.duration(row.operation.transfer_ns), anchor="method-inside"),
        figures("wait", lambda row: fields.duration(row.operation.wait_ns), anchor="method-inside"),
    ]
    return table(rows, columns)


def _share_interval(row: CellCommunication) -> str:
    if row.figures.exposed_share is None:
        return row.figures.exposed_absent or NOTHING
    return metric(row.figures.exposed_share).note


def _hidden(row: CellCommunication) -> Field:
    """`84.0 %`; where more is seen than was in flight, 0 and why."""
    if row.overlap is not None and row.contended:
        return Field("0.0 %, slows compute", 0.0, "ratio")
    return fields.percent(row.overlap)


def _payload(row: CellCommunication) -> Field:
    return fields.size(row.figures.newest.exchange_payload_bytes)


def _peak(row: CellCommunication) -> Field:
    if row.peak is None:
        return fields.si(None, "B/s")
    return Field(row.peak.text, row.peak.bytes_per_s, "B/s")


def _of_newest(name: str) -> Callable[[CellCommunication], Field]:
    """A counter of the newest run."""
    return lambda row: fields.shown(getattr(row.figures.newest, name), "{:,.4g}".format)
