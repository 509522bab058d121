"""The points of a matrix: the product of its axes, without what is excluded, with what is included.

The batch rule of a point is here, too: what one replica computes at once, under weak and under strong
scaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED
from results.errors import UsageError
from results.notation import NO_LINK
from results.plan import Pattern, Plan, Request, Rule, SeriesId, Skip, named
from strategies.catalog import STRATEGIES
from workloads.catalog import MEMBERS, WORKLOADS


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
_AXES = ("workload", "strategy", "compression", "collective", "link", "batch_size", "scaling")
"""Fields that name a series, and that a pattern can name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPoint:
    """One point of the matrix: a cell under one rule of scaling, before it is known to make sense."""

    key: SeriesId
    gpus: int
    excluded_by: Pattern | None = None

    def skip(self, reason: Reason) -> Skip:
        key = self.key
        return Skip(
            **named(key),
            gpus=self.gpus,
            batch_size=key.batch_size,
            scaling=key.scaling,
            reason=reason.text,
            rule=reason.rule,
            predicate=reason.predicate,
        )


def points(request: Request) -> Iterator[MatrixPoint]:
    """Every requested point once, the points of a series together; an included point is never excluded.

    Raises UsageError for a matrix of more than MOST_POINTS, before it has grown, and for an exclude
    pattern that names what no point has.
    """
    keys = list(series_of(request))
    axes: dict[str, list[object]] = {
        name: list(dict.fromkeys(getattr(key, name) for key in keys)) for name in _AXES
    }
    axes["gpus"] = list(request.gpus)
    for number, pattern in enumerate(request.exclude):
        for name, values in axes.items():
            wanted = getattr(pattern, name)
            if wanted is not None and wanted not in values:
                raise UsageError(
                    f"exclude[{number}]: no point of the matrix has {name} {wanted}; "
                    f"it has {', '.join(map(str, values))}"
                )
    count = len(keys) * len(request.gpus) + len(request.include)
    if count > MOST_POINTS:
        raise UsageError(f"the matrix has {count} points, at most {MOST_POINTS} are planned; narrow an axis")
    included = dict.fromkeys(included_points(request))
    for key in keys:
        for gpus in request.gpus:
            point = MatrixPoint(key=key, gpus=gpus)
            if point not in included:
                excluding = (
                    pattern
                    for pattern in request.exclude
                    if pattern.gpus in (None, gpus)
                    and all(getattr(pattern, axis) in (None, getattr(key, axis)) for axis in _AXES)
                )
                yield MatrixPoint(key=key, gpus=gpus, excluded_by=next(excluding, None))
    yield from included


def workloads_of(request: Request) -> tuple[str, ...]:
    """The workloads of the axis and of the included points."""
    included = [pattern.workload for pattern in request.include if pattern.workload is not None]
    return tuple(dict.fromkeys([*request.workloads, *included]))


def series_of(request: Request) -> Iterator[SeriesId]:
    """The series of a request's axes, each once; of `--batch-size auto` those that have a batch."""
    if request.batches is not None:
        batches = [one.series for one in request.batches]
        if BASELINE_STRATEGY in request.strategies:
            batches += [
                replace(
                    one.series,
                    strategy=BASELINE_STRATEGY,
                    compression=UNCOMPRESSED,
                    collective=DEFAULT_COLLECTIVE,
                    link=NO_LINK,
                )
                for one in request.batches
                if one.work and one.basis != "nothing fits"
            ]
        yield from dict.fromkeys(batches)
        return
    axes = (request.compressions, request.collectives, request.links, request.scalings)
    for workload in request.workloads:
        own = request.batch_sizes or (MEMBERS[WORKLOADS.parse(workload).name].batch,)
        named = [name for name in request.strategies if STRATEGIES.facts(name).applies(workload)]
        for strategy, compression, collective, link, scaling in product(named, *axes):
            for batch_size in (scaling == "strong" and request.global_batch_sizes) or own:
                yield SeriesId(
                    workload=workload,
                    strategy=strategy,
                    compression=compression,
                    collective=collective,
                    link=link,
                    scaling=scaling,
                    batch_size=batch_size,
                )


def included_points(request: Request) -> Iterator[MatrixPoint]:
    """The points that a request includes in addition to the product of its axes."""
    for pattern in request.include:
        assert pattern.workload is not None
        assert pattern.strategy is not None
        assert pattern.gpus is not None
        assert pattern.batch_size is not None
        for scaling in (pattern.scaling,) if pattern.scaling else request.scalings:
            key = SeriesId(
                workload=pattern.workload,
                strategy=pattern.strategy,
                compression=pattern.compression or UNCOMPRESSED,
                collective=pattern.collective or DEFAULT_COLLECTIVE,
                link=pattern.link or NO_LINK,
                scaling=scaling,
                batch_size=pattern.batch_size,
            )
            yield MatrixPoint(key=key, gpus=pattern.gpus)


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
