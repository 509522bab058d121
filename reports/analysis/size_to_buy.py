"""The size to buy: which strategy on how many devices a study recommends by its goal, and how surely.

Each goal picks a size from the points of one piece of work. By default that is the knee of a curve, the
last size up to which every growth pays: `reports.analysis.knee`. A size is recommended of GPUs alone, of
measured points whose training was proven, where more than one size was measured: ranks on CPU share the
cores of a machine, and stand-ins are not what one buys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reports.analysis.assumptions import Goal, GoalKind
from reports.analysis.cost import EMULATED, NO_EPOCH, CellCost, cell_costs
from reports.analysis.effect import effect_text
from reports.analysis.figures import CellFigures, differences_in_training
from reports.analysis.holes import Hole, holes, neighbours, range_text
from reports.analysis.knee import LEAST_RUNS, Knee, knee
from reports.analysis.scaling import Curve, CurvePoint, Piece, piece_of, ties
from reports.analysis.study import StudyFigures
from reports.text import count, devices, duration, listed, metric, percent, whole_percent
from results.cell import UNCOMPRESSED, Device, label
from results.plan import Scaling
from results.run import NOT_PROVEN
from results.statistics import FEWEST_FOR_INTERVAL, Metric

LEFT_OUT = "what the curves end in trains in another way, or is not proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(CurvePoint):
    """A point that may be bought."""

    cost: CellCost

    @property
    def device_ns(self) -> float:
        """Time for a million samples, summed over devices; times the price of a device, it is the cost."""
        return self.cost.million_samples_ns.value * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """A candidate with the reasons for it."""

    candidate: Candidate
    why: str
    deciding: tuple[CellFigures, ...]
    """The other cells whose runs decide the choice."""
    open: tuple[str, ...] = ()
    """Clauses on what the runs leave open."""
    knee: Knee | None = None
    """The knee of the candidate's curve; None for other goals."""
    curve: Curve | None = None
    """The curve of that knee."""
    or_more: bool = False

    @property
    def cells(self) -> list[CellFigures]:
        """The cells that decide the choice, once each: its own, and those that it is compared with."""
        return list({one.cell.id: one for one in (self.candidate.figures, *self.deciding)}.values())

    @property
    def fewest_runs(self) -> int:
        """The fewest runs of a deciding cell."""
        return min(len(one.runs) for one in self.cells)

    @property
    def has_few(self) -> bool:
        """Whether the choice rests on too few runs a size. The odds of a study by rounds count them."""
        by_rounds = self.candidate.figures.pool.by_rounds
        return self.fewest_runs < (LEAST_RUNS if by_rounds else FEWEST_FOR_INTERVAL)


def candidates_of(piece: Piece, costs: dict[str, CellCost]) -> tuple[list[Candidate], tuple[str, ...]]:
    """The points that may be bought, once each, and those that may not, with the reason."""
    found: dict[str, Candidate] = {}
    left_out: dict[str, None] = {}
    measured = [point.cell for _, point in piece.measured]
    for _, point in (*piece.measured, *piece.unproven):
        figures, cost = point.figures, costs[point.cell.id]
        refused = _refused(figures, differences_in_training(figures, measured))
        if refused is not None:
            left_out[f"{figures.name} ({refused})"] = None
        elif figures.cell.id not in found:
            found[figures.cell.id] = Candidate(figures=figures, own=point.own, single=point.single, cost=cost)
    return list(found.values()), tuple(left_out)


def _refused(figures: CellFigures, differences: Sequence[str]) -> str | None:
    if not figures.proven and not figures.accepted:
        return NOT_PROVEN
    return f"it {listed(differences)}" if differences else None


