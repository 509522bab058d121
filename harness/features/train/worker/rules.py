"""The decisions of a training run: pure functions of figures that all ranks share, so they decide alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from harness.features.train.order import BatchRule, MetricName, TrainOrder, larger_is_better
from results.cell import Cell
from results.errors import UsageError

ROW_S = 1.0
ROW_STEPS = 10
"""A row of the log has the steps of `ROW_S` seconds, and at least `ROW_STEPS`."""


def total_steps(order: TrainOrder, *, step: int, samples: int, per_epoch: int | None, per_step: int) -> int:
    """Count the updates of an order, `step` of which with `samples` (of all replicas) have been done.

    `per_epoch` and `per_step` are samples of all replicas; the last step of the last epoch is counted in
    full. Raises UsageError for epochs of data that do not say how long one is.
    """
    if order.steps is not None:
        return order.steps
    assert order.epochs is not None
    if per_epoch is None:
        raise UsageError(
            f"--epochs {order.epochs}: these data do not say how long an epoch is (data= is a function, or "
            f"has no __len__): give --steps"
        )
    return step + max(0, math.ceil((order.epochs * per_epoch - samples) / per_step))


def rate_at(order: TrainOrder, total: int, scale: float = 1.0) -> Callable[[int], float]:
    """The factor of the optimizer's own rate at each step, from 0: warm-up rises linearly, then half a cosine
    falls to 0 at `total` (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts)."""

    def factor(step: int) -> float:
        if order.schedule == "none":
            return scale
        if step < order.warmup_steps:
            return scale * (step + 1) / (order.warmup_steps + 1)
        behind = (step - order.warmup_steps) / max(1, total - order.warmup_steps)
        return scale * 0.5 * (1 + math.cos(math.pi * min(1.0, behind)))

    return factor


def out_of_patience(values: Sequence[float], metric: MetricName, patience: int | None) -> bool:
    """Whether the last `patience` values were no better than the best before; NaN and infinity never are."""
    if patience is None:
        return False
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return len(values) >= patience
    best = max(finite) if larger_is_better(metric) else min(finite)
    return len(values) - 1 - values.index(best) >= patience


def is_best(value: float, values: Sequence[float], metric: MetricName) -> bool:
    """Whether a value is as good as the best of `values`; NaN and infinity never are."""
    finite = [other for other in values if math.isfinite(other)]
    if not math.isfinite(value):
        return False
    return value >= max(finite) if larger_is_better(metric) else value <= min(finite)


def row_steps(seconds_a_step: float) -> int:
    """Steps of the next row, by the agreed time of one."""
    return max(ROW_STEPS, math.ceil(ROW_S / seconds_a_step) if seconds_a_step > 0 else ROW_STEPS)


def cell_on(cell: Cell, gpus: int, rule: BatchRule) -> Cell:
    """How a cell is trained on another number of workers than it has.

    `global` keeps the global batch: the accumulation grows, and the micro-batch stays at most the cell's.
    `rate` keeps the batch of a replica, and scales the rate (`rate_scale`). Raises UsageError where the
    workers form no whole replicas, and where the global batch cannot be divided over them.
    """
    if gpus == cell.gpus:
        return cell
    if gpus % cell.model_parallel:
        raise UsageError(
            f"{gpus} workers do not form whole replicas: {cell.strategy} splits each replica over "
            f"{cell.model_parallel}; choose --elastic so that nodes have whole replicas"
        )
    fitted = msgspec.structs.replace(cell, gpus=gpus)
    if rule == "rate":
        return fitted
    each, rest = divmod(cell.global_batch, fitted.replicas)
    if rest or not each:
        raise UsageError(
            f"the global batch of {cell.global_batch} cannot be divided over {fitted.replicas} replicas: "
            f"choose another batch size, or --batch-rule rate, which keeps the batch of each replica"
        )
    fewest = math.ceil(each / cell.micro_batch)
    accumulation = next(times for times in range(fewest, each + 1) if each % times == 0)
    return msgspec.structs.replace(fitted, micro_batch=each // accumulation, accumulation=accumulation)


def rate_scale(cell: Cell, fitted: Cell, rule: BatchRule) -> float:
    """The factor of the rate of a cell that is trained as `fitted`: linear in the global batch (Goyal et al.
    2017, arXiv:1706.02677, section 2.1) under `rate`, else 1."""
    return fitted.replicas / cell.replicas if rule == "rate" else 1.0
