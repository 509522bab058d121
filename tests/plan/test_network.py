"""Exchanges by nodes need ranks on one node, and others across nodes."""

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
def test_hierarchical_needs_something_inside_of_nodes_and_something_across(options, reason) -> None:
    point = {"workload": "mlp", "strategy": "ddp", "collective": "hierarchical", "gpus": 4, **options}
    plan = plan_of(**point)
    assert reason_of(plan) == f"hierarchical exchanges within nodes and across them, {reason}"


@pytest.mark.parametrize("options", [{"node_size": 2}, {"node_size": 2, "link": "1gbit"}])
def test_hierarchical_goes_by_nodes(options) -> None:
    plan = plan_of(workload="mlp", strategy="ddp", collective="hierarchical", gpus=4, **options)
    assert reason_of(plan) is None


ONE_NODE = (
    "hsdp shards inside of nodes and replicates across them, and there is only one node, of {}: "
    "give a smaller --node-size or --gpus-per-node, or use {}"
)
UNEVEN = "{2} on nodes of {0} needs a multiple of 2 ranks, not {0}"
TOO_SMALL = "{2} has nothing left to shard on nodes of {0}: give a --node-size of more than {0}, or use {1}"


@pytest.mark.parametrize(
    ("strategy", "gpus", "options", "reason", "node", "instead"),
    [
        ("hsdp", 4, {}, ONE_NODE, 4, "fsdp"),
        ("hsdp", 8, {"gpus_per_node": 8}, ONE_NODE, 8, "fsdp"),
        # Nodes with room left over.
        ("hsdp", 4, {"gpus_per_node": 8}, ONE_NODE, 4, "fsdp"),
        ("hsdp", 4, {"node_size": 8}, ONE_NODE, 4, "fsdp"),
        ("hsdp:tp=2", 4, {"node_size": 4}, ONE_NODE, 4, "fsdp:tp=2"),
        # Under a link every rank is a node if nothing else is said.
        ("hsdp", 4, {"link": "1gbit"}, TOO_SMALL, 1, "fsdp"),
        ("hsdp", 4, {"node_size": 1}, TOO_SMALL, 1, "fsdp"),
        ("hsdp", 4, {"gpus_per_node": 1}, TOO_SMALL, 1, "fsdp"),
        ("hsdp:tp=2", 4, {"node_size": 2}, TOO_SMALL, 2, "fsdp:tp=2"),
        ("hsdp:tp=2", 8, {"gpus_per_node": 2}, TOO_SMALL, 2, "fsdp:tp=2"),
        ("hsdp:tp=2", 8, {"gpus_per_node": 4, "node_size": 2}, TOO_SMALL, 2, "fsdp:tp=2"),
        # Real nodes are divided as virtual ones are.
        ("hsdp:tp=2", 6, {"gpus_per_node": 3}, UNEVEN, 3, ""),
        # Two nodes with shards in them are enough.
        ("hsdp", 4, {"node_size": 2}, None, 2, ""),
        ("hsdp", 4, {"node_size": 2, "link": "1gbit"}, None, 2, ""),
        ("hsdp", 6, {"gpus_per_node": 3}, None, 3, ""),
        # Virtual nodes are parts of real ones, of which there may be one.
        ("hsdp", 8, {"gpus_per_node": 8, "node_size": 4}, None, 4, ""),
        ("hsdp:tp=2", 8, {"gpus_per_node": 4}, None, 4, ""),
    ],
)
def test_hsdp_needs_two_nodes_with_shards_in_them(strategy, gpus, options, reason, node, instead) -> None:
    found = reason_of(plan_of(workload="gpt-nano", strategy=strategy, gpus=gpus, **options))
    assert found == (None if reason is None else reason.format(node, instead, strategy))
