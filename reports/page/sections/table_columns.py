"""The columns of the full table, in presets that answer one question each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from reports.analysis.budget import BudgetPart
from reports.analysis.communication import CellCommunication
from reports.analysis.cost import energy_per_sample
from reports.analysis.headline import efficiency_field, runs_text
from reports.analysis.memory import CellMemory
from reports.analysis.outcomes import outcome_words
from reports.analysis.scaling import CurvePoint
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.page.rows import CellRow
from results.label import label
from results.run import RunResult
from results.statistics import Metric


@dataclass(frozen=True, slots=True)
class Looked:
    """A row with what is looked up once for all of its columns."""

    row: CellRow
    network: CellCommunication | None
    memory: CellMemory | None


Value = Callable[[Looked], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureColumn:
    """A column of figures."""

    title: str
    kind: str
    value: Value
    anchor: str | None = None
    hint: str = ""
    unit: str = ""
    """Behind the prefix of a rate, or in place of no unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A column of words."""

    title: str
    show: Callable[[Looked], str]
    anchor: str | None = None
    hint: str = ""


Column = FigureColumn | Words


def presets(study: StudyFigures) -> Mapping[str, Iterable[Column]]:
    """The columns by preset; those that are always shown have no name."""
    return {
        "": _identity(study),
        "time": _time(),
        "network": _network(),
        "memory": _memory(),
        "cost": _cost(),
        "proof": _proof(),
    }


def step_ns(one: Looked) -> float | None:
    """The step time of a row, by whose unit its parts are shown."""
    found = _step_ns(one)
    return None if found is None else found.value


def _identity(study: StudyFigures) -> Iterator[Column]:
    """Which cell it is, and how it ended."""
    cells = [pool.cell for pool in study.pools.values()]
    yield Words(title="strategy", show=lambda one: label(one.row.cell))
    if len({cell.workload for cell in cells}) > 1:
        yield Words(title="workload", show=lambda one: one.row.cell.workload)
    yield Words(title="setting", show=lambda one: study.settings[setting_of(one.row.cell)])
    yield FigureColumn(
        title=study.devices_word, kind="count", value=lambda one: one.row.cell.gpus, anchor="method-sizes"
    )
    yield FigureColumn(
        title="batch per replica",
        kind="count",
        value=lambda one: one.row.cell.batch_per_replica,
        anchor="method-scaling",
    )
    yield Words(title="scaling", show=lambda one: one.row.scaling, anchor="method-scaling")
    yield Words(title="outcome", show=lambda one: outcome_words(one.row.outcome))


def _time() -> Iterator[Column]:
    yield from _figure("step time", "ns", _step_ns, "method-step-time")
    yield FigureColumn(
        title="throughput",
        kind="rate",
        unit="units/s",
        value=lambda one: one.row.figures.throughput.value if one.row.figures else None,
        anchor="method-throughput",
        hint="in the workload's own unit: samples, images or tokens",
    )
    for kind in ("weak", "strong"):
        yield from _figure(f"{kind} efficiency", "ratio", _efficiency(kind), "method-efficiency")
        yield Words(title=f"{kind}, no claim", show=_no_claim(kind), hint="why no efficiency is claimed")
    parts: tuple[tuple[BudgetPart, str], ...] = (
        ("input", "waiting for data and moving it"),
        ("compute", "forward, backward and update without any exchange"),
        ("bubble", "idle time of pipeline stages"),
        ("other", "the step less all of its parts"),
    )
    for part, hint in parts:
        yield FigureColumn(
            title=part, kind="ns", value=_part(part), anchor="method-budget", hint=f"{hint}, of a step"
        )
    yield FigureColumn(
        title="ideal bubble",
        kind="ratio",
        value=_newest("bubble_ideal"),
        anchor="method-budget",
        hint="of a step, by the schedule",
    )
    yield FigureColumn(
        title="p99", kind="ns", value=lambda one: one.row.mean("step_ns_p99"), anchor="method-slow"
    )


def _network() -> Iterator[Column]:
    yield FigureColumn(title="exposed transfer", kind="ns", value=_part("transfer"), anchor="method-budget")
    yield Words(
        title="method",
        show=lambda one: one.row.budget.method if one.row.budget else "",
        anchor="method-budget",
        hint="how transfer and wait were found",
    )
    yield FigureColumn(title="exposed wait", kind="ns", value=_part("wait"), anchor="method-budget")
    yield from _figure("on less off", "ratio", lambda one: _of(one, "exposed_share"), "method-exposed")
    yield FigureColumn(
        title="hidden",
        kind="ratio",
        value=lambda one: one.network.overlap if one.network else None,
        anchor="method-overlap",
    )
    yield FigureColumn(
        title="payload", kind="bytes", value=_newest("exchange_payload_bytes"), anchor="method-payload"
    )
    yield FigureColumn(
        title="operations", kind="", value=_newest("exchange_operations"), anchor="method-payload"
    )
    yield FigureColumn(title="buckets", kind="", value=_newest("exchange_buckets"), anchor="method-buckets")
    yield FigureColumn(
        title="early buckets", kind="", value=_newest("exchange_buckets_early"), anchor="method-buckets"
    )
    yield FigureColumn(
        title="bandwidth",
        kind="rate",
        unit="B/s",
        value=lambda one: one.network.bus_bytes_per_s if one.network else None,
        anchor="method-bandwidth",
    )
    yield FigureColumn(
        title="link's peak",
        kind="rate",
        unit="B/s",
        value=lambda one: one.network.peak_bytes_per_s if one.network else None,
        anchor="method-link-peak",
    )
    yield FigureColumn(
        title="of the peak",
        kind="ratio",
        value=lambda one: one.network.bandwidth_share if one.network else None,
        anchor="method-link-peak",
    )
    yield FigureColumn(
        title="speed-up over dense",
        kind="",
        value=lambda one: (
            one.row.exchange.speed_up.value if one.row.exchange and one.row.exchange.speed_up else None
        ),
        anchor="method-speed-up",
    )
    yield Words(title="verdict", show=_exchange_word("verdict"), anchor="method-speed-up")
    yield Words(title="pays below", show=_exchange_word("break_even"), anchor="method-break-even")
    yield FigureColumn(
        title="encoding, CPU",
        kind="ns",
        value=lambda one: one.row.exchange.exchange_cpu_ns if one.row.exchange else None,
        anchor="method-exchange-cpu",
    )


def _memory() -> Iterator[Column]:
    names = (
        ("peak of a device", "device_peak_bytes"),
        ("memory of a device", "device_bytes"),
        ("peak on the host", "rss_peak_bytes"),
        ("over idle", "rss_over_idle_bytes"),
        ("memory of the host", "host_bytes"),
    )
    for title, name in names:
        yield FigureColumn(title=title, kind="bytes", value=_remembered(name), anchor="method-memory")
    yield FigureColumn(
        title="predicted",
        kind="bytes",
        value=_remembered("predicted_bytes"),
        anchor="method-predicted-memory",
    )
    yield FigureColumn(
        title="measured over predicted",
        kind="",
        value=_remembered("over_prediction"),
        anchor="method-predicted-memory",
    )
    yield FigureColumn(
        title="of the memory", kind="ratio", value=_remembered("share"), anchor="method-memory"
    )
    yield FigureColumn(
        title="parameters", kind="rate", value=_newest("parameters"), anchor="method-parameters"
    )


def _cost() -> Iterator[Column]:
    for title, name in (
        ("1,000 steps", "usd_per_1000_steps"),
        ("a million samples", "usd_per_million_samples"),
        ("a billion tokens", "usd_per_billion_tokens"),
        ("an epoch", "usd_per_epoch"),
    ):
        yield FigureColumn(title=title, kind="", unit="USD", value=_cost_of(name), anchor="method-cost")
    yield FigureColumn(
        title="time of an epoch", kind="hours", value=_cost_of("epoch_ns"), anchor="method-epoch"
    )
    yield FigureColumn(
        title="time of a million samples",
        kind="hours",
        value=_cost_of("million_samples_ns"),
        anchor="method-cost",
    )
    yield FigureColumn(
        title="an hour",
        kind="",
        unit="USD",
        value=lambda one: one.row.cost.usd_per_hour if one.row.cost else None,
        anchor="method-cost",
    )
    yield FigureColumn(
        title="MFU",
        kind="ratio",
        value=lambda one: one.row.figures.mfu if one.row.figures else None,
        anchor="method-flops",
    )
    yield FigureColumn(title="a step", kind="flops", value=_newest("flops_per_step"), anchor="method-flops")
    yield FigureColumn(title="energy of a sample", kind="", unit="J", value=_energy, anchor="method-energy")


def _proof() -> Iterator[Column]:
    yield Words(
        title="proof",
        show=lambda one: one.row.figures.proof_method if one.row.figures else "",
        anchor="method-proof",
    )
    yield FigureColumn(
        title="largest difference", kind="tiny", value=_proved("max_difference"), anchor="method-bound"
    )
    yield FigureColumn(title="its bound", kind="tiny", value=_proved("max_bound"), anchor="method-bound")
    yield Words(title="replicas agree", show=_replicas, anchor="method-replicas")
    yield FigureColumn(title="first loss", kind="", value=_newest("loss_first"), anchor="method-losses")
    yield FigureColumn(title="last loss", kind="", value=_newest("loss_last"), anchor="method-losses")
    yield Words(title="loss against the dense", show=_exchange_word("loss_guard"), anchor="method-loss-guard")
    yield Words(
        title="runs",
        show=lambda one: runs_text(one.row.figures) if one.row.figures else "",
        anchor="method-evidence",
    )
    yield FigureColumn(title="set-up", kind="once", value=_once("setup_ns"), anchor="method-set-up")
    yield FigureColumn(title="first step", kind="once", value=_once("first_step_ns"), anchor="method-set-up")
    yield FigureColumn(title="start-up", kind="once", value=_once("startup_ns"), anchor="method-set-up")
    yield Words(title="reason", show=lambda one: one.row.failure.reason if one.row.failure else "")
    yield Words(title="cell", show=lambda one: one.row.cell.id, hint="its folder in the study")


def _figure(
    title: str, kind: str, metric: Callable[[Looked], Metric | None], anchor: str
) -> Iterator[Column]:
    """A figure and the ends of its interval, in its unit."""
    ends: tuple[tuple[str, str, str], ...] = (
        ("value", title, anchor),
        ("low", f"{title}, from", "method-interval"),
        ("high", f"{title}, to", "method-interval"),
    )
    for end, name, explained in ends:
        yield FigureColumn(title=name, kind=kind, value=_end(metric, end), anchor=explained)


def _end(metric: Callable[[Looked], Metric | None], end: str) -> Value:
    def value(one: Looked) -> float | None:
        found = metric(one)
        shown: float | None = getattr(found, end) if found is not None else None
        return shown

    return value


def _of(one: Looked, name: str) -> Metric | None:
    found: Metric | None = getattr(one.row.figures, name) if one.row.figures else None
    return found


def _step_ns(one: Looked) -> Metric | None:
    return _of(one, "step_ns")


def _point(one: Looked, kind: str) -> CurvePoint | None:
    return one.row.weak if kind == "weak" else one.row.strong


def _efficiency(kind: str) -> Callable[[Looked], Metric | None]:
    def metric(one: Looked) -> Metric | None:
        point = _point(one, kind)
        return None if point is None or point.efficiency.is_baseline else point.efficiency.metric

    return metric


def _no_claim(kind: str) -> Callable[[Looked], str]:
    def show(one: Looked) -> str:
        point = _point(one, kind)
        claim = point.efficiency if point else None
        if claim is None or claim.baseline is None or (claim.metric is not None and not claim.super_linear):
            return "baseline" if claim is not None and claim.is_baseline else ""
        return "super-linear" if claim.super_linear else efficiency_field(claim).text

    return show


def _part(part: BudgetPart) -> Value:
    def value(one: Looked) -> float | None:
        ns = one.row.budget.known_ns(part) if one.row.budget else None
        # To the nanosecond: the rest of a sum is else shown with the rounding of the machine.
        return None if ns is None else float(round(ns))

    return value


def _newest(name: str) -> Value:
    def value(one: Looked) -> float | None:
        found: float | None = getattr(one.row.figures.newest, name) if one.row.figures else None
        return found

    return value


def _remembered(name: str) -> Value:
    def value(one: Looked) -> float | None:
        found: float | None = getattr(one.memory, name) if one.memory else None
        return found

    return value


def _cost_of(name: str) -> Value:
    def value(one: Looked) -> float | None:
        found: Metric | None = getattr(one.row.cost, name) if one.row.cost else None
        return found.value if found is not None else None

    return value


def _proved(name: str) -> Value:
    def value(one: Looked) -> float | None:
        proof = one.row.figures.proof if one.row.figures else None
        found: float | None = getattr(proof, name) if proof else None
        return found

    return value


def _once(name: str) -> Value:
    """Of the runs that have one: what is done once a launch is known of its first run alone."""

    def value(one: Looked) -> float | None:
        runs: Iterable[RunResult] = one.row.figures.runs if one.row.figures else ()
        known = [found for run in runs if (found := getattr(run, name)) is not None]
        return fmean(known) if known else None

    return value


def _energy(one: Looked) -> float | None:
    found = energy_per_sample(one.row.figures) if one.row.figures else None
    return found.value if found is not None else None


def _exchange_word(name: str) -> Callable[[Looked], str]:
    def show(one: Looked) -> str:
        found = getattr(one.row.exchange, name) if one.row.exchange else None
        return "" if found is None else str(found)

    return show


def _replicas(one: Looked) -> str:
    runs = [run.replicas_agree for run in one.row.pool.runs if run.replicas_agree is not None]
    return f"{sum(runs)} of {len(runs)}" if runs else ""
