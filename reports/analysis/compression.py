"""What a way to exchange gradients saves and costs against the dense one: bytes, loss, break-even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from reports.analysis.communication import CellCommunication, communication
from reports.analysis.figures import CellFigures
from reports.analysis.training import exchanges_by_nodes
from reports.text import count, number
from results.cell import Backend
from results.derivation.communication import bus_factor
from results.record import POINT_TO_POINT
from results.run import OperationSummary, RunResult

Gain = Literal["faster", "no gain", "slower"]

FEWEST_RUNS = 3
"""Of each side for a verdict: n runs of two equal exchanges are apart by chance 2 n! n! / (2n)! of the times,
one in three with two runs, one in ten with three."""
FEW_RUNS = f"a verdict needs {FEWEST_RUNS} runs of each"
NOT_RECORDED = "operations not recorded"
NOT_EXPOSED = "exposed transfer not measured"
BY_NODES = "bytes inside of nodes and across them are not told apart"
NO_FEWER = "sends no fewer bytes"
ANY_RATE = "at any bandwidth"
NOT_APART = "not told apart"
SLOWER_TRANSFER = "slower here: its fewer bytes take longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGuard:
    """The losses of two exchanges on the same samples after the same number of steps."""

    steps: int
    """Proof, warm-up and all: from the first step of the training."""
    loss: float
    """The mean over ranks and runs of that step's own batch, or of the steps that were kept as one."""
    dense: float

    def __str__(self) -> str:
        steps = count(self.steps, "step")
        return f"{number(self.loss, digits=4)} against {number(self.dense, digits=4)} after {steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The bandwidth below which an exchange would be faster than the dense one; projected, not measured."""

    mbit_per_s: float | None
    reason: str | None
    """Why there is no bandwidth; `ANY_RATE` if it costs no time apart from its transfer."""

    def __str__(self) -> str:
        if self.mbit_per_s is None:
            return self.reason or ""
        if self.mbit_per_s >= 1000:
            return f"below {number(self.mbit_per_s / 1000)} Gbit/s"
        return f"below {number(self.mbit_per_s)} Mbit/s"


def payload_ratio(figures: CellFigures, dense: CellFigures) -> float | None:
    """Payload over that of the dense exchange, both of one step and rank; None where that has none."""
    own, other = figures.newest.exchange_payload_bytes, dense.newest.exchange_payload_bytes
    return own / other if own is not None and other else None


def loss_guard(figures: CellFigures, dense: CellFigures) -> LossGuard | None:
    """Both losses of the last steps that every run of both kept together; None without such steps."""
    kept = [_losses(run) for run in (*figures.runs, *dense.runs)]
    shared = set.intersection(*(set(losses) for losses in kept))
    if not shared:
        return None
    last = max(shared)
    found = [losses[last] for losses in kept]
    return LossGuard(
        steps=last[0], loss=fmean(found[: len(figures.runs)]), dense=fmean(found[len(figures.runs) :])
    )


def break_even(figures: CellFigures, dense: CellFigures) -> BreakEven:
    """From measured parts, with nothing of the transfer hidden:

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
    """A break-even as far as the runs bear it out; without a verdict for want of runs there is none.

    That no fewer bytes are sent, or that they are not known, needs no runs.
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

    Payload times the factor of the bus bandwidth, which is what the best algorithms send; a send is sent
    once, and what is received was counted where it was sent.
    """
    factors = [_factor(operation, backend) for operation in operations]
    if not factors or None in factors:
        return None
    return sum((factor or 0.0) * one.payload_bytes for factor, one in zip(factors, operations, strict=True))


def _factor(operation: OperationSummary, backend: Backend) -> float | None:
    if operation.name in POINT_TO_POINT:
        return float(operation.name == "send")
    return bus_factor(operation.name, operation.group_size, backend)


def _apart_from_transfer(one: CellCommunication) -> float | None:
    """The step time less its exposed transfer, which chance can have below 0."""
    return None if one.transfer_ns is None else one.figures.step_ns.value - max(0.0, one.transfer_ns.value)


Window = tuple[int, int]
"""The last of some steps, from the very first of the training, and how many they are."""


def _losses(run: RunResult) -> dict[Window, float]:
    first, every = run.first_steps or 0, run.losses_every
    return {(first + (place + 1) * every, every): loss for place, loss in enumerate(run.losses)}
