"""The batch rule: what one replica computes at once, under weak and under strong scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from results.plan import Plan, Request, SeriesId


class GlobalBatches:
    """The constant global batch of each strong series.

    The request's own `global_batch_sizes`, else the batch size times the largest count of workers; the
    study's first plan decides for good, so that a larger matrix later extends its series.
    """

    def __init__(self, request: Request, earlier: Sequence[Plan]) -> None:
        self._own = frozenset(request.global_batch_sizes)
        self._largest = max(request.gpus)
        self._earlier = _fixed_by(earlier)

    def of(self, key: SeriesId) -> int:
        """Samples of one update over all replicas."""
        if self._own:
            return key.batch_size
        fixed = self._earlier.get((key.workload, key.batch_size))
        return key.batch_size * self._largest if fixed is None else fixed


def _fixed_by(plans: Sequence[Plan]) -> Mapping[tuple[str, int], int]:
    fixed: dict[tuple[str, int], int] = {}
    for plan in plans:
        if plan.request.global_batch_sizes:
            continue  # Its series are named by their global batch, not by a batch size.
        for series in plan.series:
            if series.global_batch is not None:
                fixed.setdefault((series.workload, series.batch_size), series.global_batch)
    return fixed


def weak_micro_batch(batch_size: int, *, accumulation: int) -> int | str:
    """Samples of one micro-batch of one replica, or why there is none."""
    if batch_size % accumulation:
        return (
            f"{batch_size} samples of a replica do not divide into {accumulation} equal micro-batches "
            f"(accumulation {accumulation})"
        )
    return batch_size // accumulation


def strong_micro_batch(global_batch: int, *, replicas: int, accumulation: int) -> int | str:
    """Samples of one micro-batch of one replica, or why there is none."""
    if global_batch % (replicas * accumulation):
        shares = f"{replicas} replicas"
        if accumulation > 1:
            shares += f" x {accumulation} micro-batches"
        return f"a global batch of {global_batch} samples does not divide over {shares}"
    return global_batch // (replicas * accumulation)
