"""The numbers of a study as CSV, by pandas: one row a cell, or one row a run. Units stand in the names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from reports.analysis.exchange import ExchangeRow, exchange_parts
from reports.analysis.pooling import Pool
from reports.analysis.scaling import Efficiency, Point
from reports.analysis.study import StudyFigures
from results.cell import Cell
from results.outcome import Outcome
from results.run import PHASES, RunResult
from results.statistics import Metric

Row = dict[str, object]


def cells_csv(study: StudyFigures) -> str:
    """Every planned cell, with or without figures; an empty field is unknown."""
    efficiencies, exchanges = _efficiencies(study), _exchanges(study)
    outcomes = {failure.cell.id: failure for failure in study.failures}
    rows = []
    for cell_id, pool in study.pools.items():
        failure = outcomes.get(cell_id)
        rows.append(
            {
                "study": study.name,
                **_cell_columns(pool.cell),
                "scaling": " ".join(study.scalings.get(cell_id, ())),
                "outcome": failure.outcome if failure else Outcome.OK,
                "reason": failure.reason if failure else None,
                "runs": len(pool.runs),
                "runs_planned": pool.planned,
                "runs_lost": len(pool.lost),
                "runs_left_out": len(pool.left_out),
                **_figure_columns(study, cell_id),
                **efficiencies.get(cell_id, {}),
                **exchanges.get(cell_id, {}),
            }
        )
    return _csv(rows)


def runs_csv(study: StudyFigures) -> str:
    """Every run of every planned cell, oldest first, and whether the cell's figure counts it."""
    rows = [
        _run_columns(study, pool.cell, run, counted=run in pool.runs)
        for pool in study.pools.values()
        for run in _all_runs(pool)
    ]
    return _csv(rows)


def _all_runs(pool: Pool) -> list[RunResult]:
    left_out = [left.run for left in pool.left_out]
    return sorted((*pool.runs, *left_out, *pool.lost), key=lambda run: run.run_id)


def _csv(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    # dtype object: an integer column with a gap must not turn into floats.
    return pd.DataFrame(rows, columns=columns, dtype=object).to_csv(index=False, lineterminator="\n")


def _cell_columns(cell: Cell) -> Row:
    return {
        "cell_id": cell.id,
        "workload": cell.workload,
        "dataset": cell.dataset,
        "strategy": cell.strategy,
        "compression": cell.compression,
        "collective": cell.collective,
        "node_size": cell.node_size,
        "link_mbit_per_s": cell.link_mbit_per_s,
        "device": cell.device,
        "backend": cell.backend,
        "gpus": cell.gpus,
        "precision": cell.precision,
        "optimizer": cell.optimizer,
        "micro_batch": cell.micro_batch,
        "accumulation": cell.accumulation,
        "batch_per_replica": cell.micro_batch * cell.accumulation,
        "global_batch": cell.global_batch,
        "seed": cell.seed,
    }


def _figure_columns(study: StudyFigures, cell_id: str) -> Row:
    figures = study.cells.get(cell_id)
    if figures is None:
        return {}
    newest = figures.newest
    return {
        "evidence": figures.evidence,
        "disturbed": figures.disturbed,
        "proof": figures.proof_method,
        "fingerprint": newest.fingerprint,
        **_metric_columns("step_ns", figures.step_ns),
        "interval": figures.step_ns.interval,
        **_metric_columns("samples_per_s", figures.samples_per_s),
        **_metric_columns("units_per_s", figures.units_per_s),
        "unit": newest.unit,
        **{f"{phase}_ns": figures.phase_ns.get(phase) for phase in (*PHASES, "other")},
        **_metric_columns("exposed_ns", figures.exposed_ns),
        **_metric_columns("exposed_share", figures.exposed_share),
        "exposed_absent": figures.exposed_absent,
        "exchange_payload_bytes": newest.exchange_payload_bytes,
        "exchange_operations": newest.exchange_operations,
        "parameters": newest.parameters,
        "flops_per_step": newest.flops_per_step,
        "rss_peak_bytes": max((run.rss_peak_bytes or 0 for run in figures.runs), default=0) or None,
        "rss_over_idle_bytes": max((run.rss_over_idle_bytes or 0 for run in figures.runs), default=0) or None,
        "device_allocated_peak_bytes": newest.device_allocated_peak_bytes,
    }


def _efficiencies(study: StudyFigures) -> dict[str, Row]:
    """Efficiency columns by cell: a cell of a weak and a strong series has those of both."""
    columns: dict[str, Row] = {}
    for curve in study.curves:
        for point in curve.points:
            row = columns.setdefault(point.figures.cell.id, {})
            row |= _point_columns(f"efficiency_{curve.key.kind}", point)
    return columns


def _point_columns(name: str, point: Point) -> Row:
    return {
        **_efficiency_columns(f"{name}_single", point.single),
        **_efficiency_columns(f"{name}_own", point.own),
    }


def _efficiency_columns(name: str, efficiency: Efficiency) -> Row:
    return {
        **_metric_columns(name, efficiency.metric),
        f"{name}_baseline": efficiency.baseline.figures.cell.id if efficiency.baseline else None,
        f"{name}_absent": efficiency.reason,
    }


def _exchanges(study: StudyFigures) -> dict[str, Row]:
    """Columns by cell against the dense exchange of the same point; none where there is one exchange."""
    return {row.cell.id: _exchange_columns(row) for part in exchange_parts(study) for row in part.rows}


def _exchange_columns(row: ExchangeRow) -> Row:
    return {
        "dense_cell_id": row.dense.cell.id if row.dense else None,
        **_metric_columns("speed_up", row.speed_up),
        "speed_up_verdict": row.verdict,
        "speed_up_absent": row.reason,
        "gradient_bytes_per_exposed_s": row.gradients_per_exposed_s,
    }


def _metric_columns(name: str, metric: Metric | None) -> Row:
    if metric is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high}


