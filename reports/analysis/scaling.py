"""How a series scales: throughput and efficiency by size, against two named baselines.

Efficiency = X(n) n0 / (X(n0) n) with X the throughput in samples a second: 1 is a line through the
baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reports.analysis.effect import side
from reports.analysis.figures import EMULATED, CellFigures, OfCell
from reports.analysis.outcomes import Failure
from reports.analysis.pooling import differing, machine_facts
from reports.analysis.series import MergedSeries, SeriesKey
from results.cell import DEFAULT_COLLECTIVE, UNCOMPRESSED, StepPolicy
from results.grouping import grouped
from results.notation import NO_LINK
from results.plan import Scaling
from results.run import NOT_PROVEN
from results.statistics import Metric, ratio_of_runs

SINGLE_RUN_NOISE = 0.05
"""The distance above 1 from which an efficiency without an interval is called super-linear (5 %)."""

NOT_REACHED = "the study has not grown to it (--until)"
"""Why a cell without a figure has not failed."""

Failures = Mapping[str, Failure]
"""The cells without figures, by their ids."""


@dataclass(frozen=True, slots=True)
class NoClaim:
    """Why no efficiency is claimed."""

    short: str
    """The reason in a table: `emulated`."""
    detail: str | None = None

    def __str__(self) -> str:
        return self.short if self.detail is None else f"{self.short}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """One efficiency, or why none is claimed."""

    metric: Metric | None
    baseline: CellFigures | None
    """The cell that it is measured against."""
    no_claim: NoClaim | None = None
    """Why `metric` is None."""
    is_baseline: bool = False
    """Whether the point is its own baseline, and so 1 by definition."""

    @property
    def reason(self) -> str | None:
        """Why `metric` is None, in one string."""
        return None if self.no_claim is None else str(self.no_claim)

    @property
    def claimed(self) -> Metric | None:
        """The efficiency; None for the baseline itself, and where none is claimed."""
        return None if self.is_baseline else self.metric

    @property
    def against(self) -> str | None:
        """The baseline: `single on 1`; None for the baseline itself, and without one."""
        return None if self.is_baseline or self.baseline is None else self.baseline.name

    @property
    def super_linear(self) -> bool:
        """Whether the point lies above 1 by more than its noise."""
        share = self.claimed
        if share is None:
            return False
        return share.value > 1 + SINGLE_RUN_NOISE if share.low is None else share.low > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint(OfCell):
    """One size of a curve with figures."""

    own: Efficiency
    """The efficiency against the smallest size of the same series."""
    single: Efficiency
    """The efficiency against the best single device of the same work."""

    @property
    def gpus(self) -> int:
        return self.figures.cell.gpus

    @property
    def efficiency(self) -> Efficiency:
        """The efficiency for a headline: against the single device, or else against the series' own
        baseline."""
        return self.own if self.single.baseline is None else self.single


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One size of a curve without figures."""

    gpus: int
    outcome: str | None
    """How it failed, or `not run`; None if it was planned not to run."""
    reason: str
    """Why figures are missing, with the outcome if it has one."""

    @property
    def skipped(self) -> bool:
        """Whether it was planned not to run; otherwise it failed or did not run yet."""
        return self.outcome is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One series: its points, its gaps, and the single device of the same work."""

    key: SeriesKey
    points: tuple[CurvePoint, ...]
    gaps: tuple[Gap, ...]
    single: CellFigures | None

    @property
    def figures(self) -> list[CellFigures]:
        """The figures of the single device and of the points."""
        return [*filter(None, [self.single]), *(point.figures for point in self.points)]


def curves(
    series: Sequence[MergedSeries], figures: Mapping[str, CellFigures], failures: Failures
) -> list[Curve]:
    """The curve of each series, from the figures of its cells."""
    singles = _best_singles(series, figures)
    found = []
    for one in series:
        single = singles.get(one.key.work)
        there = [figures[cell.id] for cell in one.cells.values() if cell.id in figures]
        own = there[0] if there else None
        gaps = [Gap(gpus=gpus, outcome=None, reason=why) for gpus, why in one.skips.items()]
        for gpus, cell in one.cells.items():
            if cell.id not in figures:
                failure = failures.get(cell.id)
                outcome, reason = (failure.outcome, failure.text) if failure else (None, NOT_REACHED)
                gaps.append(Gap(gpus=gpus, outcome=outcome, reason=reason))
        points = tuple(
            CurvePoint(
                figures=point,
                own=efficiency(point, own, without="no size of this series has a result"),
                single=efficiency(point, single, without="no single device ran the same work"),
            )
            for point in there
        )
        gaps.sort(key=lambda gap: gap.gpus)
        found.append(Curve(key=one.key, points=points, gaps=tuple(gaps), single=single))
    return found


def efficiency(figures: CellFigures, baseline: CellFigures | None, *, without: str) -> Efficiency:
    """X(n) n0 / (X(n0) n) from the run step times; `without` is the reason that is given without a baseline.

    With T the step time and W the samples of a step: (W(n) / W(n0)) (n0 / n) (T(n0) / T(n)).
    """
    if baseline is None:
        return Efficiency(metric=None, baseline=None, no_claim=NoClaim(without))
    no_claim: NoClaim | None
    if figures.no_claim == EMULATED:
        stand_in = "a stand-in (shared cores, virtual nodes, a link) makes no efficiency claim"
        no_claim = NoClaim(EMULATED, stand_in)
    elif figures.no_claim is not None:
        no_claim = NoClaim(figures.no_claim, figures.pool.unproven)
    elif baseline.no_claim is not None:
        no_claim = NoClaim(f"the baseline is {baseline.no_claim}")
    else:
        no_claim = unlike_conditions(figures, baseline)
    if no_claim is not None:
        return Efficiency(metric=None, baseline=baseline, no_claim=no_claim)
    if figures.cell.id == baseline.cell.id:
        one = Metric(value=1.0, unit="ratio", low=None, high=None, samples=len(figures.runs), interval=None)
        return Efficiency(metric=one, baseline=baseline, is_baseline=True)
    work = figures.cell.global_batch / baseline.cell.global_batch
    scale = work * baseline.cell.gpus / figures.cell.gpus
    ratio = ratio_of_runs(baseline.run_step_ns, figures.run_step_ns, "ratio")
    return Efficiency(metric=ratio.times(scale), baseline=baseline)


def _best_singles(
    series: Sequence[MergedSeries], figures: Mapping[str, CellFigures]
) -> dict[tuple[object, ...], CellFigures]:
    """The fastest plain one-device cell of each piece of work; one that makes claims is preferred.

    Series that differ only in their exchange do the same work and share this cell: one device has no network.
    """
    best: dict[tuple[object, ...], CellFigures] = {}
    for one in series:
        key, cell = one.key, one.cells.get(1)
        plain = (key.compression, key.collective, key.link) == (UNCOMPRESSED, DEFAULT_COLLECTIVE, NO_LINK)
        if cell is None or cell.id not in figures or not plain:
            continue
        those = (best.get(key.work, figures[cell.id]), figures[cell.id])
        best[key.work] = min(those, key=lambda one: (one.no_claim is not None, one.step_ns.value))
    return best


def unlike_conditions(figures: CellFigures, baseline: CellFigures) -> NoClaim | None:
    """The machine, software or code in which the runs of two cells differ; None if they agree."""
    first, second = figures.newest.environment, baseline.newest.environment
    if first is None or second is None:
        return NoClaim("the environment is unknown")
    both = first.code.packages.keys() & second.code.packages.keys()
    facts = differing(
        machine_facts(first) | {name: first.code.packages[name] for name in both},
        machine_facts(second) | {name: second.code.packages[name] for name in both},
    )
    if not facts:
        return None
    named = "; ".join(f"{name}: {here} here, {there} there" for name, (here, there) in facts.items())
    return NoClaim("not comparable with the baseline", named)


Named = tuple[Curve, CurvePoint]
"""A point and its curve, which has its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The curves of a workload under one rule that do the same work over one network."""

    curves: tuple[Curve, ...]
    """The curves with a figure; one at least."""
    others: int
    """Pieces of the same workload and rule (other batches, settings, links)."""

    @property
    def work(self) -> tuple[object, ...]:
        """The work, its rule and its network: the same in two studies of equal work."""
        key = self.curves[0].key
        setting = tuple(pair for pair in key.setting if pair[0] not in StepPolicy.__struct_fields__)
        return key.workload, key.kind, key.constant_batch, setting, key.link

    @property
    def measured(self) -> list[Named]:
        """The points that make claims, curve by curve."""
        return [(curve, point) for curve in self.curves for point in curve.points if is_measured(point)]

    @property
    def unproven(self) -> list[Named]:
        """The measured points that make no claim because they are not proven, curve by curve."""
        every = [(curve, point) for curve in self.curves for point in curve.points]
        return [named for named in every if named[1].figures.no_claim == NOT_PROVEN]


def piece_of(curves: Iterable[Curve], workload: str, kind: Scaling) -> Piece | None:
    """The piece of a workload under one rule; None if no such series has a figure."""
    of_kind = [curve for curve in curves if (curve.key.workload, curve.key.kind) == (workload, kind)]
    found = pieces(of_kind)
    if not found:
        return None

    def worth(piece: Piece) -> tuple[int, float]:
        """Measured sizes first, then throughput."""
        sizes = {point.gpus for _, point in piece.measured}
        return len(sizes), max(map(rate, piece.measured), default=0.0)

    return replace(max(found, key=worth), others=len(found) - 1)


def pieces(curves: Iterable[Curve]) -> list[Piece]:
    """All pieces of the curves, in reading order."""
    found = grouped(((*curve.key.work, curve.key.link), curve) for curve in curves if curve.points)
    return [Piece(curves=tuple(those), others=0) for those in found.values()]


def is_measured(point: CurvePoint) -> bool:
    """Whether a point makes claims: it is not emulated, and its proof did not fail."""
    return point.figures.no_claim is None


def rate(named: Named) -> float:
    return named[1].figures.rate


def of_largest_batch(points: Sequence[Named]) -> list[Named]:
    """Return the points of one size that train on the most samples a step: others are not compared with them.

    Under weak scaling, ranks that share a replica train on fewer samples.
    """
    largest = max((point.cell.global_batch for _, point in points), default=0)
    return [named for named in points if named[1].cell.global_batch == largest]


def ties(best: CellFigures, other: CellFigures, smallest: float) -> bool:
    """Whether the runs of two cells do not show that `best` has the higher throughput by at least the share
    `smallest`."""
    work = best.cell.global_batch / other.cell.global_batch
    faster = ratio_of_runs(other.run_step_ns, best.run_step_ns, "ratio").times(work)
    return faster.value <= 1 + SINGLE_RUN_NOISE if faster.low is None else side(faster, smallest) != "faster"
