"""Shards inside of nodes, replicas across them, layers split over ranks: FSDP2 in two and three dimensions.

Against a plain loop over the replicas in double precision, and closed forms of what travels in each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from harness.plan import network
from results.cell import Cell
from strategies.refusal import refusal

Ranks = Callable[..., list[Any]]
SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"
HSDP = {"strategy": "hsdp", "node_size": 2}
SPLIT = {"strategy": "fsdp:tp=2"}
ALL = {"strategy": "hsdp:tp=2", "node_size": 4}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "nodes": (4, "gpt", {**HSDP, "optimizer": SGD}),
    "nodes, accumulated": (4, "grouped", {**HSDP, "optimizer": ADAMW, "accumulation": 2}),
    "nodes, clipped": (4, "llama", {**HSDP, "optimizer": SGD, "clip_norm": 0.1}),
    "nodes, offloaded and kept": (
        4,
        "gpt",
        {"strategy": "hsdp:offload=cpu:reshard=false", "node_size": 2, "optimizer": SGD},
    ),
    "one node": (2, "gpt", {"strategy": "hsdp", "optimizer": SGD}),
    "split": (4, "gpt", {**SPLIT, "optimizer": ADAMW}),
    "split, accumulated and clipped": (
        4,
        "grouped",
        {**SPLIT, "optimizer": SGD, "accumulation": 2, "clip_norm": 0.1},
    ),
    "split, checkpointed": (4, "llama", {**SPLIT, "optimizer": SGD, "activation_checkpointing": True}),
    "split, frozen parts": (4, "frozen", {**SPLIT, "optimizer": SGD, "clip_norm": 0.1}),
    "all three": (8, "gpt", {**ALL, "optimizer": ADAMW, "clip_norm": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_a_loop_over_the_replicas_does(
    ranks: Ranks, split_models: ModuleType, case: str
) -> None:
    size, model, settings = CASES[case]
    split_models.assert_as_serial(ranks(size, split_models.train, model, settings), model, settings)


WIDTH = 16


def _shapes(tensor: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(rows, elements of a row) of the parameters of a block, and of what is around the blocks; of a block a
    rank has a part of the outputs of qkv and the MLP's first layer, and of the inputs of the other two."""
    d = WIDTH
    part = d // tensor
    attention = [(3 * part, d), (3 * part, 1), (d, part), (d, 1)]
    mlp = [(4 * part, d), (4 * part, 1), (d, 4 * part), (d, 1)]
    return [*attention, *mlp, *[(d, 1)] * 4], [(17, d), (8, d), (d, 1), (d, 1)]


def _shard_bytes(shapes: list[tuple[int, int]], shards: int) -> int:
    """Of 8 bytes an element, rows padded to a multiple of the shards."""
    return sum(8 * math.ceil(rows / shards) * row for rows, row in shapes)


def _closed_form(*, nodes: int, shards: int, tensor: int, micro_batches: int = 1) -> Counter[tuple[str, int]]:
    """Bytes that a rank hands over in a step of two blocks, by operation and ranks.

    In a node, of each micro-batch: two gatherings of each block's shard and one of what is around them; at
    the end all shards of each once, to be summed. Across nodes the sum of its shard. In a layer four sums a
    block of 2 samples of 8 tokens.
    """
    inside, around = (_shard_bytes(shapes, shards) for shapes in _shapes(tensor))
    found: Counter[tuple[str, int]] = Counter()
    found["all_gather", shards] += micro_batches * (2 * 2 * inside + around)
    found["reduce_scatter", shards] += shards * (2 * inside + around)
    if nodes > 1:
        found["all_reduce", nodes] += 2 * inside + around
    if tensor > 1:
        found["all_reduce", tensor] += micro_batches * 2 * 4 * 2 * 8 * WIDTH * 8
    return found


def _operations(*, nodes: int, tensor: int, micro_batches: int = 1) -> int:
    gatherings, sums = micro_batches * 5, 3 if nodes == 1 else 6
    return gatherings + sums + (micro_batches * 8 if tensor > 1 else 0)


