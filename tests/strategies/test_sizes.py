"""Bytes of what a rank holds, piece by piece: worked out by hand, and against torch and the flat vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import a_cell
from torch import nn

from harness.worker.exchange.group import ExchangeGroup
from results.cell import Cell
from results.parts import ModelParts, Part, Saved, Weight
from strategies.catalog import OPTIMIZERS, STRATEGIES
from strategies.collectives.link import Link
from strategies.optimizers import build_optimizer
from strategies.predictions import footprint
from strategies.scratch_fsdp.flat import FlatParameters, Sharding
from workloads.resnet import ResNetShape

NO_STATE = "sgd:momentum=0"


def cell_of(strategy: str, gpus: int, **fields: Any) -> Cell:
    return a_cell(strategy=strategy, gpus=gpus, **{"micro_batch": 4, "optimizer": NO_STATE} | fields)


def part(*values: int) -> Part:
    return Part(weights=tuple(Weight(rows=count) for count in values), saved=Saved())


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [("adamw", 2), ("adamw:weight_decay=0", 2), ("sgd", 1), ("sgd:momentum=0.5", 1), (NO_STATE, 0)],
)
def test_values_of_state_are_those_that_torch_keeps(optimizer, values) -> None:
    assert OPTIMIZERS.facts(optimizer).state_values == values
    parameter = nn.Parameter(torch.ones(5, 3))
    parameter.grad = torch.ones(5, 3)
    built = build_optimizer(optimizer, [parameter])
    built.step()
    kept = [value for value in built.state[parameter].values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in kept if value.shape == parameter.shape) == 15 * values


def test_parameters_in_a_flat_vector_begin_at_16_bytes() -> None:
    """5, 3 and 6 values at 0, 8 and 12 in single precision, at 0, 8 and 16 in half; over 4 rounded up."""
    odd = part(5, 3, 6)
    assert (odd.flat_values(1), odd.flat_values(4)) == (18, 20)
    assert (odd.flat_values(1, 2), odd.flat_values(4, 2)) == (22, 24)
    # Nothing follows the last one.
    assert (part(5).flat_values(1), part().flat_values(4)) == (5, 0)


def shard_of(group: ExchangeGroup, sizes: list[int], computed_in: torch.dtype | None) -> int:
    """On a rank: elements of its shard of parameters of these sizes."""
    sharding = Sharding(
        link=Link(group),
        device=torch.device("cpu"),
        computed_in=computed_in,
        host=None,
        fill=lambda parameter: None,
    )
    named = {f"{index}": nn.Parameter(torch.ones(size)) for index, size in enumerate(sizes)}
    return FlatParameters(named, sharding).shard.numel()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[5, 3, 6], [1, 1, 1, 1], [8, 16], [9, 1, 7, 2]])
def test_flat_vectors_are_as_long_as_is_planned(threads, sizes, ranks) -> None:
    planned = part(*sizes)
    assert threads(ranks, shard_of, sizes, None) == [planned.flat_values(ranks) / ranks] * ranks
    halves = threads(ranks, shard_of, sizes, torch.bfloat16)
    assert halves == [planned.flat_values(ranks, 2) / ranks] * ranks


def test_gaps_between_flat_parameters_are_sharded_with_them() -> None:
    """Over 2, around the blocks 5 and 3 values, 8 + 3 and one more, and two blocks of 18: 24 a rank. In half
    precision blocks take 22."""
    odd = ModelParts(stem=part(5), blocks=(part(5, 3, 6),) * 2, head=part(3))

    def updated(cell: Cell) -> int:
        return STRATEGIES.facts(cell.strategy).updated_bytes(cell, odd)

    assert updated(cell_of("scratch-fsdp", 2)) == 4 * (12 + 2 * 18) / 2
    assert updated(cell_of("scratch-fsdp:params=bf16", 2, precision="bf16")) == 4 * (12 + 2 * 22) / 2
    # torch's have no gaps, and rows of their own: 6 and 4, and 6 + 4 + 6.
    assert updated(cell_of("fsdp", 2)) == 4 * (10 + 2 * 16) / 2


def model(blocks: int) -> ModelParts:
    """Without activations: blocks of 300 values that are split and 20 that are not, 500 and 10 around."""
    block = Part(weights=(Weight(rows=10, columns=30, split="columns"), Weight(rows=20)), saved=Saved())
    stem = Part(weights=(Weight(rows=50, columns=10),), saved=Saved())
    return ModelParts(stem=stem, blocks=(block,) * blocks, head=part(10))


@pytest.mark.parametrize(
    ("strategy", "gpus", "fields", "blocks", "expected"),
    [
        # The whole model and a tenth of 300 values; ten parts are then 710 values, and as many gradients.
        ("tp", 10, {}, 4, 7160 + 4 * 30),
        # Shards of 355 values come after that: 2840 + 1420.
        ("fsdp:tp=10", 20, {}, 4, 7160 + 4 * 30),
        ("hsdp:tp=10", 40, {"node_size": 20}, 4, 7160 + 4 * 30),
        # No part of a layer is copied: one stage is at most 820 values and as many gradients.
        ("pipeline:1f1b", 4, {"model_parallel": 4}, 4, 7160),
        # All shards beside what they were cut from: 5630 values and half as many.
        ("fsdp", 2, {}, 16, 22_520 + 11_260),
    ],
)
def test_the_whole_model_is_there_before_it_is_split(strategy, gpus, fields, blocks, expected) -> None:
    """4 (510 + 4 x 320) = 7160 bytes, and with 16 blocks 22,520."""
    found = footprint(cell_of(strategy, gpus, **fields), model(blocks))
    assert (found.moment, found.total) == ("model built", expected)


def test_a_stage_receives_gradients_of_the_size_of_its_output() -> None:
    """The first of ResNet-50's 16 blocks turns 64 x 56 x 56 values into 256 x 56 x 56. A stage of only this
    block receives as many, of 16 samples; it keeps most, with 16 microbatches in flight."""
    parts = ResNetShape(blocks=(3, 4, 6, 3), bottleneck=True, px=224).parts()
    cell = cell_of("pipeline:1f1b:microbatches=16", 16, micro_batch=16, model_parallel=16)
    found = footprint(cell, parts)
    # A kernel of 7 x 7, a block's of 1 x 1, 3 x 3, 1 x 1 and 1 x 1 beside, and BatchNorm's two a channel.
    kernels = 3 * 49 * 64 + 64 * 64 + 9 * 64 * 64 + 64 * 256 + 64 * 256
    assert found.parameters == 4 * (kernels + 2 * (64 + 64 + 64 + 256 + 256))
    assert found.buckets == 4 * 16 * 256 * 56 * 56
