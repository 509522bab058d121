"""What a step of a pipeline sends, by closed forms, and when each stage computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pipelines
import pytest
import recorded_world
import torch

from results.layout import ModelLayout
from strategies import Trainer, TrainSettings
from strategies.catalog import group_layout
from workloads.gpt.model import token_loss

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("size", "schedule", "accumulation"),
    [
        (2, "gpipe", 1),
        (2, "1f1b", 2),
        (2, "interleaved", 1),
        (3, "gpipe", 2),
        (4, "1f1b", 1),
        (4, "interleaved", 2),
    ],
)
def test_what_travels_is_the_closed_form(ranks: Ranks, size: int, schedule: str, accumulation: int) -> None:
    """A rank sends each microbatch's activations (rows / m, 5, 8) from each of its stages to the next one,
    and their gradients to the one before; the ends sum the table of 11 x 8; all take part in the loss."""
    pieces = 6 if size == 3 else 4
    strategy = f"pipeline:{schedule}:microbatches={pieces}"
    stages = size * (2 if schedule == "interleaved" else 1)
    found = ranks(size, pipelines.step_of, "tied", strategy, {"accumulation": accumulation})
    for rank, step in enumerate(found):
        own = [stage for stage in range(stages) if stage % size == rank]
        edges = sum(stage < stages - 1 for stage in own) + sum(stage > 0 for stage in own)
        end = rank in (0, size - 1)
        assert step["bytes"] == (
            accumulation * edges * pipelines.ROWS * pipelines.TOKENS * pipelines.WIDTH * 4
            + end * 11 * pipelines.WIDTH * 4
            + 8
        )
        assert step["operations"] == accumulation * edges * pieces + end + 1


@pytest.mark.parametrize(
    ("size", "schedule", "pieces", "chunks"),
    [
        (3, "1f1b", 6, 1),
        (3, "interleaved", 6, 2),
        (4, "gpipe", 4, 1),
        (8, "1f1b", 8, 1),
        (8, "interleaved", 8, 2),
        (256, "gpipe:dp=8", 3, 1),
        (256, "1f1b:dp=16", 16, 1),
    ],
)
def test_what_travels_between_many_ranks(size: int, schedule: str, pieces: int, chunks: int) -> None:
    """Of the first, the second and the last stage's rank, by the same closed form."""
    strategy = f"pipeline:{schedule}:microbatches={pieces}"
    groups = group_layout(strategy, size)
    stages = groups.pipeline * chunks
    tokens = torch.zeros(pieces, pipelines.TOKENS, dtype=torch.int64)
    for place in (0, 1, groups.pipeline - 1):
        with recorded_world.opened(place * groups.replicate, size) as (group, calls):
            trainer = Trainer(
                pipelines.Tied(stages),
                token_loss,
                device=pipelines.CPU,
                settings=TrainSettings(strategy=strategy),
                layout=ModelLayout(
                    blocks=tuple(f"body.{block}" for block in range(stages)),
                    stem=("wte",),
                    head=("norm", "wte"),
                    sample=(pipelines.TOKENS,),
                    sample_type="int64",
                ),
                group=group,
            )
            trainer.step(iter([(tokens, tokens)]))
            calls.clear()
            trainer.step(iter([(tokens, tokens)]))
            found = Counter(tuple(call) for call in calls)
        own = [stage for stage in range(stages) if stage % groups.pipeline == place]
        edges = sum(stage < stages - 1 for stage in own) + sum(stage > 0 for stage in own)
        activations = pipelines.TOKENS * pipelines.WIDTH * 4
        expected = Counter(
            {
                ("send", groups.pipeline, activations): edges * pieces,
                # What comes in over an edge goes back as a gradient.
                ("recv", groups.pipeline, activations): edges * pieces,
                ("broadcast", groups.pipeline, 8): 1,
            }
        )
        table, block = 11 * pipelines.WIDTH * 4, (pipelines.WIDTH + 1) * pipelines.WIDTH * 4
        if place in (0, groups.pipeline - 1):
            expected["all_reduce", 2, table] += 1
        if groups.replicate > 1:
            kept = chunks * block + (place == 0) * table
            kept += (place == groups.pipeline - 1) * (table + 2 * pipelines.WIDTH * 4)
            expected["all_reduce", groups.replicate, kept] += 1
        assert found == expected


@pytest.mark.parametrize("model", ["tied", "normed"])
def test_copies_average_each_stage_once_and_take_the_buffers_of_the_first(ranks: Ranks, model: str) -> None:
    found = ranks(4, pipelines.step_of, model, "pipeline:1f1b:dp=2", {"accumulation": 2})
    activation = 4 * pipelines.WIDTH * (pipelines.TOKENS if model == "tied" else 1)
    for step in found:
        # Two stages: each rank sends one way over one edge, in two micro-batches of 12 rows.
        shared = 11 * pipelines.WIDTH * 4 if model == "tied" else 0
        assert step["bytes"] == 2 * pipelines.ROWS * activation + shared + step["own"] + step["buffers"] + 8
        assert step["operations"] == 2 * 4 + bool(shared) + 1 + bool(step["buffers"]) + 1


def test_in_bf16_activations_travel_as_the_next_stage_takes_them(ranks: Ranks) -> None:
    # The blocks end in tanh of a bf16 norm.
    found = ranks(2, pipelines.step_of, "normed", "pipeline:1f1b", {"precision": "bf16"})
    assert [step["bytes"] for step in found] == [pipelines.ROWS * pipelines.WIDTH * 2 + 8] * 2


def test_phases_are_told_where_a_stage_computes(ranks: Ranks) -> None:
    first, last = ranks(2, pipelines.step_of, "tied", "pipeline:1f1b:microbatches=2", {})
    # Data; forward from then on; F and B of two microbatches; optimizer. The first stage is one ahead.
    assert (first["phases"], last["phases"]) == ("dffffbbo.".replace("ffff", "fff"), "dffbfbo.")
    first, last = ranks(2, pipelines.step_of, "tied", "pipeline:gpipe:microbatches=2", {})
    assert (first["phases"], last["phases"]) == ("dfffbbo.", "dfffbbo.")
