from __future__ import annotations

from itertools import product

import msgspec
from builders import a_request
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plan.expand import expand
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Limit
from results.cell import Cell
from results.plan import Pattern, Plan, Request, Series, Skip, has_virtual_nodes, placement_of

WORKLOADS = ("mlp", "gpt-nano", "resnet18-32px")
STRATEGIES = ("single", "ddp", "ddp:bucket_mb=50.0")
COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)


def texts(*values: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True)


def _allowed(options: StudyFile) -> StudyFile:
    """Only what is in the matrix is excluded from it; real nodes hold whole virtual ones, and no links."""
    assert isinstance(options.gpus, list)
    kept = [pattern for pattern in options.exclude or () if pattern.gpus in options.gpus]
    per_node = options.gpus_per_node
    if per_node is not None and (options.link != ["none"] or per_node % (options.node_size or 1)):
        per_node = None
    return msgspec.structs.replace(options, exclude=kept, gpus_per_node=per_node)


REQUESTS = st.builds(
    StudyFile,
    workload=texts(*WORKLOADS),
    strategy=texts(*STRATEGIES),
    gpus=COUNTS,
    batch_size=COUNTS,
    scaling=texts("weak", "strong"),
    accumulation=st.integers(1, 3),
    compression=texts("none", "bf16", "topk:0.01"),
    collective=texts("default", "ring", "tree", "hierarchical"),
    link=st.just(["none"]) | texts("none", "1gbit", "100mbit"),
    gpus_per_node=st.none() | st.integers(1, 4),
    node_size=st.none() | st.integers(1, 4),
    exclude=st.lists(st.builds(Pattern, gpus=st.integers(1, 9)), max_size=2),
).map(lambda options: a_request(_allowed(options)))
LIMITS = st.none() | st.integers(1, 9).map(lambda devices: Limit(devices=devices, word="cores", hint="h"))


def planned(request: Request, *, limit: Limit | None = None, earlier: tuple[Plan, ...] = ()) -> Plan:
    return expand(request, study="s", created_at="t", limit=limit, earlier=earlier)


@settings(max_examples=150)
@given(request=REQUESTS, limit=LIMITS)
def test_every_point_of_the_matrix_is_in_one_series_or_one_skip(request, limit) -> None:
    plan = planned(request, limit=limit)
    cells = {cell.id: cell for cell in plan.cells}
    run = [(*_axes(s), s.kind, s.batch_size, cells[id].gpus) for s in plan.series for id in s.cells]
    not_run = [(*_axes(s), s.scaling, s.batch_size, s.gpus) for s in plan.skips]
    asked = product(
        request.workloads,
        request.strategies,
        request.compressions,
        request.collectives,
        request.links,
        request.scalings,
        request.batch_sizes,
        request.gpus,
    )
    assert sorted(run + not_run) == sorted(asked)
    assert all(skip.reason for skip in plan.skips)


@settings(max_examples=60)
@given(request=REQUESTS)
def test_a_series_is_what_its_cells_are_and_each_has_a_placement(request) -> None:
    plan = planned(request)
    cells = {cell.id: cell for cell in plan.cells}
    for series in plan.series:
        for cell in (cells[id] for id in series.cells):
            assert _axes(cell) == _axes(series)
            placement = placement_of(cell, request.gpus_per_node)
            assert placement.gpus == cell.gpus
            assert has_virtual_nodes(cell, placement) is (cell.id in plan.virtual_cells)
            # Nothing is under a link that nothing goes over.
            assert cell.link_mbit_per_s is None or placement.nodes > 1


def _axes(named: Series | Skip | Cell) -> tuple[str, ...]:
    return named.workload, named.strategy, named.compression, named.collective, named.link


@settings(max_examples=100)
@given(request=REQUESTS)
def test_cells_are_distinct_and_each_belongs_to_a_series(request) -> None:
    plan = planned(request)
    ids = [cell.id for cell in plan.cells]
    assert len(set(ids)) == len(ids)
    assert {id for series in plan.series for id in series.cells} == set(ids)
    assert all(series.cells for series in plan.series)


@settings(max_examples=100)
@given(request=REQUESTS)
def test_weak_keeps_the_batch_of_a_replica_and_strong_the_global_one(request) -> None:
    plan = planned(request)
    cells = {cell.id: cell for cell in plan.cells}
    for series in plan.series:
        members = [cells[id] for id in series.cells]
        assert [cell.gpus for cell in members] == sorted({cell.gpus for cell in members})
        if series.kind == "weak":
            assert {cell.batch_per_replica for cell in members} == {series.batch_size}
        else:
            assert {cell.global_batch for cell in members} == {series.batch_size * max(request.gpus)}
