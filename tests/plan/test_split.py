"""Whether a model goes into the parts that a strategy makes of it."""

from __future__ import annotations

import pytest
from builders import cell_of, plan_of

from harness.plan.points import unsplittable
from results.plan import Plan


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        # Four blocks: at most four stages, which interleaved has two of on each rank.
        ({"strategy": "pipeline:gpipe", "gpus": 5}, "4 blocks, too few for 5 stages; use at most 4 ranks"),
        ({"strategy": "pipeline:gpipe:pp=8", "gpus": 16}, "4 blocks, too few for 8 stages; use pp=4"),
        ({"strategy": "pipeline:interleaved", "gpus": 3}, "too few for 6 stages; use at most 2 ranks"),
        (
            {"strategy": "pipeline:interleaved:chunks=3", "gpus": 2},
            "gpt-nano has 4 blocks, too few for 6 stages; use fewer chunks",
        ),
        (
            {"workload": "mlp", "strategy": "pipeline:gpipe"},
            "mlp has no blocks that a pipeline could be made of; use ddp",
        ),
        ({"strategy": "tp", "gpus": 3}, "4 attention heads of gpt-nano do not divide by 3"),
        ({"strategy": "fsdp:tp=8", "gpus": 8}, "4 attention heads of gpt-nano do not divide by 8"),
        # Two of keys and values.
        ({"workload": "llama-nano", "strategy": "tp", "gpus": 4}, "2 attention heads of llama-nano"),
        ({"workload": "resnet18-32px", "strategy": "tp"}, "no layers that tensor parallelism knows how to"),
        ({"workload": "mlp", "strategy": "tp:sequence=true"}, "mlp has no sequence of tokens"),
        (
            {"workload": "gpt-nano:seq=31", "strategy": "tp:sequence=true"},
            "31 tokens do not divide into 2 pieces (the nearest lengths: 30 and 32)",
        ),
        (
            {"workload": "moe-nano:aux=0.01", "strategy": "fsdp:cp=2"},
            "moe-nano:aux=0.01 does not fit fsdp:cp=2, which divides sequences: aux is defined over",
        ),
        (
            {"workload": "moe-nano:aux=0.01:capacity=2", "strategy": "fsdp:cp=2"},
            "aux and capacity are defined over complete sequences",
        ),
        (
            {"workload": "moe-nano:bias=0.001", "strategy": "local-sgd:4"},
            "moe-nano:bias=0.001 does not fit local-sgd:4, whose replicas take steps apart: bias moves after",
        ),
        ({"strategy": "fsdp:ep=2"}, "gpt-nano has no experts, which fsdp:ep=2 deals among ranks"),
        (
            {"workload": "moe-nano", "strategy": "fsdp:ep=3", "gpus": 3},
            "8 experts of moe-nano do not divide by 3",
        ),
        ({"workload": "moe-nano:aux=0.01", "strategy": "tp:sequence=true"}, "which divides sequences: aux"),
        # 4 / 4 is one sample, and BatchNorm over one pixel of it has no variance.
        (
            {"workload": "resnet18-32px", "strategy": "pipeline:gpipe", "micro_batch": 4},
            "BatchNorm of resnet18-32px needs at least 2 samples in a microbatch",
        ),
        (
            {"workload": "resnet18-32px", "strategy": "scratch-fsdp:params=bf16", "precision": "bf16"},
            "no BatchNorm for scratch-fsdp:params=bf16",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_numbers(fields, reason) -> None:
    found = unsplittable(cell_of(**({"workload": "gpt-nano", "gpus": 2, "micro_batch": 8} | fields)))
    assert reason in found


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "pipeline:gpipe", "gpus": 4},
        {"strategy": "pipeline:gpipe:dp=2", "gpus": 8},
        {"strategy": "pipeline:gpipe:pp=4", "gpus": 8},
        {"strategy": "pipeline:interleaved", "gpus": 2},
        {"strategy": "tp", "gpus": 4},
        {"strategy": "fsdp:tp=2", "gpus": 6},
        {"workload": "moe-nano:aux=0.01", "strategy": "fsdp:tp=2", "gpus": 4},
        {"workload": "moe-nano:bias=0.01", "strategy": "pipeline:1f1b", "gpus": 4},
        {"workload": "llama-nano", "strategy": "tp", "gpus": 2},
        {"workload": "resnet18-32px", "strategy": "pipeline:gpipe", "micro_batch": 8},
        {"workload": "resnet18-32px", "strategy": "pipeline:gpipe:microbatches=2", "micro_batch": 4},
        {"strategy": "scratch-fsdp:params=bf16", "precision": "bf16"},
        # What a user's model is made of, the worker finds out.
        {"workload": "py:mymodel:build", "strategy": "pipeline:gpipe", "gpus": 64},
        {"workload": "py:mymodel:build", "strategy": "tp", "gpus": 7},
        {"strategy": "ddp", "gpus": 256},
    ],
)
def test_a_size_that_divides_is_accepted(fields) -> None:
    assert unsplittable(cell_of(**({"workload": "gpt-nano", "gpus": 2, "micro_batch": 8} | fields))) is None


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
UNEVEN = "{2} on nodes of {0} needs a multiple of 2 ranks, not {0} (the nearest: 2 and 4)"
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
