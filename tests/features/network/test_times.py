"""The ranks of `bench network`: the groups that they measure, and the bytes that they hand over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from builders import a_cell
from rank_builders import a_context

from harness.features.network.order import NetworkOrder, measured_groups
from harness.features.network.worker import measure
from harness.features.network.worker.measure import _Rounds, measure_network
from results.cell import StepPolicy
from results.network import COLLECTIVES, NetworkTimes
from results.plan import Placement

KIB = 1024


def a_run(context: Any) -> Any:
    """A run with no budget: each case has the fewest samples."""
    cell = a_cell(steps=StepPolicy(budget_s=0.0))
    return SimpleNamespace(around=context, cell=cell, found={}, transports=(), begin=context.log.event)


def measured(rank: int, folder: str, placement: tuple[int, int], largest: int) -> list[NetworkTimes]:
    """On a rank: the times of every collective."""
    nodes, per_node = placement
    launch = {"placement": Placement(nodes=nodes, gpus_per_node=per_node)}
    with a_context(rank, folder, launch) as context:
        run = a_run(context)
        measure_network(run, NetworkOrder(collectives=COLLECTIVES, largest_bytes=largest).stored.values)
        return run.found["network"]


def moved(rank: int, folder: str) -> dict[str, tuple[int, int]]:
    """On a rank: the bytes that a collective hands over by its label, and by the count of the exchange."""
    found = {}
    with a_context(rank, folder, {}) as context:
        rounds = _Rounds(a_run(context), NetworkOrder(collectives=COLLECTIVES, largest_bytes=96 * KIB))
        for case in rounds._cases():
            if case.call is None or case.times.ranks == 2 != context.rank.gpus:
                continue
            before = context.exchange.traffic.payload_bytes
            case.call()
            counted = context.exchange.traffic.payload_bytes - before
            found[case.times.collective] = (case.times.payload_bytes, counted)
    return found


def test_every_collective_hands_over_what_its_row_says(ranks, tmp_path) -> None:
    # The largest array is the smallest, 64 KiB, of whole shards of 3 ranks: 3 x 5,461 values.
    array, shard = 4 * 3 * 5461, 4 * 5461
    for found in ranks(3, moved, str(tmp_path)):
        told = {name: payload for name, (payload, _) in found.items()}
        assert told == {
            **dict.fromkeys(("all-reduce", "reduce-scatter", "broadcast", "all-to-all"), array),
            "all-gather": shard,
        }
        assert {name: counted for name, (_, counted) in found.items()} == told


def test_groups_inside_and_across_nodes_are_measured_by_their_members_alone(ranks, tmp_path) -> None:
    found = ranks(4, measured, str(tmp_path), (2, 2), 64 * KIB)
    groups = [{(row.ranks, row.nodes) for row in rows} for rows in found]
    # Rank 0 and 1 are a node; 0 and 2 are one rank of each.
    assert groups == [{(2, 1), (2, 2), (4, 2)}, {(2, 1), (4, 2)}, {(2, 2), (4, 2)}, {(4, 2)}]
    for rows in found:
        assert {len(row.duration_ns) for row in rows} == {measure.FEWEST_ROUNDS}
        assert all(time > 0 for row in rows for time in row.duration_ns)
        # A send is between two ranks.
        assert {row.ranks for row in rows if row.collective == "send"} <= {2}
    everyone = {row.collective for row in found[3]}
    assert everyone == set(COLLECTIVES) - {"send"}


def test_sizes_grow_until_an_operation_would_take_too_long(ranks, tmp_path) -> None:
    found = ranks(2, measured, str(tmp_path), (1, 2), 1024 * KIB)
    sizes = [row.payload_bytes // KIB for row in found[0] if row.collective == "all-reduce"]
    assert sizes == [64, 256, 1024]
    short = ranks(2, impatient, str(tmp_path))
    assert [row.payload_bytes // KIB for row in short[0] if row.collective == "all-reduce"] == [64]


def impatient(rank: int, folder: str) -> list[NetworkTimes]:
    """On a rank: the times where every operation takes too long."""
    measure.LONGEST_NS, before = 0.0, measure.LONGEST_NS
    try:
        return measured(rank, folder, (1, 2), 1024 * KIB)
    finally:
        measure.LONGEST_NS = before


def test_groups_are_dense_inside_a_node_and_doubling_across() -> None:
    assert measured_groups(1, 1) == []
    assert [(len(ranks), nodes) for ranks, nodes in measured_groups(1, 4)] == [(2, 1), (3, 1), (4, 1)]
    found = measured_groups(6, 2)
    assert found[0] == ((0, 1), 1)
    # One rank of each node, then all ranks.
    assert found[1:3] == [((0, 2), 2), ((0, 2, 4), 3)]
    assert [(len(ranks), nodes) for ranks, nodes in found[1:]] == [
        *((2, 2), (3, 3), (4, 4), (6, 6)),
        *((4, 2), (6, 3), (8, 4), (12, 6)),
    ]
    assert [len(ranks) for ranks, nodes in measured_groups(1, 24)] == [*range(2, 9), 16, 24]