@pytest.mark.parametrize(
    ("size", "settings", "sizes"),
    [
        (4, {**HSDP, "accumulation": 2}, {"nodes": 2, "shards": 2, "tensor": 1}),
        (4, {**SPLIT, "accumulation": 2}, {"nodes": 1, "shards": 2, "tensor": 2}),
        (8, ALL, {"nodes": 2, "shards": 2, "tensor": 2}),
    ],
)
def test_what_travels_is_the_closed_form(
    ranks: Ranks, split_models: ModuleType, size: int, settings: dict[str, Any], sizes: dict[str, int]
) -> None:
    micro_batches = settings.get("accumulation", 1)
    expected = _closed_form(**sizes, micro_batches=micro_batches)
    operations = _operations(nodes=sizes["nodes"], tensor=sizes["tensor"], micro_batches=micro_batches)
    for payload, counted, _, _ in ranks(size, split_models.traffic, "gpt", {**settings, "optimizer": SGD}):
        assert (payload, counted) == (expected.total(), operations)


@pytest.mark.parametrize("rank", [0, 255])
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("hsdp", {"nodes": 32, "shards": 8, "tensor": 1}),
        ("hsdp:tp=2", {"nodes": 32, "shards": 4, "tensor": 2}),
    ],
)
def test_what_travels_on_32_nodes_of_8(
    recorded_world: ModuleType, split_models: ModuleType, strategy: str, sizes: dict[str, int], rank: int
) -> None:
    settings = {"strategy": strategy, "node_size": 8, "optimizer": SGD}
    found: Counter[tuple[str, int]] = Counter()
    with recorded_world.opened(rank, 256) as (group, calls):
        trainer = split_models.trainer_of("gpt", settings, group)
        for step in range(2):
            calls.clear()
            trainer.step(split_models.batches_of(step, 0, settings))
        for call in calls:
            found[call.operation, call.ranks] += call.payload_bytes
        operations = len(calls)
        group.reset()
    assert found == _closed_form(**sizes)
    assert operations == _operations(nodes=sizes["nodes"], tensor=sizes["tensor"])


@pytest.mark.parametrize(
    ("size", "settings", "shards", "tensor"), [(4, HSDP, 2, 1), (4, SPLIT, 2, 2), (8, ALL, 2, 2)]
)
def test_a_rank_keeps_its_shard_of_its_part(
    ranks: Ranks, split_models: ModuleType, size: int, settings: dict[str, Any], shards: int, tensor: int
) -> None:
    inside, around = _shapes(tensor)
    # 17 rows over two: 9 and 8. All else divides.
    expected = [
        sum(
            (rows // shards + (1 if rows % shards and first else 0)) * row
            for rows, row in [*inside * 2, *around]
        )
        for first in (True, False)
    ]
    results = ranks(size, split_models.traffic, "gpt", {**settings, "optimizer": ADAMW})
    for rank, (_, _, kept, state) in enumerate(results):
        own = expected[(rank // tensor) % shards]
        assert (sum(kept.values()), state) == (own, 2 * own)


@pytest.mark.parametrize(("size", "settings"), [(4, HSDP), (4, SPLIT)])
def test_steps_without_exchange_can_be_undone_and_nothing_holds_the_model(
    ranks: Ranks, split_models: ModuleType, size: int, settings: dict[str, Any]
) -> None:
    settings = {**settings, "optimizer": ADAMW}
    assert ranks(size, split_models.switched_off, "gpt", settings) == [True] * size
    assert ranks(size, split_models.freed, "gpt", settings) == [True] * size


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node_size": 4}, "and here is one node of 4: give a smaller --node-size"),
        ({"node_size": None}, "and here is one node of 4: give a smaller --node-size"),
        ({"node_size": 3}, "a number of ranks that 3 divides, not 4"),
        ({"strategy": "hsdp:tp=2"}, "nothing left to shard on nodes of 2: give a --node-size of more than 2"),
        ({"compression": "topk:0.01"}, "goes with --compression none and --collective default alone"),
        ({"strategy": "hsdp:tp=2", "gpus": 8, "node_size": 4, "compile": True}, "cannot trace"),
    ],
)
def test_combinations_without_sense_are_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "workload": "gpt-nano", "dataset": "synthetic", "strategy": "hsdp", "gpus": 4, "micro_batch": 4,
        "device": "cpu", "backend": "gloo", "optimizer": "sgd", "node_size": 2, **changes,
    }  # fmt: skip
    cell = Cell(**fields)
    assert reason in str(refusal(cell) or network.misplaced(cell, None))
