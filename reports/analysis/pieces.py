"""The pieces of work of a study: the curves that do the same work by one rule, over one network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from reports.analysis.effect import side
from reports.analysis.figures import CellFigures
from reports.analysis.scaling import SINGLE_RUN_NOISE, Curve, CurvePoint, scaled
from results.cell import StepPolicy
from results.outcome import Evidence
from results.plan import Scaling
from results.statistics import ratio_of_runs

Named = tuple[Curve, CurvePoint]
"""A point, and the curve that says what it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a workload is judged by under one rule: of its pieces the one with most measured sizes."""

    curves: tuple[Curve, ...]
    """Those with a figure; one at least."""
    others: int
    """Pieces of the same workload and rule (other batches, settings, links)."""

    @property
    def work(self) -> tuple[object, ...]:
        """What is done, by which rule and over which network: the same in two studies of equal work."""
        key = self.curves[0].key
        setting = tuple(pair for pair in key.setting if pair[0] not in StepPolicy.__struct_fields__)
        return key.workload, key.kind, key.constant_batch, setting, key.link

    @property
    def measured(self) -> list[Named]:
        """The measured points, curve by curve."""
        return [(curve, point) for curve in self.curves for point in curve.points if is_measured(point)]


def piece_of(curves: Iterable[Curve], workload: str, kind: Scaling) -> Piece | None:
    """The piece of a workload under one rule; None if no such series has a figure."""
    of_kind = [curve for curve in curves if (curve.key.workload, curve.key.kind) == (workload, kind)]
    found = pieces(of_kind)
    if not found:
        return None
    best = max(found, key=lambda one: _worth(one.curves))
    return replace(best, others=len(found) - 1)


def pieces(curves: Iterable[Curve]) -> list[Piece]:
    """All of them, in reading order."""
    found: dict[tuple[object, ...], list[Curve]] = {}
    for curve in curves:
        if curve.points:
            found.setdefault((*curve.key.work, curve.key.link), []).append(curve)
    return [Piece(curves=tuple(those), others=0) for those in found.values()]


def _worth(curves: Iterable[Curve]) -> tuple[int, float]:
    """Measured sizes first, then throughput."""
    points = [point for curve in curves for point in curve.points if is_measured(point)]
    rates = [point.figures.samples_per_s.value for point in points]
    return len({point.gpus for point in points}), max(rates, default=0.0)


def is_measured(point: CurvePoint) -> bool:
    return point.figures.evidence is Evidence.MEASURED


def rate(named: Named) -> float:
    return named[1].figures.samples_per_s.value


def name(named: Named) -> str:
    """`ddp on 4`."""
    return f"{named[0].key.label} on {named[1].gpus:,}"


def ties(best: CellFigures, other: CellFigures, smallest: float) -> bool:
    """Whether the runs of two cells leave open which has the higher throughput, or it is not higher by the
    share `smallest`."""
    work = best.cell.global_batch / other.cell.global_batch
    faster = scaled(ratio_of_runs(other.run_step_ns, best.run_step_ns, "ratio"), work)
    return faster.value <= 1 + SINGLE_RUN_NOISE if faster.low is None else side(faster, smallest) != "above"
