"""The tables of a study: rows with all figures of a cell, run, rank, loss or skip, and their columns.

A column is declared once, with its name for CSV, Parquet and JSON, and with title, unit and definition for
the full table of the page. Every study has the same exported columns, except for telemetry, which depends on
the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from reports.analysis.budget import PARTS, BudgetPart, CellBudget
from reports.analysis.communication import CellCommunication, communication, link_peaks
from reports.analysis.cost import CellCost, cell_costs, energy_per_sample
from reports.analysis.exchange import ExchangeRow, exchange_parts
from reports.analysis.figures import CellFigures
from reports.analysis.headline import efficiency_field, runs_text
from reports.analysis.imbalance import Imbalance, imbalances
from reports.analysis.losses import loss_steps, trained_samples
from reports.analysis.memory import CellMemory, cell_memories
from reports.analysis.outcomes import Failure, outcome_words
from reports.analysis.pooling import Pool
from reports.analysis.scaling import CurvePoint
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.table import Column, Dtype, Unit
from reports.text import DURATIONS, SI, SIZES
from results.cell import Cell, Names, label
from results.environment import CodeVersion, Environment
from results.groups import DIMENSIONS
from results.outcome import Outcome
from results.plan import Scaling, Skip
from results.run import PHASES, Communication, DimensionSummary, RankColumns, RunResult
from results.statistics import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """A planned cell with all of its figures."""

    study: StudyFigures
    pool: Pool
    figures: CellFigures | None
    network: CellCommunication | None
    failure: Failure | None
    exchange: ExchangeRow | None
    cost: CellCost | None
    imbalance: Imbalance | None
    weak: CurvePoint | None
    strong: CurvePoint | None
    memory: CellMemory | None
    predicted_peak_bytes: int | None

    @property
    def budget(self) -> CellBudget | None:
        return self.network.budget if self.network else None

    @property
    def cell(self) -> Cell:
        return self.pool.cell

    @property
    def outcome(self) -> str:
        return self.failure.outcome if self.failure else Outcome.OK

    @property
    def scaling(self) -> str:
        return " ".join(self.study.scalings.get(self.cell.id, ()))

    def mean(self, path: str) -> float | None:
        """The mean over the counted runs; None if one of them lacks the figure."""
        known: list[Any] = [at(path, run) for run in self.pool.runs]
        return sum(known) / len(known) if known and None not in known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run of a planned cell, or a part of it."""

    study: StudyFigures
    cell: Cell
    run: RunResult
    counted: bool = True
    """Whether the cell's figure includes this run."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The values of one rank, or of one loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRow:
    """A point of the matrix that is not run."""

    study: StudyFigures
    skip: Skip
    gpus: int


def cell_rows(study: StudyFigures) -> list[CellRow]:
    """Every planned cell, in the order of the plans."""
    failures = {failure.cell.id: failure for failure in study.failures}
    exchanges = {row.cell.id: row for part in exchange_parts(study) for row in part.rows}
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    memories = {one.cell.id: one for one in cell_memories(study)}
    predicted, peaks = study.predicted_bytes, link_peaks(study.cells.values())
    uneven = {one.cell.id: one for one in imbalances(study)}
    weak, strong = _points_by_cell(study, "weak"), _points_by_cell(study, "strong")
    return [
        CellRow(
            study=study,
            pool=pool,
            figures=(figures := study.cells.get(cell_id)),
            network=communication(figures, peaks) if figures else None,
            failure=failures.get(cell_id),
            exchange=exchanges.get(cell_id),
            cost=costs.get(cell_id),
            imbalance=uneven.get(cell_id),
            weak=weak.get(cell_id),
            strong=strong.get(cell_id),
            memory=memories.get(cell_id),
            predicted_peak_bytes=predicted.get(cell_id),
        )
        for cell_id, pool in study.pools.items()
    ]


def _points_by_cell(study: StudyFigures, kind: Scaling) -> dict[str, CurvePoint]:
    curves = [curve for curve in study.curves if curve.key.kind == kind]
    return {point.cell.id: point for curve in curves for point in curve.points}


def run_rows(study: StudyFigures) -> list[RunRow]:
    """Every run of every planned cell, oldest first."""
    return [
        RunRow(study=study, cell=pool.cell, run=run, counted=run in pool.runs)
        for pool in study.pools.values()
        for run in pool.every
    ]


def rank_rows(study: StudyFigures) -> list[RunRow]:
    """Every rank of every counted run that recorded its ranks."""
    return [
        replace(row, own={"rank": rank} | {name: all_of[rank] for name, all_of in columns.items() if all_of})
        for row in run_rows(study)
        if row.counted and row.run.ranks is not None
        for columns in [{name: getattr(row.run.ranks, name) for name in _OF_RANKS}]
        for rank in range(len(row.run.ranks.compute_ns))
    ]


def loss_rows(study: StudyFigures) -> list[RunRow]:
    """List every loss of every counted run, including synthetic samples, whose loss shows no learning. Its
    step is the last that it is the mean of, from 1, and its samples are of all replicas."""
    return [
        replace(row, own={"step": step, "samples": step * row.cell.global_batch, "loss": loss})
        for row in run_rows(study)
        if row.counted
        for step, loss in zip(loss_steps(row.run), row.run.losses, strict=True)
    ]


def skip_rows(study: StudyFigures) -> list[SkipRow]:
    """Every point that is not run, with one row for each size."""
    return [
        SkipRow(study=study, skip=group.skip, gpus=gpus) for group in study.skipped for gpus in group.gpus
    ]


def at(path: str, value: object) -> object:
    """Follow a dotted path; None if a value on the way is None."""
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


Value = str | Callable[[Any], Any]
"""A dotted path in a row, or a function from a row to its value."""


def _column(
    dtype: Dtype,
    name: str,
    value: Value = "",
    title: str = "",
    unit: Unit | None = None,
    anchor: str | None = None,
    **more: Any,
) -> Column[Any]:
    return Column(
        name=name,
        dtype=dtype,
        value=value if callable(value) else partial(at, value or name),
        title=title,
        form=unit or (lambda shown: Field("" if shown is None else str(shown))),
        numeric=unit is not None,
        anchor=anchor,
        **more,
    )


text = partial(_column, "string")
whole = partial(_column, "Int64")
real = partial(_column, "Float64")
flag = partial(_column, "boolean")


def metric(
    name: str,
    value: Value,
    title: str = "",
    unit: Unit | None = None,
    anchor: str | None = None,
    *,
    ends: bool = True,
) -> tuple[Column[Any], ...]:
    """Declare a figure and the ends of its interval, which are shown with a shown figure if `ends`."""
    found = value if callable(value) else partial(at, value)
    low, high = (f"{title}, from", f"{title}, to") if title and ends else ("", "")
    return (
        real(name, lambda row: at("value", found(row)), title, unit, anchor, json=found),
        real(f"{name}_low", lambda row: at("low", found(row)), low, unit, "method-interval"),
        real(f"{name}_high", lambda row: at("high", found(row)), high, unit, "method-interval"),
    )


def joined(name: str, path: str, separator: str = " | ") -> Column[Any]:
    """Join several strings in one field, the items of a mapping as `key: value`; None for no strings."""

    def value(row: object) -> object:
        found = at(path, row)
        if isinstance(found, dict):
            found = [f"{key}: {found[key]}" for key in sorted(found)]
        return separator.join(found) or None if isinstance(found, Iterable) else None

    return text(name, value)


def mean(name: str, path: str) -> Column[CellRow]:
    """Declare the mean over the counted runs of a cell."""
    return real(name, lambda row: row.mean(path))


_DTYPES: Mapping[object, Dtype] = MappingProxyType({int: "Int64", float: "Float64", bool: "boolean"})


def stored(path: str, struct: type[msgspec.Struct], *names: str, prefix: str = "") -> Iterator[Column[Any]]:
    """Declare the fields of a stored struct, or of its lists, under their names and with their own types."""
    kinds = {one.name: one.type for one in msgspec.structs.fields(struct)}
    for name in names:
        kind = kinds[name]
        while parts := get_args(kind):
            kind = parts[0]
        if kind is Metric:
            yield from metric(f"{prefix}{name}", f"{path}.{name}")
        else:
            yield _column(_DTYPES.get(kind, "string"), f"{prefix}{name}", f"{path}.{name}")


def _price(name: str, title: str) -> tuple[Column[Any], ...]:
    return metric(name, f"cost.{name}", title, USD, "method-cost", ends=False)


def telemetry(runs: Iterable[RunResult]) -> Iterator[Column[RunRow]]:
    """Declare a column for each name of telemetry in some runs."""
    for name in sorted({name for run in runs for name in run.telemetry}):
        # Not a path, because a name may contain a dot.
        yield real(f"telemetry_{name}", partial(lambda name, row: row.run.telemetry.get(name), name))


def _efficiencies() -> Iterator[Column[CellRow]]:
    for kind in ("weak", "strong"):
        for against in ("single", "own"):
            name, path = f"efficiency_{kind}_{against}", f"{kind}.{against}"
            yield from metric(name, f"{path}.metric")
            yield text(f"{name}_baseline", f"{path}.baseline.cell.id")
            yield text(f"{name}_absent", f"{path}.reason")


def dimension(found: Callable[[Any], Iterable[DimensionSummary]], name: str | None, part: str) -> Any:
    """A function from a row to the transfer or the wait of one dimension."""

    def value(row: Any) -> float | None:
        return next((getattr(own, f"{part}_ns") for own in found(row) if own.name == name), None)

    return value


def _dimensions(found: Callable[[Any], Iterable[DimensionSummary]]) -> Iterator[Column[Any]]:
    for name in (*DIMENSIONS, None):
        for part in ("transfer", "wait"):
            yield real(f"dimension_{name or 'several'}_{part}_ns", dimension(found, name, part))


def _budget(part_path: str, metric_path: str) -> Iterator[Column[Any]]:
    for part in PARTS:
        name = f"budget_{part}_ns"
        if part in ("transfer", "wait"):
            yield from metric(name, metric_path.format(part))
        else:
            yield real(name, part_path.format(part))


_RATES = SI[2:]
# Parts of a step are shown in the unit of the step, so that they can be added up by eye.
NS = Unit(scales=DURATIONS, sized_by=lambda row: row.figures.step_ns.value if row.figures else None)
ONCE = Unit(scales=DURATIONS)
HOURS = Unit(scales=((3.6e12, "h"), (6e10, "min"), (1e9, "s"), (1e6, "ms")))
BYTES = Unit(scales=SIZES[1:])
# Symbols are joined, words are not: `MB/s`, `M units/s`.
BANDWIDTH = Unit(scales=tuple((scale, f"{prefix}B/s") for scale, prefix in _RATES))
THROUGHPUT = Unit(scales=tuple((scale, f"{prefix} units/s".strip()) for scale, prefix in _RATES))
MANY = Unit(scales=_RATES)
RATIO = Unit(scales=((0.01, "%"),))
FLOPS = Unit(scales=((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")))
PLAIN, USD, JOULES = (Unit(scales=((1.0, name),)) for name in ("", "USD", "J"))
TINY = Unit(scales=((1.0, ""),), form="{:.2g}".format)
COUNT = Unit(scales=((1.0, ""),), form="{:,.0f}".format)

_CELL = (
    text("study", "study.name"),
    text("cell_id", "cell.id", title="cell", hint="its folder in the study"),
    text("workload", "cell.workload", title="workload"),
    *stored("cell", Cell, "dataset", "strategy", "compression", "collective", "node_size"),
    *stored("cell", Cell, "link_mbit_per_s", "device", "backend"),
    whole("gpus", "cell.gpus", "GPUs", COUNT, "method-sizes"),
    *stored("cell", Cell, "precision", "optimizer", "micro_batch", "accumulation"),
    whole("batch_per_replica", "cell.batch_per_replica", "batch per replica", COUNT, "method-scaling"),
    whole("global_batch", "cell.global_batch"),
    whole("seed", "cell.seed"),
)
_COMMUNICATION = (
    *("total_ns", "blocked_ns", "transfer_ns", "wait_ns", "exchange_cpu_ns", "dispatch_ns", "bubble_ns"),
    *("bus_bytes_per_s", "peak_bus_bytes_per_s"),
)
_BUCKETS = {
    "exchange_buckets": "buckets",
    "exchange_buckets_early": "early buckets",
    "exchange_backward_left": "backward left",
}

CELLS = (
    *_CELL,
    text("scaling", title="scaling", anchor="method-scaling"),
    text("outcome"),
    text("reason", "failure.reason", title="reason"),
    whole("runs", lambda row: len(row.pool.runs)),
    whole("runs_planned", "pool.planned"),
    whole("runs_lost", lambda row: len(row.pool.lost)),
    whole("runs_left_out", lambda row: len(row.pool.left_out)),
    text("evidence", "figures.evidence"),
    flag("disturbed", "figures.disturbed"),
    text("proof", "figures.proof_method", title="proof", anchor="method-proof"),
    text("fingerprint", "figures.newest.fingerprint"),
    *metric("step_ns", "figures.step_ns", "step time", NS, "method-step-time"),
    text("interval", "figures.step_ns.interval"),
    *metric("samples_per_s", "figures.samples_per_s"),
    *metric("units_per_s", "figures.units_per_s"),
    text("unit", "figures.newest.unit"),
    *(real(f"{phase}_ns", f"figures.phase_ns.{phase}") for phase in (*PHASES, "other")),
    *metric("exposed_ns", "figures.exposed_ns"),
    *metric("exposed_share", "figures.exposed_share", "added by the exchange", RATIO, "method-exposed"),
    text("exposed_absent", "figures.exposed_absent"),
    text(
        "budget_method",
        "budget.method",
        title="method",
        anchor="method-budget",
        hint="how transfer and wait were found",
    ),
    *_budget("budget.part_ns.{}", "budget.{}_ns"),
    real(
        "bubble_ideal",
        "figures.newest.bubble_ideal",
        "ideal bubble",
        RATIO,
        "method-bubble",
        hint="of a step, by the schedule",
    ),
    real(
        "bubble_replayed",
        lambda row: row.mean("bubble_replayed"),
        "replayed bubble",
        RATIO,
        "method-bubble",
        hint="of a step, by the schedule and the times of its stages",
    ),
    *(mean(f"communication_{name}", f"communication.{name}") for name in _COMMUNICATION),
    *_dimensions(lambda row: row.network.dimensions if row.network else ()),
    real("dimension_overlap_ns", "network.overlap_ns"),
    whole(
        "exchange_payload_bytes", "figures.newest.exchange_payload_bytes", "payload", BYTES, "method-payload"
    ),
    real("exchange_operations", "figures.newest.exchange_operations", "operations", PLAIN, "method-payload"),
    whole("parameters", "figures.newest.parameters", "parameters", MANY, "method-parameters"),
    whole("flops_per_step", "figures.flops_per_step", "a step", FLOPS, "method-flops"),
    real("mfu", "figures.mfu", "MFU", RATIO, "method-flops"),
    mean("energy_j", "energy_j"),
    whole("rss_peak_bytes", "memory.rss_peak_bytes", "peak on the host", BYTES, "method-memory"),
    whole("rss_over_idle_bytes", "memory.rss_over_idle_bytes", "over idle", BYTES, "method-memory"),
    whole(
        "device_allocated_peak_bytes", "memory.device_peak_bytes", "peak of a device", BYTES, "method-memory"
    ),
    whole("predicted_peak_bytes"),
    real("usd_per_hour", "cost.usd_per_hour", "an hour", USD, "method-cost"),
    *_price("usd_per_1000_steps", "1,000 steps"),
    *_price("usd_per_million_samples", "a million samples"),
    *_price("usd_per_billion_tokens", "a billion tokens"),
    *_price("usd_per_epoch", "an epoch"),
    text("usd_absent", "cost.absent"),
    *_efficiencies(),
    text("dense_cell_id", "exchange.dense.cell.id"),
    *metric("speed_up", "exchange.speed_up", "speed-up over dense", PLAIN, "method-speed-up", ends=False),
    text("speed_up_verdict", "exchange.verdict", title="verdict", anchor="method-speed-up"),
    text("speed_up_absent", "exchange.reason"),
    real("gradient_bytes_per_exposed_s", "exchange.gradients_per_exposed_s"),
    *(
        real(name, f"figures.newest.{name}", title, PLAIN, "method-buckets")
        for name, title in _BUCKETS.items()
    ),
    real("loss_fixed", "figures.newest.loss_fixed"),
    real(
        "busiest_expert",
        lambda row: row.mean("busiest_expert.times_mean"),
        "busiest expert",
        PLAIN,
        "method-experts",
        hint="in means of its layer",
    ),
    real("dropped_share", lambda row: row.mean("dropped_share"), "dropped rows", RATIO, "method-experts"),
    *metric("imbalance_cost", "imbalance.ratio", "cost of imbalance", PLAIN, "method-imbalance", ends=False),
)
"""The exported columns of a planned cell, with or without figures."""


def _efficiency_shown(kind: Scaling) -> Iterator[Column[CellRow]]:
    """Declare the efficiency of the headline, and the reason why none is claimed."""

    def no_claim(row: CellRow) -> str:
        point = row.weak if kind == "weak" else row.strong
        found = point.efficiency if point else None
        if found is None or found.baseline is None or (found.metric is not None and not found.super_linear):
            return "baseline" if found is not None and found.is_baseline else ""
        return "super-linear" if found.super_linear else efficiency_field(found).text

    path = f"{kind}.efficiency.claimed"
    yield from metric(f"efficiency_{kind}", path, f"{kind} efficiency", RATIO, "method-efficiency")
    yield text(f"no_claim_{kind}", no_claim, title=f"{kind}, no claim", hint="why no efficiency is claimed")


def _part(part: BudgetPart, title: str, hint: str = "") -> Column[CellRow]:
    def value(row: CellRow) -> float | None:
        ns = row.budget.known_ns(part) if row.budget else None
        # Rounded to nanoseconds, because the rest of a sum has rounding errors.
        return None if ns is None else float(round(ns))

    hint = f"{hint}, of a step" if hint else ""
    return real(f"part_{part}", value, title, NS, "method-budget", hint=hint)


def _once(name: str, title: str) -> Column[CellRow]:
    """Declare a mean over the runs that have the figure: only the first run of a launch has some figures."""

    def value(row: CellRow) -> float | None:
        known = [found for run in row.pool.runs if (found := getattr(run, name)) is not None]
        return fmean(known) if known else None

    return real(name, value, title, ONCE, "method-set-up")


def _exchange_cpu_ns(row: CellRow) -> float | None:
    return row.network.mean("exchange_cpu_ns") if row.network and row.exchange else None


def _replicas(row: CellRow) -> str:
    runs = [run.replicas_agree for run in row.pool.runs if run.replicas_agree is not None]
    return f"{sum(runs)} of {len(runs)}" if runs else ""


SHOWN = (
    text("label", lambda row: label(row.cell), title="strategy"),
    text("setting", lambda row: row.study.settings[setting_of(row.cell)], title="setting"),
    text("outcome_words", lambda row: outcome_words(row.outcome), title="outcome"),
    real(
        "throughput",
        "figures.throughput.value",
        "throughput",
        THROUGHPUT,
        "method-throughput",
        hint="in the workload's own unit: samples, images or tokens",
    ),
    *_efficiency_shown("weak"),
    *_efficiency_shown("strong"),
    _part("input", "input", "waiting for data and moving it"),
    _part("compute", "compute", "forward, backward and update without any exchange"),
    _part("bubble", "bubble", "idle time of pipeline stages"),
    _part("other", "other", "the step less all of its parts"),
    _part("transfer", "exposed transfer"),
    _part("wait", "exposed wait"),
    _part("imbalance", "imbalance", "waiting for the rank whose experts compute most rows"),
    real("step_ns_p99", lambda row: row.mean("step_ns_p99"), "p99", NS, "method-slow"),
    real("overlap", "network.overlap", "hidden", RATIO, "method-overlap"),
    real("bus", "network.bus_bytes_per_s", "bandwidth", BANDWIDTH, "method-bandwidth"),
    real("peak", "network.peak.bytes_per_s", "link's peak", BANDWIDTH, "method-link-peak"),
    real("bus_share", "network.bandwidth_share", "of the peak", RATIO, "method-link-peak"),
    text("break_even", "exchange.break_even", title="pays below", anchor="method-break-even"),
    real("exchange_cpu", _exchange_cpu_ns, "encoding, CPU", NS, "method-exchange-cpu"),
    real("device_bytes", "memory.device_bytes", "memory of a device", BYTES, "method-memory"),
    real("host_bytes", "memory.host_bytes", "memory of the host", BYTES, "method-memory"),
    real("predicted", "memory.predicted_bytes", "predicted", BYTES, "method-predicted-memory"),
    real(
        "over_prediction",
        "memory.over_prediction",
        "measured over predicted",
        PLAIN,
        "method-predicted-memory",
    ),
    real("memory_share", "memory.share", "of the memory", RATIO, "method-memory"),
    real("epoch", "cost.epoch_ns.value", "time of an epoch", HOURS, "method-epoch"),
    real(
        "million_samples", "cost.million_samples_ns.value", "time of a million samples", HOURS, "method-cost"
    ),
    real(
        "joules",
        lambda row: at("value", energy_per_sample(row.figures) if row.figures else None),
        "energy of a sample",
        JOULES,
        "method-energy",
    ),
    real("max_difference", "figures.proof.max_difference", "largest difference", TINY, "method-bound"),
    real("max_bound", "figures.proof.max_bound", "its bound", TINY, "method-bound"),
    text("replicas_agree", _replicas, title="replicas agree", anchor="method-replicas"),
    real("loss_first", "figures.newest.loss_first", "first loss", PLAIN, "method-losses"),
    real("loss_last", "figures.newest.loss_last", "last loss", PLAIN, "method-losses"),
    text("loss_guard", "exchange.loss_guard", title="loss against the dense", anchor="method-loss-guard"),
    text("runs_text", lambda row: row.figures and runs_text(row.figures), "runs", anchor="method-evidence"),
    _once("setup_ns", "set-up"),
    _once("first_step_ns", "first step"),
    _once("startup_ns", "start-up"),
)
"""The columns of a planned cell that only the page has."""
PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "": ("label", "workload", "setting", "gpus", "batch_per_replica", "scaling", "outcome_words"),
        "time": (
            *("step_ns", "throughput", "efficiency_weak", "no_claim_weak", "efficiency_strong"),
            *("no_claim_strong", "part_input", "part_compute", "part_bubble", "part_other"),
            *("bubble_ideal", "bubble_replayed", "step_ns_p99", "busiest_expert", "dropped_share"),
            "imbalance_cost",
        ),
        "network": (
            *("part_transfer", "budget_method", "part_wait", "part_imbalance", "exposed_share", "overlap"),
            *("exchange_payload_bytes", "exchange_operations", "exchange_buckets"),
            *("exchange_buckets_early", "exchange_backward_left", "bus", "peak", "bus_share", "speed_up"),
            *("speed_up_verdict", "break_even", "exchange_cpu"),
        ),
        "memory": (
            *("device_allocated_peak_bytes", "device_bytes", "rss_peak_bytes", "rss_over_idle_bytes"),
            *("host_bytes", "predicted", "over_prediction", "memory_share", "parameters"),
        ),
        "cost": (
            *("usd_per_1000_steps", "usd_per_million_samples", "usd_per_billion_tokens", "usd_per_epoch"),
            *("epoch", "million_samples", "usd_per_hour", "mfu", "flops_per_step", "joules"),
        ),
        "proof": (
            *("proof", "max_difference", "max_bound", "replicas_agree", "loss_first", "loss_last"),
            *("loss_guard", "runs_text", "setup_ns", "first_step_ns", "startup_ns", "reason", "cell_id"),
        ),
    }
)
"""The columns of the full table in presets that answer one question each; the first are always shown."""
_BY_NAME: Mapping[str, Column[CellRow]] = {column.name: column for column in (*CELLS, *SHOWN)}


def declared(row: CellRow, *names: str) -> dict[str, Any]:
    """Return the values that JSON has under these names; a figure includes its interval."""
    columns = [_BY_NAME[name] for name in names]
    return {column.name: (column.json or column.value)(row) for column in columns}


def cell_columns(preset: str) -> Iterator[Column[CellRow]]:
    """The columns of a preset, each figure followed by the ends of its interval if these are shown."""
    for name in PRESETS[preset]:
        for end in (name, f"{name}_low", f"{name}_high"):
            if end in _BY_NAME and _BY_NAME[end].title:
                yield _BY_NAME[end]


RUNS = (
    *_CELL,
    *stored("run", RunResult, "run_id", "launch_id", "repeat"),
    flag("counted"),
    text("outcome", "run.outcome"),
    text("reason", lambda row: row.study.review.excluded.get(row.run.run_id, row.run.reason)),
    *stored("run", RunResult, "evidence", "started_at"),
    joined("hosts", "run.hosts", " "),
    whole("nodes", "run.environment.nodes"),
    text("fingerprint", "run.fingerprint"),
    *stored("run.environment.code", CodeVersion, "commit", "code_hash"),
    *stored("run.environment", Environment, "torch", "device_name"),
    *stored("run", RunResult, "ranks_expected", "ranks_present", "steps", "warmup_steps", "warmup_steady"),
    *stored("run", RunResult, "stop", "step_ns", "step_ns_median", "step_ns_p10", "step_ns_p90"),
    *stored("run", RunResult, "step_ns_p99", "slow_steps"),
    *(real(f"{phase}_ns", f"run.phase_ns.{phase}") for phase in (*PHASES, "other")),
    *stored("run", RunResult, "exposed_ns", "copies_ns"),
    text("budget_method", "run.budget.method"),
    *_budget("run.budget.{}_ns", "run.budget.{}_ns"),
    *stored("run", RunResult, "bubble_ideal", "bubble_replayed"),
    *stored("run.communication", Communication, "steps", "step_ns", *_COMMUNICATION, prefix="communication_"),
    *_dimensions(lambda row: row.run.communication.dimensions if row.run.communication else ()),
    *stored("run", RunResult, "samples_per_s", "units_per_s", "unit", "flops_per_s", "mfu", "energy_j"),
    *stored("run", RunResult, "exchange_payload_bytes", "exchange_operations", "rss_peak_bytes"),
    *stored("run", RunResult, "rss_over_idle_bytes", "device_allocated_peak_bytes"),
    *stored("run", RunResult, "loss_first", "loss_last"),
    whole("loss_last_samples", lambda row: trained_samples(row.cell, row.run)),
    text("proof", "run.proof_word"),
    *stored("run", RunResult, "replicas_agree", "foreign_cpu_cores", "disturbed"),
    *stored("run", RunResult, "setup_ns", "first_step_ns", "startup_ns"),
    joined("warnings", "run.warnings"),
    joined("absent", "run.absent"),
    *stored("run", RunResult, *_BUCKETS, "loss_fixed", "first_hash"),
    real("busiest_expert", "run.busiest_expert.times_mean"),
    *stored("run", RunResult, "dropped_share"),
)
"""The columns of a run, counted or not."""

_OF_RANKS = ("node", "compute_ns", "compute_sd_ns", "slowest_share", "wait_ns", "blocked_ns", "rows")
RANKS = (
    *_CELL,
    *stored("run", RunResult, "run_id", "repeat"),
    whole("rank", "own.rank"),
    whole("node", "own.node"),
    whole("steps", "run.ranks.steps"),
    *stored("own", RankColumns, *_OF_RANKS[1:]),
)
"""The columns of a rank of a counted run."""

LOSSES = (
    *_CELL,
    *stored("run", RunResult, "run_id", "repeat"),
    whole("step", "own.step"),
    whole("samples", "own.samples"),
    real("loss", "own.loss"),
)
"""The columns of a loss of a counted run."""

SKIPS = (
    text("study", "study.name"),
    *stored("skip", Skip, *Names.__struct_fields__, "scaling"),
    whole("gpus"),
    *stored("skip", Skip, "batch_size", "rule", "reason"),
)
"""The columns of a point that is not run."""
