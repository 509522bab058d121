"""Gains and losses of each way to exchange gradients, compared with the dense exchange.

For the same work and network: speed-up, bytes, loss, and the bandwidth at which an exchange breaks even.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from reports.analysis.communication import CellCommunication, communication
from reports.analysis.effect import Side, effect_text, sides
from reports.analysis.figures import CellFigures, exchanges_by_nodes
from reports.analysis.scaling import unlike_conditions
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.text import count, devices, listed, number
from results.cell import DEFAULT_COLLECTIVE, REFERENCE_STRATEGY, Backend, Cell, Device, exchange_label
from results.derivation.communication import bus_factor
from results.grouping import grouped
from results.notation import NO_LINK, read_link
from results.outcome import Evidence
from results.record import POINT_TO_POINT
from results.run import NOT_PROVEN, OperationSummary
from results.statistics import Metric, ratio_of_runs

Gain = Literal["faster", "no gain", "slower"]

FEWEST_RUNS = 3
"""Runs of each side that a verdict needs. By chance, n runs of two equal exchanges do not overlap in
2 n! n! / (2n)! of the cases: one in three with two runs, one in ten with three."""
FEW_RUNS = f"a verdict needs {FEWEST_RUNS} runs of each"
NOT_RECORDED = "operations not recorded"
NOT_EXPOSED = "exposed transfer not measured"
BY_NODES = "bytes inside of nodes and across them cannot be distinguished"
NO_FEWER = "sends no fewer bytes"
ANY_RATE = "at any bandwidth"
NOT_APART = "no difference shown"
SLOWER_TRANSFER = "slower here: its fewer bytes take longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGuard:
    """The losses of two exchanges on the same samples after the same number of steps."""

    steps: int
    """Steps from the first of the training, with proof and warm-up."""
    loss: float
    """The mean loss, over ranks and runs, of the batch of that step, or of the steps that were recorded as
    one."""
    dense: float

    def __str__(self) -> str:
        steps = count(self.steps, "step")
        return f"{number(self.loss, digits=4)} against {number(self.dense, digits=4)} after {steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The bandwidth below which an exchange would be faster than the dense one; projected, not measured."""

    mbit_per_s: float | None
    reason: str | None
    """The reason for a missing bandwidth; `ANY_RATE` if it costs no time apart from its transfer."""

    def __str__(self) -> str:
        if self.mbit_per_s is None:
            return self.reason or ""
        if self.mbit_per_s >= 1000:
            return f"below {number(self.mbit_per_s / 1000)} Gbit/s"
        return f"below {number(self.mbit_per_s)} Mbit/s"


def loss_guard(figures: CellFigures, dense: CellFigures) -> LossGuard | None:
    """The losses of both exchanges at the last steps that every run recorded; None without such steps."""
    # By the last of the steps of a loss, counted from the first of the training, and their number.
    kept: list[dict[tuple[int, int], float]] = []
    for run in (*figures.runs, *dense.runs):
        first, every = run.first_steps or 0, run.losses_every
        kept.append({(first + (place + 1) * every, every): loss for place, loss in enumerate(run.losses)})
    shared = set.intersection(*(set(losses) for losses in kept))
    if not shared:
        return None
    last = max(shared)
    found = [losses[last] for losses in kept]
    return LossGuard(
        steps=last[0], loss=fmean(found[: len(figures.runs)]), dense=fmean(found[len(figures.runs) :])
    )


def break_even(figures: CellFigures, dense: CellFigures) -> BreakEven:
    """The break-even from measured parts, as if the transfer were not hidden:

    T - transfer + bytes / B < T_d - transfer_d + bytes_d / B, so that
    B < (bytes_d - bytes) / ((T - transfer) - (T_d - transfer_d)),

    with T the step time, transfer the exposed transfer (what is left contains encoding and decoding) and
    bytes what a rank puts on the wire.
    """
    own, other = communication(figures), communication(dense)
    if exchanges_by_nodes(figures):
        return BreakEven(mbit_per_s=None, reason=BY_NODES)
    backend = figures.cell.backend
    bytes_own, bytes_dense = wire_bytes(own.operations, backend), wire_bytes(other.operations, backend)
    if bytes_own is None or bytes_dense is None:
        return BreakEven(mbit_per_s=None, reason=NOT_RECORDED)
    if bytes_own >= bytes_dense:
        return BreakEven(mbit_per_s=None, reason=NO_FEWER)
    rest_own, rest_dense = _apart_from_transfer(own), _apart_from_transfer(other)
    if rest_own is None or rest_dense is None:
        return BreakEven(mbit_per_s=None, reason=NOT_EXPOSED)
    if rest_own <= rest_dense:
        return BreakEven(mbit_per_s=None, reason=ANY_RATE)
    bytes_per_ns = (bytes_dense - bytes_own) / (rest_own - rest_dense)
    return BreakEven(mbit_per_s=bytes_per_ns * 8e3, reason=None)


