"""The headline table: one row a point of the matrix, the same on the page and on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from reports.analysis.communication import ON_LESS_OFF
from reports.analysis.figures import CellFigures
from reports.analysis.scaling import Curve, Efficiency, Point
from reports.analysis.study import StudyFigures
from reports.table import Shown, TextTable, figures, table, words
from reports.text import NOTHING, metric, percent
from results.plan import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineRow:
    """One cell as a point of one series, or of several if its efficiency is the same in all."""

    workload: str
    strategy: str
    """With what else says how gradients travel: `ddp + topk:0.01, ring`."""
    setting: str
    """What sets the cell apart from others of the study beyond the columns of the table."""
    kinds: tuple[Scaling, ...]
    figures: CellFigures
    efficiency: Efficiency

    @property
    def gpus(self) -> int:
        return self.figures.cell.gpus

    @property
    def batch_per_replica(self) -> int:
        return self.figures.cell.batch_per_replica

    @property
    def global_batch(self) -> int:
        return self.figures.cell.global_batch


def headline(study: StudyFigures) -> list[HeadlineRow]:
    """The rows, by workload, scaling, batch, strategy and size; empty if nothing succeeded."""
    rows: dict[tuple[object, ...], HeadlineRow] = {}
    for curve in study.curves:
        for point in curve.points:
            row = _row(study, curve, point)
            key = (point.figures.cell.id, row.strategy, _claim(row.efficiency))
            seen = rows.get(key)
            rows[key] = row if seen is None else _joined(seen, row)
    return list(rows.values())


def headline_table(study: StudyFigures) -> TextTable:
    """The headline as texts, for the page and for the command line alike."""
    rows = headline(study)
    columns = [
        column
        for column in _columns(study.devices_word)
        if column[0].title != "setting" or any(row.setting for row in rows)
    ]
    return table(rows, columns)


def efficiency_text(efficiency: Efficiency) -> str:
    """`94.1 % (92.0 to 95.3)`, `baseline`, or why there is none: `none: emulated`."""
    if efficiency.is_baseline:
        return "baseline"
    if efficiency.metric is None:
        return f"none: {efficiency.no_claim.short if efficiency.no_claim else ''}"
    text = metric(efficiency.metric)
    ends = f" ({text.ends})" if text.ends else ""
    return f"{text.value}{ends}{', super-linear' if efficiency.super_linear else ''}"


def runs_text(figures: CellFigures) -> str:
    """`3 measured`, `2 of 3 measured`, `3 emulated, disturbed`."""
    there, planned = len(figures.runs), figures.pool.planned
    share = f"{there}" if there >= planned else f"{there} of {planned}"
    return f"{share} {figures.evidence}{', disturbed' if figures.disturbed else ''}"


def _columns(devices_word: str) -> list[Shown[HeadlineRow]]:
    return [
        words("workload", lambda row: row.workload),
        words("strategy", lambda row: row.strategy),
        words("setting", lambda row: row.setting),
        figures(devices_word, lambda row: f"{row.gpus:,}", anchor="method-sizes"),
        words("scaling", lambda row: ", ".join(row.kinds), anchor="method-scaling"),
        figures("batch per replica / global", _batch, anchor="method-scaling"),
        figures("step time", lambda row: metric(row.figures.step_ns).value, anchor="method-step-time"),
        figures("interval", lambda row: metric(row.figures.step_ns).note, anchor="method-interval"),
        figures("throughput", lambda row: metric(row.figures.throughput).value, anchor="method-throughput"),
        figures("efficiency", lambda row: efficiency_text(row.efficiency), anchor="method-efficiency"),
        words("against", lambda row: _against(row.efficiency), anchor="method-efficiency"),
        figures("exposed", _exposed, anchor="method-exposed", hint=f"share of the step: {ON_LESS_OFF}"),
        words("proof", lambda row: row.figures.proof_method, anchor="method-proof"),
        words("runs", lambda row: runs_text(row.figures), anchor="method-evidence"),
    ]


def _batch(row: HeadlineRow) -> str:
    return f"{row.batch_per_replica:,} / {row.global_batch:,}"


def _against(efficiency: Efficiency) -> str:
    if efficiency.baseline is None or efficiency.is_baseline:
        return NOTHING
    return efficiency.baseline.short


def _exposed(row: HeadlineRow) -> str:
    share = row.figures.exposed_share
    return NOTHING if share is None else percent(share.value)


def _row(study: StudyFigures, curve: Curve, point: Point) -> HeadlineRow:
    return HeadlineRow(
        workload=curve.key.workload,
        strategy=curve.key.label,
        setting=study.settings[curve.key.setting],
        kinds=(curve.key.kind,),
        figures=point.figures,
        efficiency=point.efficiency,
    )


def _joined(seen: HeadlineRow, other: HeadlineRow) -> HeadlineRow:
    kinds = tuple(dict.fromkeys((*seen.kinds, *other.kinds)))
    return HeadlineRow(
        workload=seen.workload,
        strategy=seen.strategy,
        setting=seen.setting,
        kinds=kinds,
        figures=seen.figures,
        efficiency=seen.efficiency,
    )


def _claim(efficiency: Efficiency) -> tuple[object, ...]:
    """What must be equal for two series' rows of one cell to be one row."""
    against = efficiency.baseline.figures.cell.id if efficiency.baseline else None
    return efficiency.is_baseline, against, efficiency.reason
