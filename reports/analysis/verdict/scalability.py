"""How far one workload scales by one rule, and which part of a step loses the time where it scales least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reports.analysis.budget import RESIDUAL_ABOVE, BudgetPart, budget, lost, why_no_budget
from reports.analysis.figures import differences_in_training, training_of
from reports.analysis.knee import Growth, knee
from reports.analysis.scaling import Curve, Named, is_measured, name, piece_of, rate, ties
from reports.analysis.study import StudyFigures
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED, Device, Precision
from results.plan import Scaling
from results.run import BudgetMethod
from results.statistics import Metric

LITTLE = 0.1
"""Share of a step up to which a loss is called little, and is not attributed to a part (10 %)."""
NO_BASELINE = "it has no baseline to compare with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One measured point of a curve."""

    strategy: str
    compresses: bool
    """Whether a compressor encodes and decodes within its steps."""
    gpus: int
    device: Device
    throughput: Metric
    efficiency: Metric | None
    """None for the baseline itself, and where none is claimed."""
    against: str | None
    """The baseline of the efficiency: `single on 1`."""
    ties: tuple[str, ...]
    """Other points to which no difference is shown: `scratch-ddp on 8`."""
    compared: int
    """The number of points that it was chosen from, with itself."""
    fewest_runs: int
    """The fewest runs of it and of all that it was compared with."""
    unlike: tuple[str, ...]
    """Differences from plain data parallelism in how it trains: see `figures.differences_in_training`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPart:
    """The share of one part in the time that a step loses."""

    part: BudgetPart
    ns: float
    low_ns: float
    """The smallest over the runs, and the largest."""
    high_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dominant:
    """The part that takes most of the lost time, where a step loses most: see `budget.Lost`."""

    cell_id: str
    gpus: int
    step_ns: float
    lost_ns: float
    part: BudgetPart | None
    """The part; None where little is lost."""
    part_ns: float
    """The time of the part in the loss; 0 without a part."""
    shown: bool
    """Whether the part is above zero by more than its interval."""
    contenders: tuple[LostPart, ...]
    """The part and others that may be larger, the largest first; empty if the part leads all others."""
    other_ns: float
    """Step time less the sum of its parts."""
    method: BudgetMethod
    against: str
    """The baseline, whose computation is the ideal: `single on 1`."""

    @property
    def lost_share(self) -> float:
        return self.lost_ns / self.step_ns

    @property
    def part_share(self) -> float:
        """The share of the part in the loss; above 1 where other parts are below the baseline's."""
        return self.part_ns / self.lost_ns

    @property
    def blames(self) -> bool:
        """Whether the loss is attributed to a part: not if the parts miss the step by too much."""
        off = abs(self.other_ns)
        return self.part is not None and not (off > RESIDUAL_ABOVE * self.step_ns and off > self.part_ns / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far the curve of a configuration goes, and why it stops."""

    configuration: Configuration
    """At the curve's largest measured size."""
    knee: int | None
    """The last size up to which every growth of the curve pays; None if no growth does."""
    beyond: int | None
    """The size at which growing did not pay."""
    knee_text: str
    dominant: Dominant | None
    dominant_absent: str | None
    """Why the part that loses the time is unknown; None if it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalability:
    """One piece of work, scaled by one rule: the fastest of the pieces with most measured sizes."""

    kind: Scaling
    batch: int
    """The batch of a replica under weak scaling, and of all replicas under strong scaling."""
    setting: str
    fastest: Configuration | None
    """None where every figure is emulated."""
    largest: Reach | None
    """The fastest at the largest measured size; None if only one size was measured."""
    dense: Reach | None
    """The fastest of plain data parallelism, at its largest size; None if it is `largest`."""
    super_linear: tuple[str, ...]
    """Super-linear points: `ddp on 4`."""
    others: int
    """The number of other pieces of work of the workload and kind (other batches, settings, links)."""


def scalability(study: StudyFigures, workload: str, kind: Scaling) -> Scalability | None:
    """How a workload scales by one rule; None if no such series has a figure."""
    piece = piece_of(study.curves, workload, kind)
    if piece is None:
        return None
    points = piece.measured
    sizes = {point.gpus for _, point in points}
    at_largest = [named for named in points if named[1].gpus == max(sizes)] if len(sizes) > 1 else []
    lead = max(at_largest, key=rate, default=None)
    of_kind = (one for one in study.curves if (one.key.workload, one.key.kind) == (workload, kind))
    precisions = {point.figures.cell.precision for one in of_kind for point in one.points}
    plain = []
    if lead and not _is_dense(lead):
        # Plain data parallelism, at the largest size at which it has an efficiency.
        dense = [named for named in points if _is_dense(named) and not named[1].efficiency.is_baseline]
        plain = [named for named in dense if named[1].gpus == max(other.gpus for _, other in dense)]
    key, smallest = piece.curves[0].key, study.assumptions.smallest_effect
    return Scalability(
        kind=kind,
        batch=key.constant_batch,
        setting=study.settings[key.setting],
        fastest=_configuration(max(points, key=rate), points, precisions, smallest) if points else None,
        largest=_reach(lead, at_largest, precisions, smallest) if lead else None,
        dense=_reach(max(plain, key=rate), plain, precisions, smallest) if plain else None,
        super_linear=tuple(name(named) for named in points if named[1].efficiency.super_linear),
        others=piece.others,
    )


def _is_dense(named: Named) -> bool:
    """Whether complete gradients are exchanged in every step, by the backend's own collectives."""
    key = named[0].key
    return (
        key.strategy != BASELINE_STRATEGY
        and (key.compression, key.collective) == (UNCOMPRESSED, DEFAULT_COLLECTIVE)
        and training_of(named[1].figures).averages_all_gradients
    )


def reach_of(study: StudyFigures, workload: str, kind: Scaling, strategy: str) -> Reach | None:
    """How far the curve of one strategy goes; None if fewer than two of its sizes were measured."""
    piece = piece_of(study.curves, workload, kind)
    points = [named for named in piece.measured if named[0].key.label == strategy] if piece else []
    if len(points) < 2:
        return None
    precisions = {point.figures.cell.precision for _, point in points}
    smallest = study.assumptions.smallest_effect
    return _reach(max(points, key=lambda named: named[1].gpus), points[-1:], precisions, smallest)


def _reach(lead: Named, among: Sequence[Named], precisions: Iterable[Precision], smallest: float) -> Reach:
    stop = knee(lead[0])
    dominant, absent = _dominant(lead[0], stop.beyond)
    return Reach(
        configuration=_configuration(lead, among, precisions, smallest),
        knee=stop.at,
        beyond=stop.beyond.larger if stop.beyond else None,
        knee_text=stop.text,
        dominant=dominant,
        dominant_absent=absent,
    )


def _configuration(
    best: Named, among: Sequence[Named], precisions: Iterable[Precision], smallest: float
) -> Configuration:
    curve, point = best
    claim = point.efficiency
    return Configuration(
        strategy=curve.key.label,
        compresses=curve.key.compression != UNCOMPRESSED,
        gpus=point.gpus,
        device=point.figures.cell.device,
        throughput=point.figures.throughput,
        efficiency=None if claim.is_baseline else claim.metric,
        against=claim.baseline.short if claim.baseline and not claim.is_baseline else None,
        ties=tuple(
            name(other)
            for other in among
            if other is not best and ties(point.figures, other[1].figures, smallest)
        ),
        compared=len(among),
        fewest_runs=min(len(other.figures.runs) for _, other in among),
        unlike=differences_in_training(point.figures, precisions),
    )


def _dominant(curve: Curve, beyond: Growth | None) -> tuple[Dominant | None, str | None]:
    """The dominant part at the first size beyond the knee, or else at the largest; or why it is unknown."""
    measured = [point for point in curve.points if is_measured(point)]
    point = next((one for one in measured if beyond and one.gpus == beyond.larger), measured[-1])
    claim = point.efficiency
    baseline = claim.baseline
    if baseline is None or claim.metric is None or claim.is_baseline:
        return None, claim.reason or NO_BASELINE
    here, ideal = budget(point.figures), budget(baseline.figures)
    if here is None or ideal is None:
        return None, why_no_budget(point.figures if here is None else baseline.figures)
    loss = lost(here, ideal)
    part, contenders = None if loss.share < LITTLE else loss.largest, []
    for one in (loss.largest, *loss.rivals) if part and loss.rivals else ():
        low, high = loss.ends_ns(one)
        contenders.append(LostPart(part=one, ns=loss.part_ns[one], low_ns=low, high_ns=high))
    found = Dominant(
        cell_id=point.figures.cell.id,
        gpus=point.gpus,
        step_ns=here.step_ns,
        lost_ns=loss.total_ns,
        part=part,
        part_ns=loss.part_ns[part] if part else 0.0,
        shown=part is None or loss.shown(part),
        contenders=tuple(sorted(contenders, key=lambda one: one.ns, reverse=True)),
        other_ns=here.part_ns["other"],
        method=here.method,
        against=baseline.short,
    )
    return found, None
