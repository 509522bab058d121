"""Points that were never to run: few rows, whatever the matrix leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reports.analysis.outcomes import SkippedSizes
from results.label import label


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPoints:
    """Points of one workload left out for one reason: every strategy, in every series, at every size."""

    workload: str
    strategies: tuple[str, ...]
    series: tuple[str, ...]
    """Scaling and its batch: `weak 8`, per replica; `strong 32`, global."""
    gpus: tuple[int, ...]
    reason: str
    """Without the strategy's name where it is the subject of the sentence: equal for all."""


def skipped_points(skipped: Sequence[SkippedSizes]) -> list[SkippedPoints]:
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
        series.setdefault(alike, []).append(f"{skip.scaling} {skip.batch_size:,}")
    strategies: dict[SkippedPoints, list[str]] = {}
    for one, found in series.items():
        alike = replace(one, strategies=(), series=tuple(dict.fromkeys(found)))
        strategies.setdefault(alike, []).extend(one.strategies)
    return [replace(one, strategies=tuple(found)) for one, found in strategies.items()]
