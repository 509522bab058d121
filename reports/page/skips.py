"""Points that were never to run: few rows, whatever the matrix leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reports.analysis.outcomes import SkippedSizes
from results.label import label
from results.plan import Plan, Skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPoints:
    """Points of one workload left out for one reason: every strategy, in every series, at every size."""

    workload: str
    strategies: tuple[str, ...]
    series: tuple[str, ...]
    """Scaling and its batch: `weak 8`, per replica; `strong 32`, global; `strong, batch size 8` where no plan
    has a cell of such a series."""
    gpus: tuple[int, ...]
    reason: str
    """Without the strategy's name where it is the subject of the sentence: equal for all."""


def global_batches(plans: Sequence[Plan]) -> dict[tuple[str, int], int]:
    """Of strong series, by workload and `--batch-size`: a skip has no more than these of its series."""
    return {
        (series.workload, series.batch_size): series.global_batch
        for plan in plans
        for series in plan.series
        if series.global_batch is not None
    }


def skipped_points(
    skipped: Sequence[SkippedSizes], batches: Mapping[tuple[str, int], int]
) -> list[SkippedPoints]:
    """Joined by series and then by strategy, and only where all else is the same: no row says too much."""
    series: dict[SkippedPoints, list[str]] = {}
    for group in skipped:
        skip = group.skip
        alike = SkippedPoints(
            workload=skip.workload,
            strategies=(label(skip),),
            series=(),
            gpus=group.gpus,
            reason=skip.predicate or skip.reason,
        )
        series.setdefault(alike, []).append(_series(skip, batches))
    strategies: dict[SkippedPoints, list[str]] = {}
    for one, found in series.items():
        alike = replace(one, strategies=(), series=tuple(dict.fromkeys(found)))
        strategies.setdefault(alike, []).extend(one.strategies)
    return [replace(one, strategies=tuple(found)) for one, found in strategies.items()]


def _series(skip: Skip, batches: Mapping[tuple[str, int], int]) -> str:
    if skip.scaling == "weak":
        return f"weak {skip.batch_size:,}"
    batch = batches.get((skip.workload, skip.batch_size))
    return f"strong, batch size {skip.batch_size:,}" if batch is None else f"strong {batch:,}"
