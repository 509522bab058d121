"""The tables of sections. The headline is in `reports.analysis`: the command line prints it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from reports import fields
from reports.analysis.exchange import ExchangePart, ExchangeRow
from reports.analysis.figures import CellFigures
from reports.analysis.headline import efficiency_field, runs_text
from reports.analysis.outcomes import Failure, LostRun, reason_of
from reports.analysis.outcomes import words as outcome_words
from reports.analysis.scaling import Curve, CurvePoint, Efficiency, speed_up
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.table import Row, Shown, TextTable, figures, table, words
from reports.text import NOTHING, batch, number
from results.cell import Cell
from results.label import exchange_label, label
from results.run import PHASES
from results.statistics import Metric


@dataclass(frozen=True, slots=True)
class CellWords:
    """The columns that say which cell a row is of."""

    study: StudyFigures

    def columns(self, cell: Callable[[Row], Cell]) -> list[Shown[Row]]:
        """Workload, strategy, size and batch, and the setting if the study has several."""
        plain: list[Shown[Row]] = [
            words("workload", lambda row: cell(row).workload),
            words("strategy", lambda row: label(cell(row))),
            figures(self.study.devices_word, lambda row: fields.whole(cell(row).gpus), anchor="method-sizes"),
            figures(
                "batch per replica / global", lambda row: fields.batch(cell(row)), anchor="method-scaling"
            ),
        ]
        if any(self.study.settings.values()):
            plain.insert(2, words("setting", lambda row: self.study.settings[setting_of(cell(row))]))
        return plain

    def label(self, cell: Cell) -> str:
        """A cell in a word, for the row of a drawing."""
        setting = self.study.settings[setting_of(cell)]
        return f"{label(cell)} x {cell.gpus:,}, {batch(cell)}{f', {setting}' if setting else ''}"


def scaling_table(study: StudyFigures, curves: tuple[Curve, ...]) -> TextTable:
    """The points of some curves, with both efficiencies."""
    points = [(curve, point) for curve in curves for point in curve.points]
    columns: list[Shown[tuple[Curve, CurvePoint]]] = [
        words("strategy", lambda row: row[0].key.label),
        figures(study.devices_word, lambda row: fields.whole(row[1].gpus), anchor="method-sizes"),
        figures("step time", lambda row: fields.figure(row[1].figures.step_ns), anchor="method-step-time"),
        figures("interval", lambda row: fields.interval(row[1].figures.step_ns), anchor="method-interval"),
        figures(
            "throughput",
            lambda row: fields.figure(row[1].figures.throughput, ends=True),
            anchor="method-throughput",
        ),
        figures("speed-up", lambda row: _times(speed_up(row[1])), anchor="method-scaling-speed-up"),
        figures("vs single device", lambda row: _efficiency(row[1].single), anchor="method-efficiency"),
        figures("vs own smallest", lambda row: _efficiency(row[1].own), anchor="method-efficiency"),
        words("runs", lambda row: runs_text(row[1].figures), anchor="method-evidence"),
    ]
    return table(points, columns)


def no_claim_reasons(curves: tuple[Curve, ...]) -> list[str]:
    """Why points of some curves have no efficiency: each reason once, with its points."""
    points: dict[str, dict[str, None]] = {}
    for curve in curves:
        for point in curve.points:
            for claim in (point.single, point.own):
                if claim.baseline is not None and claim.reason is not None:
                    points.setdefault(claim.reason, {})[f"{curve.key.label} on {point.gpus:,}"] = None
    return [f"{', '.join(those)}: {reason}" for reason, those in points.items()]


def phases_table(study: StudyFigures) -> TextTable:
    """Step time and its parts, the mean over runs, ranks and steps."""
    parts = [
        figures(phase, _phase(phase), anchor="method-other" if phase == "other" else "method-phases")
        for phase in (*PHASES, "other")
    ]
    columns: list[Shown[CellFigures]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("step time", lambda row: fields.figure(row.step_ns), anchor="method-step-time"),
        *parts,
    ]
    return table(study.cells.values(), columns)


def spread_table(study: StudyFigures) -> TextTable:
    """How much single steps differ within the runs."""
    columns: list[Shown[CellFigures]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("p10", _quantile("step_ns_p10"), anchor="method-slow"),
        figures("median", _quantile("step_ns_median"), anchor="method-slow"),
        figures("p90", _quantile("step_ns_p90"), anchor="method-slow"),
        figures("p99", _quantile("step_ns_p99"), anchor="method-slow"),
        figures("slow steps", _slow_steps, anchor="method-slow"),
    ]
    return table(study.cells.values(), columns)


def exchange_table(study: StudyFigures, part: ExchangePart) -> TextTable:
    """Each way to exchange gradients beside the dense one, point by point."""
    columns: list[Shown[ExchangeRow]] = [
        words("exchange", lambda row: row.name, hint="strategy + compressor, collective"),
        figures(study.devices_word, lambda row: fields.whole(row.cell.gpus), anchor="method-sizes"),
        figures("batch per replica / global", lambda row: fields.batch(row.cell), anchor="method-scaling"),
        words("scaling", lambda row: ", ".join(study.scalings.get(row.cell.id, ()))),
        figures("step time", lambda row: fields.figure(row.figures.step_ns), anchor="method-step-time"),
        figures("interval", lambda row: fields.interval(row.figures.step_ns), anchor="method-interval"),
        figures("exposed a step", lambda row: fields.figure(row.figures.exposed_ns), anchor="method-exposed"),
        figures(
            "payload a step and rank",
            lambda row: fields.size(row.figures.newest.exchange_payload_bytes),
            anchor="method-payload",
        ),
        figures(
            "gradients over exposed time",
            lambda row: fields.si(row.gradients_per_exposed_s, "B/s"),
            anchor="method-gradient-rate",
            hint="4 bytes a parameter, however few are sent, per exposed second: not the network's bandwidth",
        ),
        figures(
            "speed-up",
            lambda row: fields.figure(row.speed_up, ends=True),
            anchor="method-speed-up",
            hint="step time of the dense exchange over this one: above 1 it is faster",
        ),
        words(
            "against", _dense, anchor="method-speed-up", hint="the dense exchange that it is compared with"
        ),
        words(
            "verdict",
            lambda row: row.verdict or NOTHING,
            anchor="method-speed-up",
            hint="faster or slower where the runs of the two are apart, no gain where they are not",
        ),
        words("runs", lambda row: runs_text(row.figures), anchor="method-evidence"),
    ]
    if len({study.settings[setting_of(row.cell)] for row in part.rows}) > 1:
        columns.insert(1, words("setting", lambda row: study.settings[setting_of(row.cell)]))
    return table(part.rows, columns)


def exchange_reasons(part: ExchangePart) -> list[str]:
    """Why ways to exchange have no speed-up that can be judged: each reason once, with its points."""
    points: dict[str, list[str]] = {}
    for row in part.rows:
        if row.reason is not None:
            points.setdefault(row.reason, []).append(f"{row.name} on {row.cell.gpus:,}")
    return [f"{', '.join(dict.fromkeys(those))}: {reason}" for reason, those in points.items()]


def failures_table(study: StudyFigures) -> TextTable:
    """Cells without a figure."""
    columns: list[Shown[Failure]] = [
        *CellWords(study).columns(attrgetter("cell")),
        words("outcome", lambda row: outcome_words(row.outcome)),
        figures("runs tried", lambda row: fields.whole(row.runs), hint="however they ended"),
        words("reason", lambda row: row.reason),
    ]
    return table(study.failures, columns)


def lost_table(study: StudyFigures) -> TextTable:
    """Failed runs of cells that have a figure."""
    columns: list[Shown[LostRun]] = [
        *CellWords(study).columns(attrgetter("cell")),
        words("run", lambda row: row.run.run_id),
        words("outcome", lambda row: outcome_words(row.run.outcome)),
        words("reason", lambda row: reason_of(row.run)),
    ]
    return table(study.lost, columns)


def _times(figure: Metric | None) -> Field:
    return fields.shown(figure.value if figure else None, lambda value: f"{number(value)} x", "ratio")


def _efficiency(efficiency: Efficiency) -> Field:
    return NONE if efficiency.baseline is None else efficiency_field(efficiency)


def _phase(phase: str) -> Callable[[CellFigures], Field]:
    return lambda row: fields.duration(row.phase_ns.get(phase))


def _quantile(name: str) -> Callable[[CellFigures], Field]:
    return lambda row: fields.duration(_mean([getattr(run, name) for run in row.runs]))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _slow_steps(row: CellFigures) -> Field:
    slow = sum(run.slow_steps or 0 for run in row.runs)
    return Field(f"{slow:,} of {sum(run.steps for run in row.runs):,}", slow, "steps")


def _dense(row: ExchangeRow) -> str:
    return NOTHING if row.dense is None else exchange_label(row.dense.cell)
