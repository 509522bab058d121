"""The columns of the exported tables: what each is called, of which type it is, and where its value stands.

The columns of a table are the same for every study, but for those of telemetry: what a device tells differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from reports.page.rows import CellRow, RankRow, RunRow, at
from results.plan import Scaling
from results.run import PHASES, RunResult

Dtype = Literal["string", "Int64", "Float64", "boolean"]
"""pandas' nullable types: a gap in a column of integers does not turn them into floats."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `value` is given a row."""

    name: str
    dtype: Dtype
    value: Callable[[object], object]


def _column(name: str, dtype: Dtype, path: str | None) -> Column:
    return Column(name, dtype, partial(at, path or name))


def text(name: str, path: str | None = None) -> Column:
    return _column(name, "string", path)


def whole(name: str, path: str | None = None) -> Column:
    return _column(name, "Int64", path)


def real(name: str, path: str | None = None) -> Column:
    return _column(name, "Float64", path)


def flag(name: str, path: str | None = None) -> Column:
    return _column(name, "boolean", path)


def metric(name: str, path: str) -> tuple[Column, ...]:
    """A figure and the ends of its interval."""
    return (
        real(name, f"{path}.value"),
        real(f"{name}_low", f"{path}.low"),
        real(f"{name}_high", f"{path}.high"),
    )


def joined(name: str, path: str, separator: str = " | ") -> Column:
    """Several texts in one field; of a mapping `key: value` each. None if there are none."""

    def value(row: object) -> object:
        found = at(path, row)
        if isinstance(found, dict):
            found = [f"{key}: {found[key]}" for key in sorted(found)]
        return separator.join(found) or None if isinstance(found, Iterable) else None

    return Column(name, "string", value)


def mean(name: str, path: str) -> Column:
    """Of a cell: the mean of its counted runs."""
    return Column(name, "Float64", lambda row: row.mean(path) if isinstance(row, CellRow) else None)


def largest(name: str) -> Column:
    """Of a cell: the largest of its counted runs."""
    return Column(name, "Int64", lambda row: row.largest(name) if isinstance(row, CellRow) else None)


def own(name: str, dtype: Dtype, column: str | None = None) -> Column:
    """Of a rank: its own value."""
    return Column(name, dtype, lambda row: row.own(column or name) if isinstance(row, RankRow) else None)


def telemetry(runs: Iterable[RunResult]) -> Iterator[Column]:
    """What the devices of some runs told, by name."""
    for name in sorted({name for run in runs for name in run.telemetry}):
        yield Column(f"telemetry_{name}", "Float64", partial(_told, name))


def _told(name: str, row: object) -> float | None:
    # No path: a name may have a dot in it.
    return row.run.telemetry.get(name) if isinstance(row, RunRow) else None


def _efficiency(kind: Scaling, against: Literal["single", "own"]) -> tuple[Column, ...]:
    name, path = f"efficiency_{kind}_{against}", f"{kind}.{against}"
    return (
        *metric(name, f"{path}.metric"),
        text(f"{name}_baseline", f"{path}.baseline.figures.cell.id"),
        text(f"{name}_absent", f"{path}.reason"),
    )


_CELL = (
    text("study", "study.name"),
    text("cell_id", "cell.id"),
    *(
        text(name, f"cell.{name}")
        for name in ("workload", "dataset", "strategy", "compression", "collective")
    ),
    whole("node_size", "cell.node_size"),
    real("link_mbit_per_s", "cell.link_mbit_per_s"),
    text("device", "cell.device"),
    text("backend", "cell.backend"),
    whole("gpus", "cell.gpus"),
    text("precision", "cell.precision"),
    text("optimizer", "cell.optimizer"),
    whole("micro_batch", "cell.micro_batch"),
    whole("accumulation", "cell.accumulation"),
    whole("batch_per_replica", "cell.batch_per_replica"),
    whole("global_batch", "cell.global_batch"),
    whole("seed", "cell.seed"),
)
_COMMUNICATION = (
    *("total_ns", "blocked_ns", "transfer_ns", "wait_ns", "exchange_cpu_ns", "dispatch_ns", "bubble_ns"),
    *("bus_bytes_per_s", "peak_bus_bytes_per_s"),
)
_COUNTERS = ("exchange_buckets", "exchange_buckets_early", "loss_fixed")

