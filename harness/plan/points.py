"""The points of a matrix: the product of its axes, without what is excluded, with what is included.

The batch rule of a point is here, too: what one replica computes at once, under weak and under strong
scaling; and why a cell makes no sense on its nodes, under its link, or with its model split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from results.cell import BASELINE_STRATEGY, Cell
from results.errors import SpecError, UsageError
from results.groups import GroupLayout
from results.parts import Unknown
from results.plan import Pattern, Plan, Point, Request, Rule, SeriesId, placement_of
from strategies.catalog import COLLECTIVES, STRATEGIES
from strategies.context.facts import uneven
from strategies.facts import StrategyFacts, uneven_tokens
from workloads.catalog import MEMBERS, WORKLOADS, facts
from workloads.shape import WorkloadFacts


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a point has no cell. Reasons of one rule say the same of other sizes or options."""

    rule: Rule
    text: str
    predicate: str | None = None
    """The rest of a sentence whose subject is the name of the strategy, where one rule refuses several
    strategies."""


MOST_POINTS = 200_000
"""More cells than anyone runs; planning this number takes seconds."""


def points(request: Request) -> Iterator[tuple[Point, Pattern | None]]:
    """Every requested point once, with the pattern that excludes it; the points of a series together.

    An included point is never excluded. Raises UsageError for a matrix of more than MOST_POINTS, before it
    has grown, and for an exclude pattern that names what no point has.
    """
    keys = list(series_of(request))
    _require_excluded(request, keys)
    count = len(keys) * len(request.gpus) + len(request.include)
    if count > MOST_POINTS:
        raise UsageError(f"the matrix has {count} points, at most {MOST_POINTS} are planned; narrow an axis")
    included = dict.fromkeys(included_points(request))
    for key in keys:
        for gpus in request.gpus:
            point = Point(**msgspec.structs.asdict(key), gpus=gpus)
            if point not in included:
                yield point, next((one for one in request.exclude if one.matches(point)), None)
    for point in included:
        yield point, None


def _require_excluded(request: Request, keys: Sequence[SeriesId]) -> None:
    """Raise UsageError if an exclude pattern names a value that no point has."""
    axes: dict[str, list[object]] = {"gpus": list(request.gpus)}
    for name in SeriesId.__struct_fields__:
        axes[name] = list(dict.fromkeys(getattr(key, name) for key in keys))
    for number, pattern in enumerate(request.exclude):
        for name, wanted in pattern.axes.items():
            if wanted not in axes[name]:
                raise UsageError(
                    f"exclude[{number}]: no point of the matrix has {name} {wanted}; "
                    f"it has {', '.join(map(str, axes[name]))}"
                )


def workloads_of(request: Request) -> tuple[str, ...]:
    """The workloads of the axis and of the included points."""
    included = [pattern.workload for pattern in request.include if pattern.workload is not None]
    return tuple(dict.fromkeys([*request.workloads, *included]))


def series_of(request: Request) -> Iterator[SeriesId]:
    """The series of a request's axes, each once; of `--batch-size auto` those that have a batch."""
    if request.batches is not None:
        yield from _series_of_batches(request)
        return
    names = [name for name in SeriesId.__struct_fields__ if name not in ("workload", "batch_size")]
    for workload in request.workloads:
        own = request.batch_sizes or (MEMBERS[WORKLOADS.parse(workload).name].batch,)
        for values in product(*map(request.values, names)):
            axes = dict(zip(names, values, strict=True))
            if not STRATEGIES.facts(axes["strategy"]).applies(workload):
                continue
            for batch_size in (axes["scaling"] == "strong" and request.global_batch_sizes) or own:
                yield SeriesId(workload=workload, batch_size=batch_size, **axes)


def _series_of_batches(request: Request) -> Iterator[SeriesId]:
    """The series of `--batch-size auto`, and the plain baselines of those that have a batch."""
    batches = [one.series for one in request.batches or ()]
    if BASELINE_STRATEGY in request.strategies:
        found = [one.series for one in request.batches or () if one.work and one.basis != "nothing fits"]
        batches += [
            SeriesId(
                workload=series.workload,
                strategy=BASELINE_STRATEGY,
                scaling=series.scaling,
                batch_size=series.batch_size,
            )
            for series in found
        ]
    yield from dict.fromkeys(batches)