def _by_knee(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked | str:
    """Pick the fastest knee of all curves, or the smallest that is not shown to be slower.

    Several curves may stop at their single device. Growing pays if it does on one of them, so that the
    curve with the best next step decides.
    """
    stops = [(curve, knee(curve)) for curve in piece.curves]
    ends = [(end, curve, stop) for curve, stop in stops if (end := _end(curve, stop, candidates)) is not None]
    if not ends:
        reasons = dict.fromkeys(stop.reason for _, stop in stops if stop.reason is not None)
        return f"no growth can be judged: {listed(list(reasons) or [LEFT_OUT])}"
    chosen = _smallest_of_fastest([end for end, *_ in ends], goal.smallest)
    _, curve, stop = max(
        (one for one in ends if one[0] is chosen),
        key=lambda one: one[2].beyond.marginal.value if one[2].beyond else math.inf,
    )
    return Picked(
        candidate=chosen,
        why=stop.text,
        deciding=_of_growths(curve, stop, chosen.gpus),
        open=(f"resamples of the runs name {_instead(stop.instead)}",) if stop.instead else (),
        knee=stop,
        curve=curve,
        or_more=stop.at is None,
    )


def _of_growths(curve: Curve, stop: Knee, size: int) -> tuple[CellFigures, ...]:
    """The cells of the growths that decide a knee: to its size, beyond it, and beyond others with odds."""
    sizes = {one.cell.gpus: one for one in curve.figures}
    return tuple(
        sizes[end]
        for one in stop.growths
        if one is stop.beyond or one.larger == size or one.smaller in stop.instead
        for end in (one.smaller, one.larger)
    )


def _end(curve: Curve, stop: Knee, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate at a curve's knee or, without one, at its largest claimed size."""
    ids = {one.cell.id for one in curve.figures if one.cell.gpus == stop.size}
    return next((one for one in candidates if one.cell.id in ids), None)


def _instead(odds: Mapping[int, float]) -> str:
    """`1 GPU in 6 % and 128 GPUs in 20 %`."""
    return listed([f"{count(size, 'GPU')} in {whole_percent(share)}" for size, share in odds.items()])


def _smallest_of_fastest(candidates: Sequence[Candidate], smallest: float) -> Candidate:
    fastest = max(candidates, key=lambda one: one.figures.rate)
    level = [one for one in candidates if one is fastest or ties(fastest.figures, one.figures, smallest)]
    return min(level, key=lambda one: (one.gpus, -one.figures.rate))


def _by_throughput(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked:
    chosen = _smallest_of_fastest(candidates, goal.smallest)
    fastest = max(candidates, key=lambda one: one.figures.rate)
    others = [one for one in candidates if one is not chosen]
    runner_up = max(others, key=lambda one: one.figures.rate)
    why = f"the highest throughput of {count(len(candidates), 'point')}"
    if fastest is not chosen:
        why = f"no point is shown to be faster; the highest throughput is that of {fastest.figures.name}"
    return Picked(
        candidate=chosen,
        why=f"{why}, {metric(chosen.figures.throughput)}",
        deciding=tuple({id(one): one.figures for one in (fastest, runner_up)}.values()),
        open=() if fastest is chosen else (f"{fastest.figures.name} may be faster",),
        or_more=chosen.gpus == max(one.gpus for one in candidates),
    )


def _by_cost(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked:
    priced = all(one.cost.usd_per_million_samples is not None for one in candidates)
    lowest = min(map(_usd_or_time, candidates))
    level = [one for one in candidates if _usd_or_time(one) <= lowest * (1 + goal.smallest)]
    chosen = max(level, key=lambda one: one.figures.rate)
    return Picked(
        candidate=chosen,
        why=f"{_cost_text(chosen, priced)} a million samples, the lowest of {count(len(candidates), 'point')}"
        + ("" if len(level) == 1 else f" within {effect_text(goal.smallest)}, and the fastest of these"),
        deciding=tuple(one.figures for one in sorted(candidates, key=_usd_or_time)[:2]),
    )


def _by_time(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked | str:
    assert goal.limit is not None
    limit_ns = goal.limit * 1e9
    epochs = {one.cell.id: one.cost.epoch_ns for one in candidates}
    known = {key: epoch for key, epoch in epochs.items() if epoch is not None}
    if len(known) < len(epochs):
        return NO_EPOCH
    in_time = [one for one in candidates if known[one.cell.id].value <= limit_ns]
    fastest = max(candidates, key=lambda one: one.figures.rate)
    if not in_time:
        least = duration(known[fastest.figures.cell.id].value)
        return (
            f"no measured point finishes an epoch within {duration(limit_ns)}; the fastest, "
            f"{fastest.figures.name}, takes {least}"
        )
    chosen = min(in_time, key=lambda one: (_usd_or_time(one), -one.figures.rate))
    epoch = known[chosen.cell.id]
    late = (epoch.high or epoch.value) > limit_ns
    priced = chosen.cost.usd_per_epoch
    paid = f" for {metric(priced).value}" if priced else ""
    return Picked(
        candidate=chosen,
        why=f"an epoch of {chosen.cost.epoch_samples:,} samples takes {duration(epoch.value)}{paid}, the "
        f"cheapest of {count(len(in_time), 'point')} in time",
        deciding=(chosen.figures,),
        open=("its interval reaches beyond the limit",) if late else (),
    )


def _by_efficiency(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked | str:
    assert goal.limit is not None
    known = [(one, share) for one in candidates if (share := one.efficiency.metric) is not None]
    enough = [pair for pair in known if pair[1].value >= goal.limit]
    if not enough:
        return f"no measured point has an efficiency of {percent(goal.limit)} or more that can be claimed"
    chosen, share = max(enough, key=lambda pair: (pair[0].gpus, pair[0].figures.rate))
    against = chosen.efficiency.against
    larger = {one.figures.name: other for one, other in known if one.gpus > chosen.gpus}
    return Picked(
        candidate=chosen,
        why=f"its efficiency is {metric(share)} against {against}"
        if against
        else "it is the baseline itself",
        deciding=(chosen.efficiency.baseline,) if chosen.efficiency.baseline else (),
        open=_open_limit(share, goal.limit, larger),
        or_more=chosen.gpus == max(one.gpus for one in candidates),
    )


def _open_limit(share: Metric, limit: float, larger: Mapping[str, Metric]) -> tuple[str, ...]:
    """Name what the intervals of the choice and of the larger points, by their names, leave open."""
    below = ("its interval reaches below the limit",) if (share.low or share.value) < limit else ()
    maybe = [name for name, other in larger.items() if (other.high or other.value) >= limit]
    return (*below, f"{listed(maybe)} may reach it too") if maybe else below


PICK: Mapping[GoalKind, Callable[[Piece, Sequence[Candidate], Goal], Picked | str]] = {
    "knee": _by_knee,
    "throughput": _by_throughput,
    "cost": _by_cost,
    "time": _by_time,
    "efficiency": _by_efficiency,
}


def _usd_or_time(one: Candidate) -> float:
    """Dollars of a million samples; without a price the time of all devices, which orders points alike."""
    usd = one.cost.usd_per_million_samples
    return one.device_ns if usd is None else usd.value


def _cost_text(one: Candidate, priced: bool) -> str:
    if priced and one.cost.usd_per_million_samples is not None:
        return metric(one.cost.usd_per_million_samples).value
    return f"{duration(one.device_ns)} of all devices (no price is known)"


Confidence = Literal["high", "medium", "low"]
"""low: the size has odds below `LIKELY_FROM` (by other goals: the runs leave the choice open), or may lie
where sizes have no figure, or a size has one run. medium: odds below `SURE_FROM`, fewer than six runs a size,
or the choice rests on runs that were disturbed or of changed code. high: none of these."""
LIKELY_FROM = 0.8
CPU = "ranks on CPU share the cores of a machine"
ONE_SIZE = "one size alone was measured: at least two are needed to say whether growing pays"
NONE_PROVEN = "no measured cell has a proof that it trained: bench report --unproven chooses without one"
ONE_LEFT = "one size alone is left to choose from: the others train in another way, or are not proven"
OTHER_TRAINING = "all measured strategies train in another way than plain data parallelism"
ALL_EMULATED = EMULATED.partition(":")[0] + ": stand-ins say nothing of devices that one buys"


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """The recommended configuration."""

    cell_id: str
    strategy: str
    gpus: int
    device: Device
    odds: Mapping[int, float] | None
    """The share of resamples that name each measured size. Only the knee has it."""
    instead: Mapping[int, float]
    """The odds of other sizes; empty if the odds of `gpus` are at least `SURE_FROM`."""
    shown_to: int | None
    """The largest size that `SURE_FROM` of the resamples reach, if that is smaller than `gpus`."""
    or_more: bool
    """Whether it is the largest measured size, so that growing may pay beyond it. Only the knee has it."""
    between: str | None
    """The sizes at which the choice may lie because sizes have no figure; None if none is missing there."""
    throughput: Metric
    efficiency: Metric | None
    """None for the baseline itself, and where none is claimed."""
    against: str | None
    """The baseline of the efficiency: `single on 1`."""
    proven: bool
    """Whether it was proven that it trains; it may be bought without by `--unproven`."""
    epoch_ns: Metric | None
    usd_per_epoch: Metric | None

    @property
    def size(self) -> str:
        """`16 GPUs`; `64 GPUs or more`."""
        return f"{devices(self.gpus, self.device)}{' or more' if self.or_more else ''}"

    @property
    def doubt(self) -> str:
        """`128 GPUs in 20 % of resamples`; empty where the size is sure, or no odds are known."""
        odds = [f"{_instead(self.instead)} of resamples"] if self.instead else []
        return "; ".join([*([self.between] if self.between else []), *odds])

    @property
    def text(self) -> str:
        """`16 GPUs with ddp`; `64 GPUs with ddp (128 GPUs in 20 % of resamples)`."""
        return f"{self.size} {self.how}{f' ({self.doubt})' if self.doubt else ''}"

    @property
    def how(self) -> str:
        """`with ddp`; `with ddp, which is not proven`."""
        return f"with {self.strategy}{'' if self.proven else f', which is {NOT_PROVEN}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestsOn:
    """The measurements that a choice is made from."""

    cells: tuple[str, ...]
    """Ids of all cells that it was chosen from."""
    deciding: tuple[str, ...]
    """Ids of the cells that decide it: the choice, and the sizes that it is compared with."""
    runs: int
    """Counted runs of all cells."""
    fewest_runs: int
    """The fewest runs of a deciding cell."""
    disturbed: int
    """Runs, of all, that other processes disturbed."""
    dirty: int
    """Runs, of all, of code with local changes."""
    disturbed_out: int
    """Runs in addition to all, which are left out because other processes disturbed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeToBuy:
    """The recommendation of a study for one workload under one rule of scaling."""

    workload: str
    scaling: Scaling
    batch: int
    """The batch of a replica under weak scaling, else of all replicas."""
    goal: str
    """The goal that it is chosen by, a clause."""
    choice: Purchase | None = None
    absent: str | None
    """The reason for a missing choice; None if there is a choice."""
    why: str | None = None
    """Why this size, a clause."""
    confidence: Confidence | None = None
    doubts: tuple[str, ...] = ()
    """Clauses on what lowers the confidence."""
    rests_on: RestsOn | None = None
    left_out: tuple[str, ...]
    """Points that were not chosen from: `topk on 8 (compresses its gradients)`."""

    @property
    def text(self) -> str:
        """`16 GPUs with ddp`, or `none: ...`."""
        return self.choice.text if self.choice else f"none: {self.absent}"


def sizes_to_buy(study: StudyFigures) -> tuple[SizeToBuy, ...]:
    """The sizes of each workload under each rule that has a figure; workloads with a size come first."""
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    names = dict.fromkeys(one.cell.workload for one in study.cells.values())
    found = [
        _size_to_buy(study, piece, costs)
        for name in names
        for kind in KINDS
        if (piece := piece_of(study.curves, name, kind)) is not None
    ]
    return tuple(sorted(found, key=lambda one: one.choice is None))


KINDS: tuple[Scaling, ...] = ("weak", "strong")


def _size_to_buy(study: StudyFigures, piece: Piece, costs: dict[str, CellCost]) -> SizeToBuy:
    candidates, left_out = candidates_of(piece, costs)
    goal, key = study.assumptions.goal, piece.curves[0].key
    picked = _why_none(piece, candidates) or PICK[goal.kind](piece, candidates, goal)
    none = SizeToBuy(
        workload=key.workload,
        scaling=key.kind,
        batch=key.constant_batch,
        goal=goal.text,
        absent=picked if isinstance(picked, str) else None,
        left_out=left_out,
    )
    if isinstance(picked, str):
        return none
    holes = holes_of(study, piece, picked, candidates)
    between = range_text(holes, picked.candidate.cell.device) if holes else None
    rests_on = _rests_on(candidates, picked)
    doubts = _doubts(picked, rests_on, candidates, between)
    return replace(
        none,
        choice=_choice(picked, between),
        why=picked.why,
        confidence=_confidence(picked, doubts, between),
        doubts=doubts,
        rests_on=rests_on,
    )


def _why_none(piece: Piece, candidates: Sequence[Candidate]) -> str | None:
    """Why nothing can be recommended; None if something may."""
    measured = [point.figures for _, point in piece.measured or piece.unproven]
    reasons = {
        ALL_EMULATED: not measured,
        CPU: any(one.cell.device == "cpu" for one in measured),
        NONE_PROVEN: not any(one.proven or one.accepted for one in measured),
        OTHER_TRAINING: not candidates,
        ONE_SIZE: len({one.cell.gpus for one in measured}) < 2,
        ONE_LEFT: len({one.gpus for one in candidates}) < 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _choice(picked: Picked, between: str | None) -> Purchase:
    one = picked.candidate
    return Purchase(
        cell_id=one.cell.id,
        strategy=label(one.cell),
        gpus=one.gpus,
        device=one.cell.device,
        odds=picked.knee.odds if picked.knee else None,
        instead=picked.knee.instead if picked.knee else {},
        shown_to=picked.knee.shown_to if picked.knee else None,
        or_more=picked.or_more,
        between=between,
        throughput=one.figures.throughput,
        efficiency=one.efficiency.claimed,
        against=one.efficiency.against,
        proven=one.figures.proven,
        epoch_ns=one.cost.epoch_ns,
        usd_per_epoch=one.cost.usd_per_epoch,
    )


def _rests_on(candidates: Sequence[Candidate], picked: Picked) -> RestsOn:
    runs = [run for one in candidates for run in one.figures.runs]
    return RestsOn(
        cells=tuple(one.cell.id for one in candidates),
        deciding=tuple(one.cell.id for one in picked.cells),
        runs=len(runs),
        fewest_runs=picked.fewest_runs,
        disturbed=sum(run.disturbed for run in runs),
        dirty=sum(bool(run.environment and run.environment.code.dirty) for run in runs),
        disturbed_out=sum(one.figures.pool.disturbed_out for one in candidates),
    )


def _doubts(
    picked: Picked, rests_on: RestsOn, candidates: Sequence[Candidate], between: str | None
) -> tuple[str, ...]:
    disturbed, runs = rests_on.disturbed, rests_on.runs
    if picked.knee is not None:
        disturbed = sum(run.disturbed for one in picked.cells for run in one.runs)
        runs = sum(len(one.runs) for one in picked.cells)
    unproven = sum(one.figures.accepted for one in candidates)
    doubts = {
        f"{count(unproven, 'cell')} of {len(candidates):,} {NOT_PROVEN}": unproven,
        f"{count(rests_on.fewest_runs, 'run')} a size (fewer than {FEWEST_FOR_INTERVAL})": picked.has_few,
        f"{_part(disturbed, runs)} disturbed": disturbed,
        f"{_part(rests_on.dirty, rests_on.runs)} of code with local changes": rests_on.dirty,
    }
    return (*([between] if between else []), *picked.open, *(text for text, holds in doubts.items() if holds))


def holes_of(
    study: StudyFigures, piece: Piece, picked: Picked, candidates: Sequence[Candidate]
) -> tuple[Hole, ...]:
    """The sizes without a figure at which the choice may lie; without a knee these are its neighbours."""
    chosen = picked.candidate
    if picked.curve is None:
        own = [curve for curve in piece.curves if curve.key.label == label(chosen.cell)]
        return tuple(hole for curve in own if (hole := neighbours(curve, chosen.gpus)) is not None)
    ids = {one.cell.id for one in candidates}
    like = picked.curve.key
    rivals = [
        curve
        for curve in study.curves
        if (curve.key.work, curve.key.link) == (like.work, like.link)
        and (
            any(point.cell.id in ids for point in curve.points)
            # Without a figure, and exchanges all of its gradients.
            or (not curve.points and curve.key.compression == UNCOMPRESSED)
        )
    ]
    return holes(rivals, piece, picked.curve, chosen.figures.rate, chosen.gpus)


def _part(these: int, runs: int) -> str:
    """`3 of 12 runs`, `all 12 runs`."""
    return f"all {count(runs, 'run')}" if these == runs > 1 else f"{these:,} of {count(runs, 'run')}"


def _confidence(picked: Picked, doubts: Sequence[str], between: str | None) -> Confidence:
    odds = picked.knee.odds if picked.knee else None
    likely = odds[picked.candidate.gpus] >= LIKELY_FROM if odds else not picked.open
    if not likely or between or picked.fewest_runs == 1 or not picked.candidate.figures.proven:
        return "low"
    return "medium" if doubts else "high"
