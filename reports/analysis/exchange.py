"""Speed-up, loss and break-even of each exchange of gradients against the dense one of the same work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from reports.analysis.communication import CellCommunication, Payloads, communication
from reports.analysis.effect import effect_text, sides
from reports.analysis.figures import CellFigures, OfCell, exchanges_by_nodes
from reports.analysis.scaling import unlike_conditions
from reports.analysis.series import setting_of
from reports.analysis.study import StudyFigures
from reports.text import count, listed, number, si
from results.cell import REFERENCE_STRATEGY, Backend, Cell, exchange_label
from results.derivation.communication import bus_factor
from results.grouping import grouped
from results.notation import NO_LINK, read_link
from results.outcome import Evidence
from results.record import POINT_TO_POINT
from results.run import NOT_PROVEN
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


def loss_guard(figures: CellFigures, dense: CellFigures) -> str | None:
    """`1.000 against 1.500 after 8 steps`: the mean losses, over ranks and runs, of both at the last steps
    that every run recorded, counted from the first of the training; None without such steps."""
    # By the last of the steps of a loss and their number.
    kept: list[dict[tuple[int, int], float]] = []
    for run in (*figures.runs, *dense.runs):
        first, every = run.first_steps or 0, run.losses_every
        kept.append({(first + (place + 1) * every, every): loss for place, loss in enumerate(run.losses)})
    shared = set.intersection(*(set(losses) for losses in kept))
    if not shared:
        return None
    last, own = max(shared), len(figures.runs)
    found = [losses[last] for losses in kept]
    means = [number(fmean(those), digits=4) for those in (found[:own], found[own:])]
    return f"{' against '.join(means)} after {count(last[0], 'step')}"


def break_even(figures: CellFigures, dense: CellFigures, verdict: Gain | None) -> str:
    """`below 11.5 Gbit/s`: the bandwidth below which an exchange would be faster than the dense one, from
    measured parts and as if the transfer were not hidden, or why the runs support none.

    T - transfer + bytes / B < T_d - transfer_d + bytes_d / B, so that
    B < (bytes_d - bytes) / ((T - transfer) - (T_d - transfer_d)),

    with T the step time, transfer the exposed transfer (what is left contains encoding and decoding) and
    bytes what a rank puts on the wire.
    """
    own, other = communication(figures), communication(dense)
    backend = figures.cell.backend
    sent, sent_dense = wire_bytes(own.payloads, backend), wire_bytes(other.payloads, backend)
    rest, rest_dense = _apart_from_transfer(own), _apart_from_transfer(other)
    if exchanges_by_nodes(figures):
        return BY_NODES
    if sent is None or sent_dense is None:
        return NOT_RECORDED
    if sent >= sent_dense:
        return NO_FEWER
    if rest is None or rest_dense is None:
        return NOT_EXPOSED
    if verdict in (unsure := {None: FEW_RUNS, "no gain": NOT_APART}):
        return unsure[verdict]
    if rest <= rest_dense:
        return SLOWER_TRANSFER if verdict == "slower" else ANY_RATE
    return f"below {si((sent_dense - sent) / (rest - rest_dense) * 8e9, 'bit/s')}"


def wire_bytes(payloads: Payloads, backend: Backend) -> float | None:
    """Bytes that a rank sends in a step; None where nothing was recorded, or the algorithm is not known.

    It is payload times the factor of the bus bandwidth, as the best algorithms send it. A send counts once,
    and a receive does not count, because the sender counts it.
    """
    sent = 0.0
    for (name, group_size), payload_bytes in payloads.items():
        factor = bus_factor(name, group_size, backend)
        if name in POINT_TO_POINT:
            factor = float(name == "send")
        if factor is None:
            return None
        sent += factor * payload_bytes
    return sent if payloads else None


def _apart_from_transfer(one: CellCommunication) -> float | None:
    """The step time less its exposed transfer; a transfer that chance made negative counts as 0."""
    return None if one.transfer_ns is None else one.figures.step_ns.value - max(0.0, one.transfer_ns.value)


NO_DENSE = "no dense exchange has a figure here"
GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient in single precision, which it has before it is sent."""
ALONE = "every strategy was measured only with its dense exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRow(OfCell):
    """One cell compared with the dense exchange of the same point."""

    dense: CellFigures | None
    """The dense exchange that it is compared with; None for the dense exchange itself, or without one."""
    speed_up: Metric | None
    """Step time of the dense exchange over its own: above 1 it is faster."""
    reason: str | None
    """Why the speed-up is missing or cannot be judged; None for the dense exchange itself."""
    verdict: Gain | None = None
    """Whether its runs are faster or slower than the runs of the dense exchange; None: not judged."""

    @property
    def name(self) -> str:
        return exchange_label(self.cell)

    @property
    def factor(self) -> float:
        """The factor by which it is faster or, if its verdict is slower, slower; 1 if it is not known."""
        speed_up = self.speed_up.value if self.speed_up else 1.0
        return 1 / speed_up if self.verdict == "slower" else speed_up

    @property
    def gradients_per_exposed_s(self) -> float | None:
        """Bytes of the model's gradients, 4 a parameter even if fewer are sent, over the exposed seconds;
        None if these may be 0."""
        exposed, parameters = communication(self.figures).exposed_ns, self.figures.newest.parameters
        if exposed is None or exposed.low is None or exposed.low <= 0 or not parameters:
            return None
        return GRADIENT_BYTES * parameters / (exposed.value / 1e9)

    @property
    def loss_guard(self) -> str | None:
        """The losses of this exchange and of the dense one; None if the two cannot be compared."""
        return loss_guard(self.figures, self.dense) if self.dense and self.speed_up else None

    @property
    def break_even(self) -> str | None:
        """The bandwidth below which it would be faster than the dense one; None if the two cannot be
        compared."""
        return break_even(self.figures, self.dense, self.verdict) if self.dense and self.speed_up else None


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
    def where(self) -> str:
        emulated = all(row.figures.evidence is Evidence.EMULATED for row in self.rows)
        where = "On this network" if self.link == NO_LINK else f"Over {self.link} links"
        return where + " (emulated)" * emulated

    @property
    def finding(self) -> str:
        """A sentence with the exchanges that are faster than the dense one, slower, or neither."""
        names = grouped((row.name.replace(", ", " over "), row) for row in self.rows if row.verdict)
        if not names:
            reasons = dict.fromkeys(row.reason for row in self.rows if row.reason is not None)
            return f"{self.where} no exchanges can be compared: {'; '.join(reasons) or ALONE}."
        even = f"no difference shown, or one below {effect_text(self.smallest_effect)}"
        told = {
            "faster than the dense exchange": _told(names, "faster") or "none",
            "slower": _told(names, "slower"),
            # An exchange without a gain has none at any point.
            even: ", ".join(
                name for name in names if not any(row.verdict != "no gain" for row in names[name])
            ),
        }
        return f"{self.where} {'; '.join(f'{what}: {which}' for what, which in told.items() if which)}."