CELLS = (
    *_CELL,
    text("scaling"),
    text("outcome"),
    text("reason", "failure.reason"),
    Column("runs", "Int64", lambda row: len(row.pool.runs) if isinstance(row, CellRow) else None),
    whole("runs_planned", "pool.planned"),
    Column("runs_lost", "Int64", lambda row: len(row.pool.lost) if isinstance(row, CellRow) else None),
    Column(
        "runs_left_out", "Int64", lambda row: len(row.pool.left_out) if isinstance(row, CellRow) else None
    ),
    text("evidence", "figures.evidence"),
    flag("disturbed", "figures.disturbed"),
    text("proof", "figures.proof_method"),
    text("fingerprint", "figures.newest.fingerprint"),
    *metric("step_ns", "figures.step_ns"),
    text("interval", "figures.step_ns.interval"),
    *metric("samples_per_s", "figures.samples_per_s"),
    *metric("units_per_s", "figures.units_per_s"),
    text("unit", "figures.newest.unit"),
    *(real(f"{phase}_ns", f"figures.phase_ns.{phase}") for phase in (*PHASES, "other")),
    *metric("exposed_ns", "figures.exposed_ns"),
    *metric("exposed_share", "figures.exposed_share"),
    text("exposed_absent", "figures.exposed_absent"),
    text("budget_method", "budget.method"),
    *(real(f"budget_{part}_ns", f"budget.part_ns.{part}") for part in ("input", "compute")),
    *metric("budget_transfer_ns", "budget.transfer_ns"),
    *metric("budget_wait_ns", "budget.wait_ns"),
    *(real(f"budget_{part}_ns", f"budget.part_ns.{part}") for part in ("bubble", "other")),
    real("bubble_ideal", "figures.newest.bubble_ideal"),
    *(mean(f"communication_{name}", f"communication.{name}") for name in _COMMUNICATION),
    whole("exchange_payload_bytes", "figures.newest.exchange_payload_bytes"),
    real("exchange_operations", "figures.newest.exchange_operations"),
    whole("parameters", "figures.newest.parameters"),
    whole("flops_per_step", "figures.newest.flops_per_step"),
    real("mfu", "figures.mfu"),
    mean("energy_j", "energy_j"),
    largest("rss_peak_bytes"),
    largest("rss_over_idle_bytes"),
    largest("device_allocated_peak_bytes"),
    whole("predicted_peak_bytes"),
    real("usd_per_hour", "cost.usd_per_hour"),
    *metric("usd_per_1000_steps", "cost.usd_per_1000_steps"),
    *metric("usd_per_million_samples", "cost.usd_per_million_samples"),
    *metric("usd_per_billion_tokens", "cost.usd_per_billion_tokens"),
    *metric("usd_per_epoch", "cost.usd_per_epoch"),
    text("usd_absent", "cost.absent"),
    *_efficiency("weak", "single"),
    *_efficiency("weak", "own"),
    *_efficiency("strong", "single"),
    *_efficiency("strong", "own"),
    text("dense_cell_id", "exchange.dense.cell.id"),
    *metric("speed_up", "exchange.speed_up"),
    text("speed_up_verdict", "exchange.verdict"),
    text("speed_up_absent", "exchange.reason"),
    real("gradient_bytes_per_exposed_s", "exchange.gradients_per_exposed_s"),
    *(real(name, f"figures.newest.{name}") for name in _COUNTERS),
)
"""Of a planned cell, with or without figures."""