def included_points(request: Request) -> Iterator[Point]:
    """The points that a request includes in addition to the product of its axes."""
    for pattern in request.include:
        for scaling in (pattern.scaling,) if pattern.scaling else request.scalings:
            yield Point(**{**pattern.axes, "scaling": scaling})


class GlobalBatches:
    """The constant global batch of each strong series.

    The request's own `global_batch_sizes`, else the batch size times the largest count of workers. The
    study's first plan decides for good, so that a larger matrix later extends its series.
    """

    def __init__(self, request: Request, earlier: Sequence[Plan]) -> None:
        self._own = frozenset(request.global_batch_sizes)
        self._largest = max(request.gpus)
        self._earlier: dict[tuple[str, int], int] = {}
        for plan in earlier:
            # Series of global batch sizes are named by their global batch, not by a batch size.
            for series in () if plan.request.global_batch_sizes else plan.series:
                if series.global_batch is not None:
                    self._earlier.setdefault((series.workload, series.batch_size), series.global_batch)

    def of(self, key: SeriesId) -> int:
        """Samples of one update over all replicas."""
        if self._own:
            return key.batch_size
        fixed = self._earlier.get((key.workload, key.batch_size))
        return key.batch_size * self._largest if fixed is None else fixed


def micro_batch_of(batch: int, *, accumulation: int, replicas: int | None = None) -> int | str:
    """Samples of one micro-batch of one replica, or the reason why the batch does not divide.

    `batch` is the batch per replica, or with `replicas` the global batch.
    """
    parts = accumulation * (replicas or 1)
    if batch % parts == 0:
        return batch // parts
    if replicas is None:
        return (
            f"{batch} samples of a replica do not divide into {accumulation} equal micro-batches "
            f"(accumulation {accumulation})"
        )
    shares = f"{replicas} replicas" + (f" x {accumulation} micro-batches" if accumulation > 1 else "")
    return f"a global batch of {batch} samples does not divide over {shares}"


def unsplittable(cell: Cell) -> str | None:
    """Why a cell's model cannot be split as its strategy wants, for the report; None if it can.

    Unknown facts of a workload refuse no cell: see `unchecked`.
    """
    strategy = STRATEGIES.facts(cell.strategy)
    known = facts(WORKLOADS.parse(cell.workload))
    blocks, least = known.blocks, known.minimum_batch
    stages = strategy.groups(cell.gpus, cell.node_size).pipeline
    if stages > 1 and not isinstance(known.parts, Unknown) and not known.parts.chained:
        return (
            f"{cell.workload} is not a chain of modules, which a pipeline needs; a strategy that "
            f"shards parameters takes any model"
        )
    if stages > 1 and known.uncut is not None:
        return known.uncut
    if not isinstance(blocks, Unknown) and (reason := strategy.unfit(cell, blocks)) is not None:
        return reason
    if known.batch_norm is True and cell.device == "cpu" and strategy.gathers_bf16:
        return f"on CPU torch has no BatchNorm for {cell.strategy}: leave params=bf16 out"
    if not isinstance(least, Unknown) and cell.micro_batch // strategy.microbatches < least:
        return f"BatchNorm of {cell.workload} needs at least {least} samples in a microbatch"
    groups = strategy.groups(cell.gpus, cell.node_size)
    if reason := (
        _undivided(cell, known, strategy)
        or _uneven_sequence(cell, known, strategy, groups)
        or _undealt(cell, known, groups)
    ):
        return reason
    if groups.tensor > 1 and not isinstance(known.heads, Unknown):
        if not known.heads:
            return f"{cell.workload} has no layers that tensor parallelism knows how to split"
        uneven = next((count for count in known.heads if count % groups.tensor), None)
        if uneven is not None:
            return f"{uneven} attention heads of {cell.workload} do not divide by {groups.tensor}"
    return None