def judged(found: BreakEven, verdict: Gain | None) -> BreakEven:
    """The break-even that the runs support, or the reason why they support none.

    A verdict is not needed to see whether fewer bytes are sent.
    """
    if found.mbit_per_s is None and found.reason != ANY_RATE:
        return found
    if verdict is None:
        return BreakEven(mbit_per_s=None, reason=FEW_RUNS)
    if verdict == "no gain":
        return BreakEven(mbit_per_s=None, reason=NOT_APART)
    if verdict == "slower" and found.reason == ANY_RATE:
        return BreakEven(mbit_per_s=None, reason=SLOWER_TRANSFER)
    return found


def wire_bytes(operations: Sequence[OperationSummary], backend: Backend) -> float | None:
    """Bytes that a rank sends in a step; None where nothing was recorded, or the algorithm is not known.

    It is payload times the factor of the bus bandwidth, as the best algorithms send it. A send counts once,
    and a receive does not count, because the sender counts it.
    """
    sent = 0.0
    for operation in operations:
        factor = bus_factor(operation.name, operation.group_size, backend)
        if operation.name in POINT_TO_POINT:
            factor = float(operation.name == "send")
        if factor is None:
            return None
        sent += factor * operation.payload_bytes
    return sent if operations else None


def _apart_from_transfer(one: CellCommunication) -> float | None:
    """The step time less its exposed transfer; a transfer that chance made negative counts as 0."""
    return None if one.transfer_ns is None else one.figures.step_ns.value - max(0.0, one.transfer_ns.value)