def _run_columns(study: StudyFigures, cell: Cell, run: RunResult, *, counted: bool) -> Row:
    environment = run.environment
    return {
        "study": study.name,
        **_cell_columns(cell),
        "run_id": run.run_id,
        "launch_id": run.launch_id,
        "repeat": run.repeat,
        "counted": counted,
        "outcome": run.outcome,
        "reason": run.reason,
        "evidence": run.evidence,
        "started_at": run.started_at,
        "hosts": " ".join(run.hosts),
        "nodes": environment.nodes if environment else None,
        "fingerprint": run.fingerprint,
        "commit": environment.code.commit if environment else None,
        "code_hash": environment.code.code_hash if environment else None,
        "torch": environment.torch if environment else None,
        "device_name": environment.device_name if environment else None,
        "ranks_expected": run.ranks_expected,
        "ranks_present": run.ranks_present,
        **_step_columns(run),
        **_outcome_columns(run),
    }


def _step_columns(run: RunResult) -> Row:
    return {
        "steps": run.steps,
        "warmup_steps": run.warmup_steps,
        "warmup_steady": run.warmup_steady,
        "stop": run.stop,
        **_metric_columns("step_ns", run.step_ns),
        "step_ns_median": run.step_ns_median,
        "step_ns_p10": run.step_ns_p10,
        "step_ns_p90": run.step_ns_p90,
        "step_ns_p99": run.step_ns_p99,
        "slow_steps": run.slow_steps,
        **{f"{phase}_ns": run.phase_ns.get(phase) for phase in (*PHASES, "other")},
        **_metric_columns("exposed_ns", run.exposed_ns),
    }


def _outcome_columns(run: RunResult) -> Row:
    return {
        "samples_per_s": run.samples_per_s,
        "units_per_s": run.units_per_s,
        "unit": run.unit,
        "flops_per_s": run.flops_per_s,
        "mfu": run.mfu,
        "exchange_payload_bytes": run.exchange_payload_bytes,
        "exchange_operations": run.exchange_operations,
        "rss_peak_bytes": run.rss_peak_bytes,
        "rss_over_idle_bytes": run.rss_over_idle_bytes,
        "device_allocated_peak_bytes": run.device_allocated_peak_bytes,
        "loss_first": run.loss_first,
        "loss_last": run.loss_last,
        "proof": run.proof.method if run.proof else None,
        "replicas_agree": run.replicas_agree,
        "foreign_cpu_cores": run.foreign_cpu_cores,
        "disturbed": run.disturbed,
        "setup_ns": run.setup_ns,
        "warnings": _joined(run.warnings),
        "absent": _joined(f"{key}: {why}" for key, why in sorted(run.absent.items())),
    }


def _joined(texts: Iterable[str]) -> str | None:
    return " | ".join(texts) or None