def _undealt(cell: Cell, known: WorkloadFacts, groups: GroupLayout) -> str | None:
    """Why the experts of a workload cannot be dealt among ranks; None if they can, or if it is not known."""
    if groups.expert == 1 or isinstance(known.parts, Unknown):
        return None
    if not known.parts.experts:
        return f"{cell.workload} has no experts, which {cell.strategy} deals among ranks: leave ep out"
    uneven = next((count for count in known.parts.experts if count % groups.expert), None)
    return None if uneven is None else f"{uneven} experts of {cell.workload} do not divide by {groups.expert}"


def _undivided(cell: Cell, known: WorkloadFacts, strategy: StrategyFacts) -> str | None:
    """Why a workload needs complete sequences, or steps of all replicas, that the strategy divides; None if
    it does not."""
    unfit, promise = f"{cell.workload} does not fit {cell.strategy}", strategy.promise
    if known.undivided is not None and (strategy.attention or strategy.splits_tokens):
        return f"{unfit}, which divides sequences: {known.undivided}"
    if known.together is not None and not promise.averages_all_gradients(promise.after):
        return f"{unfit}, whose replicas take steps apart: {known.together}"
    return None


def _uneven_sequence(
    cell: Cell, known: WorkloadFacts, strategy: StrategyFacts, groups: GroupLayout
) -> str | None:
    """Why the sequences of a workload cannot be split over ranks; None if they can, or if it is not known."""
    attention, splits = strategy.attention, strategy.splits_tokens
    if attention is None and not splits:
        return None
    if isinstance(known.unit, Unknown) or isinstance(known.units_per_sample, Unknown):
        return None
    if known.unit != "tokens":
        return f"{cell.workload} has no sequence of tokens, which {cell.strategy} splits"
    pieces = groups.tensor * groups.context if splits else 1
    reason = uneven_tokens(known.units_per_sample, pieces)
    if attention is not None:
        reason = uneven(attention, groups, known.units_per_sample, _query_heads(known)) or reason
    return None if reason is None else f"{cell.workload} does not fit {cell.strategy}: {reason}"


def _query_heads(known: WorkloadFacts) -> int | None:
    return None if isinstance(known.heads, Unknown) or not known.heads else known.heads[0]


def unchecked(cell: Cell) -> str | None:
    """Say which split of a cell planning cannot check, and why; None if it checks everything."""
    strategy, known = STRATEGIES.facts(cell.strategy), facts(WORKLOADS.parse(cell.workload))
    groups = strategy.groups(cell.gpus, cell.node_size)
    splits = groups.tensor * groups.context > 1
    asked = known.blocks if strategy.by_blocks else known.heads
    if not isinstance(asked, Unknown) or not (strategy.by_blocks or splits):
        return None
    return f"whether {cell.strategy} can split {cell.workload} is {asked}; its ranks find out"


def misplaced(cell: Cell, gpus_per_node: int | None) -> str | None:
    """Why a cell makes no sense on its nodes, real or virtual; None if it does, or does not go by nodes.

    Raises UsageError if the workers do not fill whole nodes.
    """
    real = placement_of(cell, gpus_per_node).gpus_per_node
    size = min(cell.node_size or real, real)
    collective, strategy = COLLECTIVES.facts(cell.collective), STRATEGIES.facts(cell.strategy)
    if collective.by_nodes and not 1 < size < cell.gpus:
        here = "here every rank is a node" if size == 1 else f"{cell.gpus} ranks are one node"
        # Two nodes of two ranks are the fewest that have both.
        way_out = "give --node-size" if cell.gpus >= 4 else "use at least 4 ranks"
        return f"{collective.name} exchanges within nodes and across them, and {here}; {way_out}"
    try:
        return strategy.misplaced(strategy.groups(cell.gpus, size), size)
    except SpecError as error:
        return str(error)


def unlinkable(cell: Cell) -> str | None:
    """Why a cell's link makes no sense, as a sentence for the report; None if it does, or without a link."""
    if cell.link_mbit_per_s is None:
        return None
    if cell.device != "cpu":
        return "a link is emulated only for CPU ranks"
    if cell.gpus == 1:
        return f"{cell.strategy} has no network"
    if cell.node_size is not None and cell.gpus <= cell.node_size:
        return f"{cell.gpus} ranks are on one virtual node of {cell.node_size}: nothing goes over its link"
    return None