RUNS = (
    *_CELL,
    text("run_id", "run.run_id"),
    text("launch_id", "run.launch_id"),
    whole("repeat", "run.repeat"),
    flag("counted"),
    text("outcome", "run.outcome"),
    text("reason", "run.reason"),
    text("evidence", "run.evidence"),
    text("started_at", "run.started_at"),
    joined("hosts", "run.hosts", " "),
    whole("nodes", "run.environment.nodes"),
    text("fingerprint", "run.fingerprint"),
    text("commit", "run.environment.code.commit"),
    text("code_hash", "run.environment.code.code_hash"),
    text("torch", "run.environment.torch"),
    text("device_name", "run.environment.device_name"),
    *(whole(name, f"run.{name}") for name in ("ranks_expected", "ranks_present", "steps", "warmup_steps")),
    flag("warmup_steady", "run.warmup_steady"),
    text("stop", "run.stop"),
    *metric("step_ns", "run.step_ns"),
    *(real(f"step_ns_{quantile}", f"run.step_ns_{quantile}") for quantile in ("median", "p10", "p90", "p99")),
    whole("slow_steps", "run.slow_steps"),
    *(real(f"{phase}_ns", f"run.phase_ns.{phase}") for phase in (*PHASES, "other")),
    *metric("exposed_ns", "run.exposed_ns"),
    text("budget_method", "run.budget.method"),
    *(real(f"budget_{part}_ns", f"run.budget.{part}_ns") for part in ("input", "compute")),
    *metric("budget_transfer_ns", "run.budget.transfer_ns"),
    *metric("budget_wait_ns", "run.budget.wait_ns"),
    *(real(f"budget_{part}_ns", f"run.budget.{part}_ns") for part in ("bubble", "other")),
    real("bubble_ideal", "run.bubble_ideal"),
    whole("communication_steps", "run.communication.steps"),
    real("communication_step_ns", "run.communication.step_ns"),
    *(real(f"communication_{name}", f"run.communication.{name}") for name in _COMMUNICATION),
    real("samples_per_s", "run.samples_per_s"),
    real("units_per_s", "run.units_per_s"),
    text("unit", "run.unit"),
    real("flops_per_s", "run.flops_per_s"),
    real("mfu", "run.mfu"),
    real("energy_j", "run.energy_j"),
    whole("exchange_payload_bytes", "run.exchange_payload_bytes"),
    real("exchange_operations", "run.exchange_operations"),
    *(
        whole(f"{name}_bytes", f"run.{name}_bytes")
        for name in ("rss_peak", "rss_over_idle", "device_allocated_peak")
    ),
    real("loss_first", "run.loss_first"),
    real("loss_last", "run.loss_last"),
    whole("loss_last_samples"),
    text("proof", "run.proof.method"),
    flag("replicas_agree", "run.replicas_agree"),
    real("foreign_cpu_cores", "run.foreign_cpu_cores"),
    flag("disturbed", "run.disturbed"),
    *(whole(f"{name}_ns", f"run.{name}_ns") for name in ("setup", "first_step", "startup")),
    joined("warnings", "run.warnings"),
    joined("absent", "run.absent"),
    *(real(name, f"run.{name}") for name in _COUNTERS),
    text("first_hash", "run.first_hash"),
)
"""Of a run, counted or not."""

RANKS = (
    *_CELL,
    text("run_id", "run.run_id"),
    whole("repeat", "run.repeat"),
    whole("rank"),
    own("node", "Int64"),
    whole("steps", "run.ranks.steps"),
    own("compute_ns", "Int64"),
    own("compute_sd_ns", "Int64"),
    own("slowest_share", "Float64"),
    own("wait_ns", "Int64"),
    own("blocked_ns", "Int64"),
)
"""Of a rank of a counted run."""

LOSSES = (
    *_CELL,
    text("run_id", "run.run_id"),
    whole("repeat", "run.repeat"),
    whole("step"),
    whole("samples"),
    real("loss"),
)
"""Of a loss of a counted run."""

SKIPS = (
    text("study", "study.name"),
    *(
        text(name, f"skip.{name}")
        for name in ("workload", "strategy", "compression", "collective", "link", "scaling")
    ),
    whole("gpus"),
    whole("batch_size", "skip.batch_size"),
    text("rule", "skip.rule"),
    text("reason", "skip.reason"),
)
"""Of a point that is not run."""