def _told(names: Mapping[str, Sequence[ExchangeRow]], gain: Gain) -> str:
    """`topk:0.01 (up to 2.10 times, on 16 and 32), bf16 (1.20 times)`: the exchanges that have a gain, and
    where they have it, the largest first."""
    found = {name: [row for row in rows if row.verdict == gain] for name, rows in names.items()}
    most = {name: max(row.factor for row in those) for name, those in found.items() if those}
    order = sorted(most, key=lambda name: -most[name])
    times = {name: f"{'up to ' * (len(found[name]) > 1)}{number(most[name])} times" for name in order}
    return ", ".join(f"{name} ({times[name]}{_at(found[name], names[name])})" for name in order)


def _at(those: Sequence[ExchangeRow], every: Sequence[ExchangeRow]) -> str:
    """`, on 16 and 32`: the sizes of some rows of an exchange, if it has others."""
    sizes = sorted({row.cell.gpus for row in those})
    if len(those) == len(every):
        return ""
    if any(row.cell.gpus in sizes for row in every if row.verdict != those[0].verdict):
        # Batches of one size differ.
        return f", at {len(those)} of {len(every)} points"
    return f", on {listed([f'{gpus:,}' for gpus in sizes], most=8)}"


def exchange_parts(study: StudyFigures) -> list[ExchangePart]:
    """Every workload and network on which gradients were exchanged in more than one way."""
    several = (one for one in study.cells.values() if one.cell.gpus > 1)
    parts = grouped(
        ((one.cell.workload, read_link(one.cell.link) or 0.0, one.cell.link), one) for one in several
    )
    rows = {
        part: list(_rows(cells))
        for part, cells in sorted(parts.items())
        if len({exchange_label(one.cell) for one in cells}) > 1
    }
    smallest = study.assumptions.smallest_effect
    verdicts = _verdicts([row for those in rows.values() for row in those], smallest)
    return [
        ExchangePart(
            workload=workload,
            link=link,
            rows=tuple(replace(row, verdict=verdicts.get(row.cell.id)) for row in those),
            smallest_effect=smallest,
        )
        for (workload, _, link), those in rows.items()
    ]


def _verdicts(rows: Iterable[ExchangeRow], smallest: float) -> dict[str, Gain]:
    """The verdicts by cell: all comparable rows of a study are judged together."""
    pairs = [(row, row.dense) for row in rows if row.dense and row.reason is None]
    found = sides([(dense.run_step_ns, row.figures.run_step_ns) for row, dense in pairs], smallest)
    return {row.cell.id: one or "no gain" for (row, _), one in zip(pairs, found, strict=True)}


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
    speed_up = None if reason else ratio_of_runs(against.run_step_ns, figures.run_step_ns, "x")
    reason = FEW_RUNS if speed_up and speed_up.samples < FEWEST_RUNS else reason
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
    unlike = unlike_conditions(figures, dense)
    return unlike_kinds(figures, dense) or (None if unlike is None else str(unlike))


def unlike_kinds(figures: CellFigures, other: CellFigures) -> str | None:
    """Why two cells cannot be compared on any machine: unlike evidence, or a failed proof."""
    if figures.evidence is not other.evidence:
        return f"{figures.evidence} here, {other.evidence} there"
    return NOT_PROVEN if NOT_PROVEN in (figures.no_claim, other.no_claim) else None
