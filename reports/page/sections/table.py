"""The full table: every planned cell in a row, with all that a reader may look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reports import fields
from reports.analysis.budget import BudgetPart
from reports.analysis.headline import efficiency_field, runs_text
from reports.analysis.outcomes import words as outcome_words
from reports.analysis.scaling import CurvePoint, Efficiency
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.rows import CellRow, cell_rows
from reports.page.section import Paragraph, Section, Table
from reports.table import Shown, TextTable, figures, table, words
from reports.text import NOTHING, number, tick
from results.label import label
from results.plan import Scaling

_ABOUT = Paragraph(
    "One row a planned cell, with or without figures. The files under Headline hold the same and more, "
    "unrounded. With scripts allowed, a click on a heading sorts, and the rows shown can be filtered, "
    "copied and downloaded."
)
_INTERVAL = "method-interval"
_BUDGET: tuple[tuple[BudgetPart, str], ...] = (
    ("input", "waiting for data and moving it"),
    ("compute", "forward, backward and update without any exchange"),
    ("transfer", "what the exchange adds to the slowest rank"),
    ("wait", "what the mean rank loses because the slowest of each step is slower"),
    ("bubble", "idle time of pipeline stages"),
    ("other", "the step less all parts"),
)


def table_section(study: StudyFigures) -> Section | None:
    """The last of the page; None where nothing is planned."""
    rows = cell_rows(study)
    if not rows:
        return None
    shown = Table(full_table(study, rows), "Every cell", tools=True)
    return Section(anchor="table", title="Full table", blocks=(_ABOUT, shown))


def full_table(study: StudyFigures, rows: list[CellRow]) -> TextTable:
    """With figures or without."""
    return table(rows, [*_cell(study), *_scaling(), *_step(), *_exchange(), *_work(), *_trust()])


def _cell(study: StudyFigures) -> list[Shown[CellRow]]:
    return [
        words("workload", lambda row: row.cell.workload),
        words("strategy", lambda row: label(row.cell)),
        words("setting", lambda row: study.settings[setting_of(row.cell)]),
        words("data", lambda row: row.cell.dataset),
        words("precision", lambda row: row.cell.precision),
        words("optimizer", lambda row: row.cell.optimizer),
        figures(study.devices_word, lambda row: fields.whole(row.cell.gpus), anchor="method-sizes"),
        figures("batch per replica / global", lambda row: fields.batch(row.cell), anchor="method-scaling"),
        words("scaling", lambda row: ", ".join(study.scalings.get(row.cell.id, ())), anchor="method-scaling"),
        words(
            "outcome", lambda row: outcome_words(row.outcome), hint="of the newest run, where none succeeded"
        ),
    ]


def _scaling() -> list[Shown[CellRow]]:
    return [
        figures("step time", _metric("step_ns"), anchor="method-step-time"),
        figures("interval", _ends("step_ns"), anchor=_INTERVAL, hint="of the step time, in its unit"),
        figures("throughput", _metric("throughput"), anchor="method-throughput"),
        figures("samples/s", _metric("samples_per_s"), anchor="method-throughput"),
        figures("weak efficiency", _efficiency("weak"), anchor="method-efficiency"),
        figures("strong efficiency", _efficiency("strong"), anchor="method-efficiency"),
        figures(
            "exchange speed-up",
            lambda row: fields.figure(row.exchange.speed_up if row.exchange else None),
            anchor="method-speed-up",
        ),
    ]


def _step() -> list[Shown[CellRow]]:
    return [
        *(figures(part, _part(part), hint=f"{what}, of a step") for part, what in _BUDGET),
        figures(
            "p50",
            lambda row: fields.duration(row.mean("step_ns_median")),
            anchor="method-slow",
            hint="half of the steps are quicker",
        ),
        figures(
            "p99",
            lambda row: fields.duration(row.mean("step_ns_p99")),
            anchor="method-slow",
            hint="99 of 100 steps are quicker",
        ),
    ]


def _exchange() -> list[Shown[CellRow]]:
    return [
        figures("exposed", _metric("exposed_ns"), anchor="method-exposed"),
        figures("exposed share", _metric("exposed_share"), anchor="method-exposed"),
        figures("payload", _newest("exchange_payload_bytes", fields.size), anchor="method-payload"),
        figures(
            "operations",
            _newest("exchange_operations", lambda count: fields.shown(count, tick)),
            anchor="method-payload",
        ),
    ]


def _work() -> list[Shown[CellRow]]:
    return [
        figures("parameters", _newest("parameters", fields.whole), anchor="method-parameters"),
        figures(
            "FLOPs a step",
            _newest("flops_per_step", lambda flops: fields.si(flops, "FLOP")),
            anchor="method-flops",
        ),
        figures(
            "MFU", lambda row: fields.percent(row.figures.mfu if row.figures else None), anchor="method-flops"
        ),
        figures("joules a step", _energy, hint="of all devices, by their counters"),
        figures(
            "peak memory, host",
            lambda row: fields.size(row.largest("rss_peak_bytes")),
            anchor="method-memory",
        ),
        figures(
            "peak memory, device",
            lambda row: fields.size(row.largest("device_allocated_peak_bytes")),
            anchor="method-memory",
        ),
        figures("set-up", _newest("setup_ns", fields.duration), anchor="method-set-up"),
    ]


def _trust() -> list[Shown[CellRow]]:
    return [
        figures(
            "first loss", _newest("loss_first", _loss), hint="mean over ranks, of the newest run's first step"
        ),
        figures(
            "last loss", _newest("loss_last", _loss), hint="mean over ranks, of the newest run's last step"
        ),
        words(
            "proof", lambda row: row.figures.proof_method if row.figures else NOTHING, anchor="method-proof"
        ),
        words(
            "runs", lambda row: runs_text(row.figures) if row.figures else NOTHING, anchor="method-evidence"
        ),
        words(
            "reason", lambda row: row.failure.reason if row.failure else NOTHING, hint="why it has no figure"
        ),
        words("cell", lambda row: row.cell.id, hint="its folder in the study"),
    ]


Show = Callable[[CellRow], Field]


def _metric(name: str) -> Show:
    return lambda row: fields.figure(getattr(row.figures, name) if row.figures else None)


def _ends(name: str) -> Show:
    return lambda row: fields.interval(getattr(row.figures, name) if row.figures else None)


def _efficiency(kind: Scaling) -> Show:
    def show(row: CellRow) -> Field:
        point: CurvePoint | None = getattr(row, kind)
        claim: Efficiency | None = point.efficiency if point else None
        return NONE if claim is None or claim.baseline is None else efficiency_field(claim)

    return show


def _part(part: BudgetPart) -> Show:
    def show(row: CellRow) -> Field:
        ns = row.budget.part_ns.get(part) if row.budget else None
        # To the nanosecond: the rest of a sum is else shown with the rounding of the machine.
        return fields.duration(None if ns is None else round(ns))

    return show


def _newest(name: str, form: Callable[[Any], Field]) -> Show:
    return lambda row: form(getattr(row.figures.newest, name) if row.figures else None)


def _energy(row: CellRow) -> Field:
    return fields.shown(row.mean("energy_j"), lambda joules: f"{number(joules)} J", "J")


def _loss(loss: float | None) -> Field:
    return fields.number(loss, digits=4)
