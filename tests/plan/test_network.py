"""What goes by nodes needs some: ranks beside each other, and others across."""

from __future__ import annotations

import pytest
from builders import plan_of

from results.plan import Plan


def reason_of(plan: Plan) -> str | None:
    """Why the one point of a plan is skipped; None if it is a cell."""
    assert len(plan.cells) + len(plan.skips) == 1
    return plan.skips[0].reason if plan.skips else None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "and 4 ranks are one node; give --node-size"),
        ({"node_size": 4}, "and 4 ranks are one node; give --node-size"),
        ({"node_size": 1}, "and here every rank is a node; give --node-size"),
        ({"link": "1gbit"}, "and here every rank is a node; give --node-size"),
        ({"gpus": 2, "node_size": 1}, "and here every rank is a node; use at least 4 ranks"),
    ],
)
def test_hierarchical_needs_something_inside_of_nodes_and_something_across(
    options: dict[str, object], reason: str
) -> None:
    point = {"workload": "mlp", "strategy": "ddp", "collective": "hierarchical", "gpus": 4, **options}
    plan = plan_of(**point)
    assert reason_of(plan) == f"hierarchical exchanges within nodes and across them, {reason}"


@pytest.mark.parametrize("options", [{"node_size": 2}, {"node_size": 2, "link": "1gbit"}])
def test_hierarchical_goes_by_nodes(options: dict[str, object]) -> None:
    plan = plan_of(workload="mlp", strategy="ddp", collective="hierarchical", gpus=4, **options)
    assert reason_of(plan) is None


@pytest.mark.parametrize(
    ("strategy", "gpus", "options", "node", "instead"),
    [
        ("hsdp", 4, {}, 4, "fsdp"),
        ("hsdp", 8, {"gpus_per_node": 8}, 8, "fsdp"),
        # Nodes with room left over.
        ("hsdp", 4, {"gpus_per_node": 8}, 4, "fsdp"),
        ("hsdp", 4, {"node_size": 8}, 4, "fsdp"),
        ("hsdp:tp=2", 4, {"node_size": 4}, 4, "fsdp:tp=2"),
    ],
)
def test_one_node_has_no_replicas(
    strategy: str, gpus: int, options: dict[str, object], node: int, instead: str
) -> None:
    assert reason_of(plan_of(workload="gpt-nano", strategy=strategy, gpus=gpus, **options)) == (
        f"hsdp shards inside of nodes and replicates across them, and here is one node of {node}: "
        f"give a smaller --node-size or --gpus-per-node, or use {instead}"
    )


@pytest.mark.parametrize(
    ("strategy", "gpus", "options", "node", "instead"),
    [
        # Under a link every rank is a node if nothing else is said.
        ("hsdp", 4, {"link": "1gbit"}, 1, "fsdp"),
        ("hsdp", 4, {"node_size": 1}, 1, "fsdp"),
        ("hsdp", 4, {"gpus_per_node": 1}, 1, "fsdp"),
        ("hsdp:tp=2", 4, {"node_size": 2}, 2, "fsdp:tp=2"),
        ("hsdp:tp=2", 8, {"gpus_per_node": 2}, 2, "fsdp:tp=2"),
        ("hsdp:tp=2", 8, {"gpus_per_node": 4, "node_size": 2}, 2, "fsdp:tp=2"),
    ],
)
def test_nodes_that_are_too_small_have_nothing_to_shard(
    strategy: str, gpus: int, options: dict[str, object], node: int, instead: str
) -> None:
    assert reason_of(plan_of(workload="gpt-nano", strategy=strategy, gpus=gpus, **options)) == (
        f"{strategy} has nothing left to shard on nodes of {node}: "
        f"give a --node-size of more than {node}, or use {instead}"
    )


def test_real_nodes_are_divided_as_virtual_ones_are() -> None:
    plan = plan_of(workload="gpt-nano", strategy="hsdp:tp=2", gpus=6, gpus_per_node=3)
    assert reason_of(plan) == "hsdp:tp=2 on nodes of 3 needs a number of ranks that 2 divides, not 3"


@pytest.mark.parametrize(
    ("strategy", "gpus", "options"),
    [
        ("hsdp", 4, {"node_size": 2}),
        ("hsdp", 4, {"node_size": 2, "link": "1gbit"}),
        ("hsdp", 6, {"gpus_per_node": 3}),
        # Virtual nodes are parts of real ones, of which there may be one.
        ("hsdp", 8, {"gpus_per_node": 8, "node_size": 4}),
        ("hsdp:tp=2", 8, {"gpus_per_node": 4}),
    ],
)
def test_two_nodes_with_shards_in_them_are_enough(
    strategy: str, gpus: int, options: dict[str, object]
) -> None:
    assert reason_of(plan_of(workload="gpt-nano", strategy=strategy, gpus=gpus, **options)) is None
