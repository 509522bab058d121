"""The tables of cells, and the headline: one row a point of the matrix, the same on the page and on the
command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from reports import fields
from reports.analysis.communication import ON_LESS_OFF
from reports.analysis.figures import CellFigures, OfCell, copies_of_runs
from reports.analysis.scaling import Efficiency
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.table import Column, TextTable, figures, table, words
from reports.text import NOTHING
from results.cell import label
from results.plan import Scaling
from results.run import NOT_PROVEN

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FiguresRow(OfCell, Generic[T]):
    """A cell in a table, and what only this table says of it."""

    efficiency: Efficiency | None = None
    setting: str = ""
    """The settings that distinguish the cell from others of the study and have no column."""
    of: T

    @property
    def against(self) -> str:
        """The baseline of its efficiency: `single on 1`; a dash for the baseline itself."""
        return (self.efficiency and self.efficiency.against) or NOTHING


HeadlineRow = FiguresRow[tuple[Scaling, ...]]
"""One cell as a point of one series, or of several if its efficiency is the same in all: of their kinds."""


def cells_table(
    rows: Sequence[FiguresRow[T]], sizes: str, columns: Sequence[str | Column[FiguresRow[T]]]
) -> TextTable:
    """A table of cells: columns that several tables have, by their titles (of the size: `size`), and its own.
    Settings are shown if a row has one."""
    every: list[Column[FiguresRow[T]]] = [
        words("workload", lambda row: row.cell.workload),
        words("strategy", lambda row: label(row.cell)),
        words("setting", lambda row: row.setting),
        figures("batch per replica / global", lambda row: fields.batch(row.cell), anchor="method-scaling"),
        figures("step time", lambda row: fields.figure(row.figures.step_ns), anchor="method-step-time"),
        figures("interval", lambda row: fields.interval(row.figures.step_ns), anchor="method-interval"),
        figures("throughput", lambda row: fields.figure(row.figures.throughput), anchor="method-throughput"),
        figures("efficiency", lambda row: efficiency_field(row.efficiency), anchor="method-efficiency"),
        words("runs", lambda row: runs_text(row.figures), anchor="method-evidence"),
    ]
    shared = {one.title: one for one in every}
    shared["size"] = figures(sizes, lambda row: fields.whole(row.cell.gpus), anchor="method-sizes")
    shown = [one for one in columns if one != "setting" or any(row.setting for row in rows)]
    return table(rows, [shared[one] if isinstance(one, str) else one for one in shown])


def headline(study: StudyFigures) -> list[HeadlineRow]:
    """The rows, by workload, scaling, batch, strategy and size; empty if nothing succeeded."""
    rows: dict[tuple[object, ...], HeadlineRow] = {}
    for key, point in [(curve.key, point) for curve in study.curves for point in curve.points]:
        claim = point.efficiency
        baseline = claim.baseline.cell.id if claim.baseline else None
        # Points of one cell in two series with equal efficiency become one row.
        one = (point.cell.id, claim.is_baseline, baseline, claim.reason)
        kinds = (*(rows[one].of if one in rows else ()), key.kind)
        rows[one] = FiguresRow(
            figures=point.figures,
            efficiency=claim,
            setting=study.settings[key.setting],
            of=tuple(dict.fromkeys(kinds)),
        )
    return list(rows.values())


def headline_table(study: StudyFigures) -> TextTable:
    """The headline, for the page and for the command line alike."""
    hint = f"share of the step: {ON_LESS_OFF}"
    columns: list[str | Column[HeadlineRow]] = [
        *("workload", "strategy", "setting", "size"),
        words("scaling", lambda row: ", ".join(row.of), anchor="method-scaling"),
        *("batch per replica / global", "step time", "interval", "throughput", "efficiency"),
        words("against", lambda row: row.against, anchor="method-efficiency"),
        figures("added by the exchange", on_less_off, anchor="method-exposed", hint=hint),
        words("proof", lambda row: row.figures.proof_method, anchor="method-proof"),
        "runs",
    ]
    return cells_table(headline(study), study.devices_word, columns)


def efficiency_field(efficiency: Efficiency | None) -> Field:
    """An efficiency as text: `94.1 % (92.0 to 95.3)`, `baseline`, or the reason for none: `none:
    emulated`."""
    if efficiency is None:
        return NONE
    if efficiency.is_baseline:
        return Field("baseline")
    if efficiency.metric is None:
        return Field(f"none: {efficiency.no_claim.short if efficiency.no_claim else ''}")
    figure = fields.figure(efficiency.metric, ends=True)
    return replace(figure, text=f"{figure.text}, super-linear") if efficiency.super_linear else figure


def runs_text(figures: CellFigures) -> str:
    """`3 measured`, `2 of 3 measured, 1 disturbed left out`, `3 emulated, disturbed`."""
    there, planned = len(figures.runs), figures.pool.planned
    share = f"{there}" if there >= planned else f"{there} of {planned}"
    out = figures.pool.disturbed_out
    disturbed = f", {out} disturbed left out" if out else ", disturbed" if figures.disturbed else ""
    unproven = f", {NOT_PROVEN}" if figures.pool.unproven else ""
    return f"{share} {figures.evidence}{disturbed}{unproven}"


def on_less_off(row: HeadlineRow) -> Field:
    """The time that the exchange adds to a step, as a share of the step."""
    share, copies_ns = row.figures.exposed_share, copies_of_runs(row.figures.runs)
    ends = share is not None and share.or_more(copies_ns / row.figures.step_ns.value) is not share
    return fields.figure(share, ends=True) if ends else fields.percent(share.value if share else None)
