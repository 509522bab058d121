"""The headline table: one row a point of the matrix, the same on the page and on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reports import fields
from reports.analysis.communication import ON_LESS_OFF
from reports.analysis.figures import CellFigures, copies_of_runs
from reports.analysis.scaling import Efficiency
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.table import Column, TextTable, figures, table, words
from reports.text import NOTHING
from results.plan import Scaling
from results.run import NOT_PROVEN


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineRow:
    """One cell as a point of one series, or of several if its efficiency is the same in all."""

    workload: str
    strategy: str
    """The label of the exchange: `ddp + topk:0.01, ring`."""
    setting: str
    """The settings that distinguish the cell from others of the study and have no column."""
    kinds: tuple[Scaling, ...]
    figures: CellFigures
    efficiency: Efficiency

    @property
    def gpus(self) -> int:
        return self.figures.cell.gpus


def headline(study: StudyFigures) -> list[HeadlineRow]:
    """The rows, by workload, scaling, batch, strategy and size; empty if nothing succeeded."""
    rows: dict[tuple[object, ...], HeadlineRow] = {}
    points = [(curve.key, point) for curve in study.curves for point in curve.points]
    for key, point in points:
        claim = point.efficiency
        baseline = claim.baseline.figures.cell.id if claim.baseline else None
        # Points of one cell in two series with equal efficiency become one row.
        one = (point.figures.cell.id, key.label, claim.is_baseline, baseline, claim.reason)
        kinds = rows[one].kinds if one in rows else ()
        rows[one] = HeadlineRow(
            workload=key.workload,
            strategy=key.label,
            setting=study.settings[key.setting],
            kinds=tuple(dict.fromkeys((*kinds, key.kind))),
            figures=point.figures,
            efficiency=claim,
        )
    return list(rows.values())


def headline_table(study: StudyFigures) -> TextTable:
    """The headline, for the page and for the command line alike."""
    rows = headline(study)
    setting: Column[HeadlineRow] = words("setting", lambda row: row.setting)
    columns: list[Column[HeadlineRow]] = [
        words("workload", lambda row: row.workload),
        words("strategy", lambda row: row.strategy),
        *([setting] if any(row.setting for row in rows) else []),
        figures(study.devices_word, lambda row: fields.whole(row.gpus), anchor="method-sizes"),
        words("scaling", lambda row: ", ".join(row.kinds), anchor="method-scaling"),
        figures(
            "batch per replica / global", lambda row: fields.batch(row.figures.cell), anchor="method-scaling"
        ),
        figures("step time", lambda row: fields.figure(row.figures.step_ns), anchor="method-step-time"),
        figures("interval", lambda row: fields.interval(row.figures.step_ns), anchor="method-interval"),
        figures("throughput", lambda row: fields.figure(row.figures.throughput), anchor="method-throughput"),
        figures("efficiency", lambda row: efficiency_field(row.efficiency), anchor="method-efficiency"),
        words("against", lambda row: against(row.efficiency), anchor="method-efficiency"),
        figures(
            "added by the exchange",
            on_less_off,
            anchor="method-exposed",
            hint=f"share of the step: {ON_LESS_OFF}",
        ),
        words("proof", lambda row: row.figures.proof_method, anchor="method-proof"),
        words("runs", lambda row: runs_text(row.figures), anchor="method-evidence"),
    ]
    return table(rows, columns)


def efficiency_field(efficiency: Efficiency) -> Field:
    """An efficiency as text: `94.1 % (92.0 to 95.3)`, `baseline`, or the reason for none: `none:
    emulated`."""
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


def against(efficiency: Efficiency) -> str:
    """The baseline of an efficiency: `single on 1`; a dash for the baseline itself."""
    if efficiency.baseline is None or efficiency.is_baseline:
        return NOTHING
    return efficiency.baseline.short


def on_less_off(row: HeadlineRow) -> Field:
    """The time that the exchange adds to a step, as a share of the step."""
    share, copies_ns = row.figures.exposed_share, copies_of_runs(row.figures.runs)
    ends = share is not None and share.or_more(copies_ns / row.figures.step_ns.value) is not share
    return fields.figure(share, ends=True) if ends else fields.percent(share.value if share else None)