NO_DENSE = "no dense exchange has a figure here"
GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient in single precision, which it has before it is sent."""
ALONE = "every strategy was measured only with its dense exchange"
_GAINS: dict[Side | None, Gain] = {"above": "faster", "below": "slower", None: "no gain"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRow:
    """One cell compared with the dense exchange of the same point."""

    figures: CellFigures
    dense: CellFigures | None
    """The dense exchange that it is compared with; None for the dense exchange itself, or without one."""
    speed_up: Metric | None
    """Step time of the dense exchange over its own: above 1 it is faster."""
    reason: str | None
    """Why the speed-up is missing or cannot be judged; None for the dense exchange itself."""
    verdict: Gain | None = None
    """Whether its runs are faster or slower than the runs of the dense exchange; None: not judged."""

    @property
    def cell(self) -> Cell:
        return self.figures.cell

    @property
    def name(self) -> str:
        """`ddp + topk:0.01, ring`."""
        return exchange_label(self.cell)

    @property
    def gradients_per_exposed_s(self) -> float | None:
        """Bytes of the model's gradients, 4 a parameter even if fewer are sent, over the exposed seconds;
        None if these may be 0."""
        exposed, parameters = communication(self.figures).exposed_ns, self.figures.newest.parameters
        if exposed is None or exposed.low is None or exposed.low <= 0 or not parameters:
            return None
        return GRADIENT_BYTES * parameters / (exposed.value / 1e9)

    @property
    def exchange_cpu_ns(self) -> float | None:
        """CPU time a step of threads other than the training thread, for encoding, decoding and summing; also
        where it is hidden."""
        return communication(self.figures).mean("exchange_cpu_ns")

    @property
    def loss_guard(self) -> LossGuard | None:
        """The losses of this exchange and of the dense one; None if the two cannot be compared."""
        return None if self._comparable is None else loss_guard(self.figures, self._comparable)

    @property
    def break_even(self) -> BreakEven | None:
        """The bandwidth below which this exchange would be faster than the dense one; None if the two cannot
        be compared."""
        if self._comparable is None:
            return None
        return judged(break_even(self.figures, self._comparable), self.verdict)

    @property
    def _comparable(self) -> CellFigures | None:
        """The figures of the dense exchange, if its runs had the same conditions and can be compared with
        this row; else None."""
        return None if self.speed_up is None else self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePart:
    """All exchanges of the gradients of one workload over one network."""

    workload: str
    link: str
    rows: tuple[ExchangeRow, ...]
    """The rows by size and batch, at each point the dense exchange first."""
    smallest_effect: float
    """Share from which on a difference is reported."""

    @property
    def finding(self) -> str:
        """A sentence that names the exchanges that were faster or slower than the dense one."""
        where = "On this network" if self.link == NO_LINK else f"Over {self.link} links"
        if all(row.figures.evidence is Evidence.EMULATED for row in self.rows):
            where += " (emulated)"
        judged = [row for row in self.rows if row.verdict is not None]
        if not judged:
            reasons = dict.fromkeys(row.reason for row in self.rows if row.reason is not None)
            return f"{where} no exchanges can be compared: {'; '.join(reasons) or ALONE}."
        if any(row.verdict == "faster" for row in judged):
            return f"{where} {_gains(judged, _names(self.rows))}."
        return f"{where} {_no_gain(judged, _names(self.rows), self.smallest_effect)}."


def exchange_parts(study: StudyFigures) -> list[ExchangePart]:
    """Every workload and network on which gradients were exchanged in more than one way."""
    several = (one for one in study.cells.values() if one.cell.gpus > 1)
    parts = grouped(((one.cell.workload, one.cell.link), one) for one in several)
    rows = {
        part: list(_rows(parts[part]))
        for part in sorted(parts, key=lambda part: (part[0], read_link(part[1]) or 0.0))
        if len({exchange_label(one.cell) for one in parts[part]}) > 1
    }
    smallest = study.assumptions.smallest_effect
    # All comparable rows of a study are judged together.
    pairs = [(row, row.dense) for those in rows.values() for row in those if row.dense and row.reason is None]
    found = sides([(dense.run_step_ns, row.figures.run_step_ns) for row, dense in pairs], smallest)
    verdicts = {row.cell.id: _GAINS[one] for (row, _), one in zip(pairs, found, strict=True)}
    return [
        ExchangePart(
            workload=workload,
            link=link,
            rows=tuple(replace(row, verdict=verdicts.get(row.cell.id)) for row in those),
            smallest_effect=smallest,
        )
        for (workload, link), those in rows.items()
    ]


Names = Mapping[str, str]


def _rows(cells: Iterable[CellFigures]) -> Iterator[ExchangeRow]:
    points = grouped(
        ((setting_of(one.cell), one.cell.gpus, one.cell.batch_per_replica), one) for one in cells
    )
    for point in sorted(points):
        dense = {one.cell.strategy: one for one in points[point] if one.cell.dense}
        rows = [_row(one, dense) for one in points[point]]
        yield from sorted(rows, key=lambda row: row.dense is not None or not row.cell.dense)


def _row(figures: CellFigures, dense: Mapping[str, CellFigures]) -> ExchangeRow:
    against = _against(figures.cell, dense)
    if against is None:
        reason = None if figures.cell.dense else NO_DENSE
        return ExchangeRow(figures=figures, dense=None, speed_up=None, reason=reason)
    reason = incomparable(figures, against)
    if reason is not None:
        return ExchangeRow(figures=figures, dense=against, speed_up=None, reason=reason)
    speed_up = ratio_of_runs(against.run_step_ns, figures.run_step_ns, "x")
    reason = FEW_RUNS if speed_up.samples < FEWEST_RUNS else None
    return ExchangeRow(figures=figures, dense=against, speed_up=speed_up, reason=reason)


def _against(cell: Cell, dense: Mapping[str, CellFigures]) -> CellFigures | None:
    """The dense exchange of the same strategy. For that exchange itself, and for a strategy without one, it
    is the dense exchange of ddp."""
    own = dense.get(cell.strategy)
    if own is not None and not cell.dense:
        return own
    variants = [one for strategy, one in dense.items() if strategy.partition(":")[0] == REFERENCE_STRATEGY]
    reference = dense.get(REFERENCE_STRATEGY) or next(iter(variants), None)
    return None if reference is not None and reference.cell.id == cell.id else reference


def incomparable(figures: CellFigures, dense: CellFigures) -> str | None:
    """Why the step times of two cells cannot be compared; None if they can."""
    if figures.evidence is not dense.evidence:
        return f"{figures.evidence} here, {dense.evidence} there"
    if NOT_PROVEN in (figures.no_claim, dense.no_claim):
        return NOT_PROVEN
    unlike = unlike_conditions(figures, dense)
    return None if unlike is None else str(unlike)


def _gains(rows: Sequence[ExchangeRow], names: Names) -> str:
    """Name the exchanges that were faster at some point, and how the others compared."""
    turning = [name for name in names if _turns([row for row in rows if row.name == name])]
    one_way = [row for row in rows if row.name not in turning]
    moved = {row.name for row in rows if row.verdict != "no gain"}
    even = dict.fromkeys(names[row.name] for row in rows if row.name not in moved)
    found = {
        "these were faster than the dense exchange": _times(one_way, "faster", names),
        "faster or slower than the dense exchange by size": ", ".join(
            f"{names[name]} {_by_size([row for row in rows if row.name == name])}" for name in turning
        ),
        "slower": _times(one_way, "slower", names),
        "no gain": ", ".join(even),
    }
    return "; ".join(f"{what}: {which}" for what, which in found.items() if which)


def _no_gain(rows: Sequence[ExchangeRow], names: Names, smallest: float) -> str:
    """Say that no exchange was faster, and which came nearest."""
    noun = "other exchange" if any(not row.cell.compresses for row in rows) else "compressor"
    nothing = f"no {noun} was faster than the dense exchange"
    even = dict.fromkeys(names[row.name] for row in rows if row.verdict == "no gain")
    if not even:
        best = min(rows, key=_factor)
        return f"{nothing}; the fastest, {names[best.name]}, was {number(_factor(best))} times slower"
    slower = [row for row in rows if row.verdict == "slower"]
    told = f"; slower: {_times(rows, 'slower', names)}" if slower else ""
    return f"{nothing}; no difference shown, or one below {effect_text(smallest)}: {', '.join(even)}{told}"


def _times(rows: Sequence[ExchangeRow], verdict: Gain, names: Names) -> str:
    """`topk:0.01 (up to 2.10 times, from 16), bf16 (1.20 times)`, the largest first."""
    found = {
        row.name: [one for one in rows if one.name == row.name] for row in rows if row.verdict == verdict
    }
    largest = {name: max(map(_factor, _with(points, verdict))) for name, points in found.items()}
    return ", ".join(
        f"{names[name]} ({_up_to(found[name], verdict)}{_at(found[name], verdict)})"
        for name in sorted(found, key=lambda name: -largest[name])
    )


def _at(points: Sequence[ExchangeRow], verdict: Gain) -> str:
    """`, from 16`: the sizes with a verdict, if not all points of an exchange have it."""
    those = _with(points, verdict)
    if len(those) == len(points):
        return ""
    if not _told_by_size(points):
        return f", at {len(those)} of {len(points)} points"
    return f", {_where(those, points)}"


def _by_size(points: Sequence[ExchangeRow]) -> str:
    """`slower (up to 1.15 times) up to 32 GPUs and faster (up to 3.43 times) from 64`, small sizes first."""
    verdicts: list[Gain] = ["slower", "faster"]
    verdicts.sort(key=lambda verdict: min(row.cell.gpus for row in _with(points, verdict)))
    device = points[0].cell.device
    first, second = (
        (verdict, f"({_up_to(points, verdict)})", _where(_with(points, verdict), points, unit))
        for verdict, unit in zip(verdicts, (device, None), strict=True)
    )
    return f"{' '.join(first)} and {' '.join(second)}"


def _turns(points: Sequence[ExchangeRow]) -> bool:
    """Whether an exchange is faster at some sizes and slower at others."""
    return {"faster", "slower"} <= {row.verdict for row in points} and _told_by_size(points)


def _told_by_size(points: Sequence[ExchangeRow]) -> bool:
    """Whether every size has only one verdict over its batches and settings."""
    return len({(row.cell.gpus, row.verdict) for row in points}) == len({row.cell.gpus for row in points})


def _where(those: Sequence[ExchangeRow], points: Sequence[ExchangeRow], unit: Device | None = None) -> str:
    """`up to 32 GPUs`, `from 64`, `on 4 and 16`: the sizes of those among the sizes of all points."""
    sizes, known = (sorted({row.cell.gpus for row in some}) for some in (those, points))

    def named(gpus: int) -> str:
        return f"{gpus:,}" if unit is None else devices(gpus, unit)

    if len(sizes) > 1 and sizes == known[: len(sizes)]:
        return f"up to {named(sizes[-1])}"
    if len(sizes) > 1 and sizes == known[-len(sizes) :]:
        return f"from {named(sizes[0])}"
    return f"on {listed([*(f'{gpus:,}' for gpus in sizes[:-1]), named(sizes[-1])])}"


def _up_to(points: Sequence[ExchangeRow], verdict: Gain) -> str:
    """`up to 3.43 times`."""
    factors = [_factor(row) for row in _with(points, verdict)]
    return f"{'up to ' if len(factors) > 1 else ''}{number(max(factors))} times"


def _with(points: Sequence[ExchangeRow], verdict: Gain) -> list[ExchangeRow]:
    return [row for row in points if row.verdict == verdict]


def _factor(row: ExchangeRow) -> float:
    """The factor by which it is faster or, if its verdict is slower, slower."""
    assert row.speed_up is not None
    return 1 / row.speed_up.value if row.verdict == "slower" else row.speed_up.value


def _names(rows: Sequence[ExchangeRow]) -> Names:
    """The name of each exchange in a sentence, without commas: `topk:0.01 over ring`."""
    several = len({row.cell.strategy for row in rows}) > 1
    names = {}
    for row in rows:
        cell, sent = row.cell, row.cell.compression if row.cell.compresses else ""
        if several:
            what = f"{cell.strategy} + {sent}" if sent else cell.strategy
        else:
            what = sent or "dense"
        names[row.name] = what if cell.collective == DEFAULT_COLLECTIVE else f"{what} over {cell.collective}"
    return names
