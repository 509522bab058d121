"""From a request to a plan: every point of the matrix becomes a cell of a series, or a skip with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as with_fields

from harness.plan.auto import AUTO, Choice, choose, lighter
from harness.plan.estimate import certain_bytes, predicted_bytes, unpredicted
from harness.plan.points import (
    GlobalBatches,
    Reason,
    included_points,
    micro_batch_of,
    misplaced,
    points,
    unlinkable,
    unsplittable,
    workloads_of,
)
from harness.plan.surroundings import MIB, Devices, Limit, Measured, Surroundings, devices_of
from results.cell import BASELINE_STRATEGY, Cell, Names, named
from results.errors import SpecError, UsageError
from results.notation import read_link
from results.plan import EXCLUDED, Pattern, Plan, Point, Request, Rule, Series, SeriesId, Skip
from results.registry import load
from strategies.catalog import OPTIMIZERS, group_layout
from strategies.refusal import refusal
from workloads import catalog as workloads
from workloads.datasets.facts import DATASETS
from workloads.source import file_hash

_OF_CELLS = tuple(axis for axis in Names.__struct_fields__ if axis in Cell.__struct_fields__)
"""The named axes that a cell has as they are; it has the rate of its link."""
_DOUBLINGS = 7
"""The advice for a cell that does not fit tries its number of workers, and doubles it up to 64 times."""


def expand(
    request: Request,
    *,
    study: str,
    created_at: str,
    earlier: Sequence[Plan] = (),
    limit: Limit | None = None,
    baseline: bool = False,
) -> Plan:
    """Make the plan of a request.

    With `baseline`, the plan and its request include `single` on one worker where that size was asked for,
    no point names `single`, and the strategies need more workers.

    `earlier` are the study's plans so far, oldest first; their strong series keep their global batch, and
    their points what `auto` chose.
    `limit` turns what does not fit into skips. A cell of an earlier plan is not skipped for its memory.
    Raises UsageError where a `py:` workload's source or a data file cannot be read.
    """
    builder = _PlanBuilder(request, GlobalBatches(request, earlier), limit or Limit())
    builder.planned = frozenset(cell.id for plan in earlier for cell in plan.cells)
    builder.kept = _kept_choices(earlier)
    for point, excluding in points(request):
        builder.add(point, excluding)
    if baseline and BASELINE_STRATEGY not in request.every_strategy:
        request = with_fields(request, include=(*request.include, *builder.add_baselines()))
    return Plan(
        study=study,
        created_at=created_at,
        request=request,
        cells=tuple(builder.cells.values()),
        series=tuple(builder.series()),
        skips=tuple(builder.skips),
        predicted_bytes=predicted_bytes(builder.cells.values(), request.gpus_per_node),
        unpredicted=unpredicted(builder.cells.values()),
    )


def auto_choices(plan: Plan, measured: Measured | None = None) -> list[tuple[Point, Choice]]:
    """Weigh the strategies again for each point of `auto`, except points that are skipped for other reasons.

    What the plan has chosen stays chosen.
    """
    if AUTO not in plan.request.every_strategy:
        return []
    limit = Limit(measured=measured or Measured())
    builder = _PlanBuilder(plan.request, GlobalBatches(plan.request, (plan,)), limit)
    builder.kept = _kept_choices((plan,))
    skipped = {skip.point for skip in plan.skips}
    weighed = []
    for point, excluding in points(plan.request):
        if point.strategy == AUTO and excluding is None:
            choice = builder.choice(point)
            if isinstance(choice, Choice) and (choice.chosen is None) == (point in skipped):
                weighed.append((point, choice))
    return weighed


def _kept_choices(plans: Iterable[Plan]) -> dict[Point, tuple[str, ...]]:
    """Map each point to the strategies that plans with `auto` have there: if such a plan also names some, the
    others, of which one is the choice, or all where it named the choice too."""
    kept: dict[Point, tuple[str, ...]] = {}
    for plan in plans:
        if AUTO not in plan.request.every_strategy:
            continue
        cells = {cell.id: cell.gpus for cell in plan.cells}
        there: dict[Point, list[str]] = {}
        for series in plan.series:
            for cell in series.cells:
                point = with_fields(series.point(cells[cell]), strategy=AUTO)
                there.setdefault(point, []).append(series.strategy)
        for point, names in there.items():
            unnamed = [name for name in names if name not in plan.request.every_strategy]
            kept.setdefault(point, tuple(unnamed or names))
    return kept


class _PlanBuilder:
    """Collects the cells, series and skips of a plan, point by point."""

    def __init__(self, request: Request, global_batches: GlobalBatches, limit: Limit) -> None:
        self.cells: dict[str, Cell] = {}
        self.skips: list[Skip] = []
        self._request = request
        self._global_batches = global_batches
        self._limit = limit
        self._bases = {workload: base_cell(request, workload) for workload in workloads_of(request)}
        self._members: dict[SeriesId, dict[int, str]] = {}
        self._fitting: dict[SeriesId, str] = {}
        self._weighed: dict[Point, str | None] = {}
        self.planned: frozenset[str] = frozenset()
        """Ids of cells that stay in the plan even if they do not fit."""
        self.kept: dict[Point, tuple[str, ...]] = {}
        """The strategies of which an earlier `auto` chose one, by point."""

    def add(self, point: Point, excluding: Pattern | None = None) -> None:
        """Add a point as a cell of its series, or as a skip; `excluding` is a pattern that leaves it out."""
        if excluding is not None:
            axes = ", ".join(f"{axis} {value}" for axis, value in excluding.axes.items())
            self._skip(point, Reason("excluded", f"{EXCLUDED}: {axes}"))
            return
        if point.strategy == AUTO:
            choice = self.choice(point)
            if isinstance(choice, Reason) or choice.chosen is None:
                self._skip(point, choice if isinstance(choice, Reason) else Reason("auto", choice.reason))
                return
            point = with_fields(point, strategy=choice.chosen.strategy)
        cell = self._cell(point)
        if isinstance(cell, Cell):
            cell = self._unfit(point, cell) or cell
        if isinstance(cell, Reason):
            self._skip(point, cell)
            return
        self.cells.setdefault(cell.id, cell)
        self._members.setdefault(point.series_id, {})[point.gpus] = cell.id

    def _skip(self, point: Point, why: Reason) -> None:
        axes = msgspec.structs.asdict(point)
        self.skips.append(Skip(**axes, reason=why.text, rule=why.rule, predicate=why.predicate))

    def add_baselines(self) -> list[Pattern]:
        """Add `single` for the work of series that cannot have size 1. Return the added points."""
        lacking = (skip for skip in self.skips if skip.gpus == 1 and skip.rule in ("strategy", "groups"))
        larger = {(key.workload, key.batch_size, key.scaling) for key in self._members}
        added = []
        for work in dict.fromkeys((skip.workload, skip.batch_size, skip.scaling) for skip in lacking):
            workload, batch_size, scaling = work
            pattern = Pattern(
                workload=workload, strategy=BASELINE_STRATEGY, gpus=1, batch_size=batch_size, scaling=scaling
            )
            [point] = included_points(with_fields(self._request, include=(pattern,)))
            cell = self._cell(point)
            fits = isinstance(cell, Cell) and self._unfit(point, cell) is None
            if work in larger and point.series_id not in self._members and fits:
                self.add(point)
                added.append(pattern)
        return added

    def _unfit(self, point: Point, cell: Cell) -> Reason | None:
        """Return why a cell certainly does not fit into a GPU; None if it may fit or is already planned."""
        for batch in self._request.batches or ():
            if batch.basis == "nothing fits" and batch.series == point.series_id:
                return Reason("memory", f"no batch fits: {batch.why}; {self._what_fits(point, cell)}")
        memory = self._limit.gpu_bytes
        if memory is None or cell.id in self.planned:
            return None
        need = certain_bytes(cell, self._request.gpus_per_node)
        if need <= memory:
            return None
        text = f"{cell.workload} with {cell.strategy} needs at least {need / MIB:,.0f} MiB of a GPU's"
        instead = self._what_fits(point, cell)
        return Reason("memory", f"{text} {memory / MIB:,.0f}: {instead}; --keep-unfit measures it anyway")

    def _what_fits(self, point: Point, cell: Cell) -> str:
        """Name the options that fit by prediction: the cheapest change of the cell, or for the first size of
        a series that does not fit another strategy, maybe on more workers."""
        devices = replace(self._limit.gpus or devices_of(self._request), measured=self._limit.measured)
        around = Surroundings.of(cell, devices, self._request.gpus_per_node)
        if (changed := lighter(cell, around)) is not None:
            return changed
        key = point.series_id
        if key in self._fitting:
            return self._fitting[key]
        advice = "give more workers, and a strategy that shards"
        for gpus in (point.gpus << doubled for doubled in range(_DOUBLINGS)):
            larger = with_fields(point, strategy=AUTO, gpus=gpus)
            if larger not in self._weighed:
                choice = self.choice(larger, self._limit.gpus)
                self._weighed[larger] = choice.lightest if isinstance(choice, Choice) else None
            if (options := self._weighed[larger]) is not None:
                advice = f"{options} --gpus {gpus} fits by prediction"
                break
        self._fitting[key] = advice
        return advice

    def choice(self, point: Point, gpus: Devices | None = None) -> Choice | Reason:
        """Return what `auto` chooses for a point on `gpus` (default: the request's), or why it cannot."""

        def made(strategy: str) -> Cell | Reason:
            return self._cell(with_fields(point, strategy=strategy))

        devices = replace(gpus or devices_of(self._request), measured=self._limit.measured)
        per_node = self._request.gpus_per_node
        found = choose(self._probe(point), made, devices=devices, gpus_per_node=per_node)
        if isinstance(found, Reason):
            return found
        now = found.chosen.strategy if found.chosen is not None else None
        had = self.kept.get(point, ())
        return replace(found, kept=now if now in had else next(iter(had), None))

    def series(self) -> Iterable[Series]:
        for key, cells in self._members.items():
            yield Series(
                kind=key.scaling,
                **named(key),
                batch_size=key.batch_size,
                global_batch=self._global_batches.of(key) if key.scaling == "strong" else None,
                cells=tuple(cells[gpus] for gpus in sorted(cells)),
            )

    def _cell(self, point: Point) -> Cell | Reason:
        """Return the cell of a point, or the reason for a skip: first what makes no sense, last what is
        unfit."""
        probe = self._probe(point)
        try:
            groups = group_layout(probe.strategy, probe.gpus, probe.node_size)
        except SpecError as error:
            return Reason("groups", str(error))
        probe = with_fields(probe, model_parallel=groups.model_parallel)
        if point.scaling == "weak":
            micro_batch = micro_batch_of(point.batch_size, accumulation=probe.accumulation)
        else:
            micro_batch = micro_batch_of(
                self._global_batches.of(point.series_id),
                accumulation=probe.accumulation,
                replicas=probe.replicas,
            )
        if isinstance(micro_batch, str):
            return _refused_by_strategy(probe) or Reason("batch", micro_batch)
        cell = with_fields(probe, micro_batch=micro_batch)
        if (refused := _refused_by_strategy(cell)) is not None:
            return refused
        found: tuple[tuple[Rule, str | None], ...] = (
            ("network", unlinkable(cell)),
            ("workload", workloads.refusal(cell, trains=self._limit.trains)),
            ("split", unsplittable(cell)),
        )
        senseless = next((Reason(rule, text) for rule, text in found if text is not None), None)
        return senseless or self._misfit(cell) or cell

    def _probe(self, point: Point) -> Cell:
        """Return the cell of a point without its micro-batch and the ranks of a replica."""
        axes = {axis: getattr(point, axis) for axis in _OF_CELLS}
        return with_fields(
            self._bases[point.workload], **axes, link_mbit_per_s=read_link(point.link), gpus=point.gpus
        )

    def _misfit(self, cell: Cell) -> Reason | None:
        try:
            why = misplaced(cell, self._request.gpus_per_node)
        except UsageError as error:
            why = str(error)
        if why is not None:
            return Reason("nodes", why)
        if cell.link_mbit_per_s is not None and self._limit.link is not None:
            return Reason("link", self._limit.link)
        beyond = self._limit.reason(cell.gpus) or self._limit.arithmetic(cell)
        return None if beyond is None else Reason("machine", beyond)


def base_cell(request: Request, workload: str) -> Cell:
    """Return what all cells of one workload share. Strategy, gpus and batch are still to be set."""
    spec = workloads.WORKLOADS.parse(workload)
    known = workloads.facts(spec)
    folder = Path(request.source_folder or ".")
    file = DATASETS.facts(request.dataset).file
    return Cell(
        workload=workload,
        dataset=request.dataset,
        strategy=BASELINE_STRATEGY,
        gpus=1,
        micro_batch=1,
        device=request.device,
        backend=request.backend,
        node_size=request.node_size,
        optimizer=request.optimizer or OPTIMIZERS.parse(workloads.MEMBERS[spec.name].optimizer).text,
        accumulation=request.accumulation,
        precision=request.precision,
        clip_norm=request.clip_norm,
        activation_checkpointing=request.activation_checkpointing,
        compile=request.compile,
        memory_format=request.memory_format,
        seed=request.seed,
        env=request.env,
        memory_limit_mb=request.memory_limit_mb,
        steps=request.steps,
        source_hash=None if known.hashed_by is None else load(known.hashed_by)(str(spec.positional), folder),
        dataset_hash=None if file is None else file_hash(folder / file),
    )


def _refused_by_strategy(cell: Cell) -> Reason | None:
    refused = refusal(cell)
    return None if refused is None else Reason("strategy", refused.text, refused.predicate)
