"""How the size to buy is picked by each goal, from the points of one piece of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reports.analysis.cost import NO_EPOCH, CellCost
from reports.analysis.effect import effect_text
from reports.analysis.figures import CellFigures
from reports.analysis.goal import Goal, GoalKind
from reports.analysis.knee import Knee, knee
from reports.analysis.pieces import Piece, ties
from reports.analysis.scaling import Curve, Efficiency
from reports.analysis.training import differences_in_training
from reports.text import count, duration, listed, metric, percent

LEFT_OUT = "what the curves end in trains in another way, or is not proven"
UNPROVEN = "not proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point that may be bought."""

    strategy: str
    figures: CellFigures
    efficiency: Efficiency
    cost: CellCost

    @property
    def gpus(self) -> int:
        return self.figures.cell.gpus

    @property
    def rate(self) -> float:
        return self.figures.samples_per_s.value

    @property
    def name(self) -> str:
        return f"{self.strategy} on {self.gpus:,}"

    @property
    def device_ns(self) -> float:
        """Time of all devices for a million samples: the cost, but for the price of a device."""
        return self.cost.million_samples_ns.value * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """A candidate with the reasons for it."""

    candidate: Candidate
    why: str
    deciding: tuple[CellFigures, ...]
    """Beside the candidate."""
    open: tuple[str, ...] = ()
    """What the runs leave open, clauses."""
    shown_to: int | None = None
    """The last size up to which every growth is shown to pay, where that is smaller than the candidate."""
    or_more: bool = False


def candidates_of(piece: Piece, costs: dict[str, CellCost]) -> tuple[list[Candidate], tuple[str, ...]]:
    """The points that may be bought, once each, and those that may not, with the reason."""
    found: dict[str, Candidate] = {}
    left_out: dict[str, None] = {}
    precisions = {point.figures.cell.precision for _, point in piece.measured}
    for curve, point in piece.measured:
        strategy, figures = curve.key.label, point.figures
        refused = _refused(figures, differences_in_training(figures, precisions))
        if refused is not None:
            left_out[f"{strategy} on {figures.cell.gpus:,} ({refused})"] = None
        else:
            found.setdefault(
                figures.cell.id,
                Candidate(
                    strategy=strategy,
                    figures=figures,
                    efficiency=point.efficiency,
                    cost=costs[figures.cell.id],
                ),
            )
    return list(found.values()), tuple(left_out)


def _refused(figures: CellFigures, differences: Sequence[str]) -> str | None:
    if figures.proof is None:
        return UNPROVEN
    return f"it {listed(differences)}" if differences else None


