"""How far a curve of a workload goes, and which part of a step takes the time where it stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reports.analysis.budget import (
    LOSS_NAMES,
    RESIDUAL_ABOVE,
    BudgetPart,
    Lost,
    budget,
    change,
    lost,
    why_no_budget,
)
from reports.analysis.knee import knee
from reports.analysis.scaling import CurvePoint, Named, is_measured
from reports.text import duration, listed, percent
from results.cell import UNCOMPRESSED
from results.plan import Scaling
from results.statistics import Metric

LITTLE = 0.1
"""Share of a step up to which a loss is called little, and is not attributed to a part (10 %)."""
NO_BASELINE = "it has no baseline to compare with"
COMPRESSING = f"{LOSS_NAMES['compute']} with encoding and decoding"
"""The name of slower computation where a compressor runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One curve: how well it does at its largest size, where growing stops to pay, and why."""

    scaling: Scaling
    strategy: str
    gpus: int
    """Its largest measured size."""
    efficiency: Metric | None
    """There; None for the baseline itself, and where none is claimed."""
    against: str | None
    """The baseline of the efficiency: `single on 1`."""
    knee: int | None
    """The last size up to which every growth pays; None if no growth does, or all do."""
    knee_text: str
    lost_on: str
    """The cell whose step is divided: the first beyond the knee, or else the largest."""
    lost_gpus: int
    lost_share: float | None
    """The share of its step that is lost against the baseline's computation; None if that is unknown."""
    lost_to: BudgetPart | None
    """The part that takes most of that; None where little is lost, or the parts do not explain it."""
    cause: str
    """A clause on the lost time, or on why it is unknown."""


def reach(named: Named) -> Reach | None:
    """How far the curve of a point goes; None if fewer than two of its sizes were measured."""
    curve, stop = named[0], knee(named[0])
    measured = [point for point in curve.points if is_measured(point)]
    if len(measured) < 2 and not (stop.growths and measured):
        return None
    largest = measured[-1]
    beyond = stop.beyond.larger if stop.beyond else None
    point = next((one for one in measured if one.gpus == beyond), largest)
    found = _lost(point)
    share, part = (found.share, _blamed(found)) if isinstance(found, Lost) else (None, None)
    return Reach(
        scaling=curve.key.kind,
        strategy=curve.key.label,
        gpus=largest.gpus,
        efficiency=largest.efficiency.claimed,
        against=largest.efficiency.against,
        knee=stop.at,
        knee_text=stop.text,
        lost_on=point.cell.id,
        lost_gpus=point.gpus,
        lost_share=share,
        lost_to=part,
        cause=_cause(point, found),
    )


def _lost(point: CurvePoint) -> Lost | str:
    """The time that a step loses against the baseline's computation, or why it is unknown."""
    claim = point.efficiency
    if claim.baseline is None or claim.metric is None or claim.is_baseline:
        return claim.reason or NO_BASELINE
    if not claim.metric.tells:
        return "the runs are too far apart"
    here, ideal = budget(point.figures), budget(claim.baseline)
    if here is None or ideal is None:
        return str(why_no_budget(point.figures if here is None else claim.baseline))
    return lost(here, ideal)


def _blamed(loss: Lost) -> BudgetPart | None:
    """The largest part, unless little is lost, or the parts miss the step by too much."""
    off, part = abs(loss.part_ns["other"]), loss.largest
    missed = off > RESIDUAL_ABOVE * loss.budget.step_ns and off > loss.part_ns[part] / 2
    return None if missed or loss.share < LITTLE else part


def _cause(point: CurvePoint, loss: Lost | str) -> str:
    if isinstance(loss, str):
        return f"unknown: {loss}"
    share = f"{percent(max(0.0, loss.share))} of a step on {point.gpus:,}"
    if loss.share < LITTLE:
        return f"little: {share}"
    told = f"{share} against {point.efficiency.against}"
    part = _blamed(loss)
    if part is None:
        return f"{told}; the cause is unknown: {change(loss.part_ns['other'], loss.budget.step_ns)}"
    parts = list(_parts(point, loss))
    if len(parts) > 1:
        return f"{told}; the runs do not show which part is the largest: {listed(parts)}"
    most = "most of it" if loss.part_ns[part] > loss.total_ns / 2 else "the largest part of it"
    return f"{told}, {most} {parts[0]}{'' if loss.shown(part) else ', which is not shown to be above zero'}"


def _parts(point: CurvePoint, loss: Lost) -> Iterator[str]:
    """The largest part and its rivals, the largest first; the rivals and it with their ends."""
    encodes = point.cell.compression != UNCOMPRESSED
    every = (loss.largest, *loss.rivals)
    for part in sorted(every, key=lambda one: -loss.part_ns[one]):
        low, high = loss.ends_ns(part)
        ends = f", {duration(low)} to {duration(high)}" if len(every) > 1 else ""
        words = COMPRESSING if encodes and part == "compute" else LOSS_NAMES[part]
        yield f"{words} ({duration(loss.part_ns[part])}{ends})"