def _by_knee(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked | str:
    """Of the knees of all curves the fastest; of those that are not shown to be slower the smallest."""
    ends = {}
    reasons: dict[str, None] = {}
    for curve in piece.curves:
        stop = knee(curve)
        end = _end(curve, stop, candidates)
        if end is not None:
            ends[end.figures.cell.id] = (end, curve, stop)
        elif stop.reason is not None:
            reasons[stop.reason] = None
    if not ends:
        return f"no growth can be judged: {listed(list(reasons) or [LEFT_OUT])}"
    chosen, curve, stop = ends[
        _smallest_of_fastest([end for end, *_ in ends.values()], goal.smallest).figures.cell.id
    ]
    sizes = {one.cell.gpus: one for one in curve.figures}
    left_open = [one for one in stop.deciding if one.is_open]
    spans = [f"from {one.smaller:,} to {one.larger:,}" for one in left_open]
    telling = [one for one in stop.deciding if one is stop.beyond or one.larger == chosen.gpus or one.is_open]
    return Picked(
        candidate=chosen,
        why=stop.text,
        deciding=tuple(sizes[size] for one in telling for size in (one.smaller, one.larger)),
        open=(f"it is open whether growing {listed(spans)} pays",) if spans else (),
        shown_to=left_open[0].smaller if left_open else None,
        or_more=stop.at is None,
    )


def _end(curve: Curve, stop: Knee, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate at a curve's knee or, without one, at its largest claimed size."""
    if not stop.growths:
        return None
    size = stop.growths[-1].larger if stop.at is None else stop.at
    ids = {one.cell.id for one in curve.figures if one.cell.gpus == size}
    return next((one for one in candidates if one.figures.cell.id in ids), None)


def _smallest_of_fastest(candidates: Sequence[Candidate], smallest: float) -> Candidate:
    fastest = max(candidates, key=lambda one: one.rate)
    level = [one for one in candidates if one is fastest or ties(fastest.figures, one.figures, smallest)]
    return min(level, key=lambda one: (one.gpus, -one.rate))


def _by_throughput(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked:
    chosen = _smallest_of_fastest(candidates, goal.smallest)
    fastest = max(candidates, key=lambda one: one.rate)
    others = [one for one in candidates if one is not chosen]
    runner_up = max(others, key=lambda one: one.rate)
    why = f"the highest throughput of {count(len(candidates), 'point')}"
    if fastest is not chosen:
        why = f"no point is shown to be faster; the highest throughput is that of {fastest.name}"
    return Picked(
        candidate=chosen,
        why=f"{why}, {metric(chosen.figures.throughput)}",
        deciding=tuple({id(one): one.figures for one in (fastest, runner_up)}.values()),
        open=() if fastest is chosen else (f"{fastest.name} may be faster",),
        or_more=chosen.gpus == max(one.gpus for one in candidates),
    )


def _by_cost(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked:
    priced = all(one.cost.usd_per_million_samples is not None for one in candidates)
    lowest = min(map(_usd_or_time, candidates))
    level = [one for one in candidates if _usd_or_time(one) <= lowest * (1 + goal.smallest)]
    chosen = max(level, key=lambda one: one.rate)
    return Picked(
        candidate=chosen,
        why=f"{_cost_text(chosen, priced)} a million samples, the lowest of {count(len(candidates), 'point')}"
        + ("" if len(level) == 1 else f" within {effect_text(goal.smallest)}, and the fastest of these"),
        deciding=tuple(one.figures for one in sorted(candidates, key=_usd_or_time)[:2]),
    )


def _by_time(piece: Piece, candidates: Sequence[Candidate], goal: Goal) -> Picked | str:
    assert goal.limit is not None
    limit_ns = goal.limit * 1e9
    epochs = {one.figures.cell.id: one.cost.epoch_ns for one in candidates}
    known = {key: epoch for key, epoch in epochs.items() if epoch is not None}
    if len(known) < len(epochs):
        return NO_EPOCH
    in_time = [one for one in candidates if known[one.figures.cell.id].value <= limit_ns]
    fastest = max(candidates, key=lambda one: one.rate)
    if not in_time:
        least = duration(known[fastest.figures.cell.id].value)
        return (
            f"no measured point finishes an epoch within {duration(limit_ns)}; the fastest, "
            f"{fastest.name}, takes {least}"
        )
    chosen = min(in_time, key=lambda one: (_usd_or_time(one), -one.rate))
    epoch = known[chosen.figures.cell.id]
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
    shares = {id(one): one.efficiency.metric for one in candidates}
    known = [(one, share) for one in candidates if (share := shares.get(id(one))) is not None]
    enough = [one for one, share in known if share.value >= goal.limit]
    if not enough:
        return f"no measured point has an efficiency of {percent(goal.limit)} or more that can be claimed"
    chosen = max(enough, key=lambda one: (one.gpus, one.rate))
    share = shares[id(chosen)]
    assert share is not None
    unsure = (share.low or share.value) < goal.limit
    maybe = [
        one.name
        for one, other in known
        if one.gpus > chosen.gpus and (other.high or other.value) >= goal.limit
    ]
    against = chosen.efficiency.baseline
    why = f"its efficiency is {metric(share)} against {against.short}" if against else "it is the baseline"
    return Picked(
        candidate=chosen,
        why="it is the baseline itself" if chosen.efficiency.is_baseline else why,
        deciding=(against.figures,) if against else (),
        open=(
            *(("its interval reaches below the limit",) if unsure else ()),
            *((f"{listed(maybe)} may reach it too",) if maybe else ()),
        ),
        or_more=chosen.gpus == max(one.gpus for one in candidates),
    )


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
