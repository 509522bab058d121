"""Orders of pipelines against torch's own schedules, and what a plan derives of them without an order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from builders import a_cell
from torch import nn
from torch.distributed.pipelining import schedules

from strategies.catalog import STRATEGIES
from strategies.pipeline.facts import Pipeline
from strategies.pipeline.order import EQUAL, LOOPED, Shape, idle_share, order, replayed_bubble

TORCH: dict[str, Any] = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
PARTS = {"F": "forward", "B": "backward", "I": "input", "W": "weights"}
CHUNKS = {
    "interleaved": (2, 3),
    "looped-bfs": (2, 3),
    "zero-bubble": (1, 2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}
SHAPES = [
    Shape(schedule, ranks, chunks, pieces)
    for schedule, numbers in CHUNKS.items()
    for chunks in numbers
    for ranks in (2, 3, 4, 8)
    for pieces in range(1, 19)
]


def of_torch(shape: Shape) -> list[list[tuple[str, int, int]]]:
    """The order of each rank. Raises ValueError for a shape that torch refuses."""
    stages = [
        SimpleNamespace(
            group_size=shape.ranks,
            group_rank=0,
            num_stages=shape.last + 1,
            stage_index=at,
            is_first=at == 0,
            is_last=at == shape.last,
            submod=nn.Identity(),
            has_backward=True,
        )
        for at in range(shape.chunks)
    ]
    made = TORCH[shape.schedule](stages, shape.pieces, loss_fn=print)
    return [
        [
            (PARTS[one.computation_type.value], one.stage_index, one.microbatch_index)
            for pair in made.pipeline_order[rank]
            if pair is not None
            for one in pair.sub_actions or (pair,)
        ]
        for rank in range(shape.ranks)
    ]


def facts_of(shape: Shape) -> Pipeline:
    chunks = f":chunks={shape.chunks}" if shape.schedule in LOOPED else ""
    facts = STRATEGIES.facts(f"pipeline:{shape.schedule}{chunks}:microbatches={shape.pieces}")
    assert isinstance(facts, Pipeline)
    return facts


def refused(shape: Shape) -> str | None:
    strategy = facts_of(shape).spec.text
    return facts_of(shape).refusal(
        a_cell(strategy=strategy, gpus=shape.ranks, micro_batch=shape.pieces, model_parallel=shape.ranks)
    )


def most(actions: list[tuple[str, int, int]], *ends: str) -> int:
    """The most microbatches between their forward pass and one of these parts."""
    under_way, found = 0, 0
    for part, _, _ in actions:
        under_way += (part == "forward") - (part in ends)
        found = max(found, under_way)
    return found


@pytest.mark.parametrize("schedule", TORCH)
def test_orders_are_those_of_torch_and_a_plan_refuses_what_torch_refuses(schedule) -> None:
    for shape in (shape for shape in SHAPES if shape.schedule == schedule):
        try:
            theirs = of_torch(shape)
        except ValueError:
            told = "must be at least" if schedule == "dualpipev" else "must be a multiple of their rounds"
            assert told in str(refused(shape)), shape
            continue
        assert refused(shape) is None, shape
        assert [[tuple(one) for one in order(shape, rank)] for rank in range(shape.ranks)] == theirs, shape


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *TORCH])
def test_closed_forms_are_what_the_order_gives(schedule) -> None:
    simple = [Shape(kind, 3, 1, pieces) for kind in ("gpipe", "1f1b") for pieces in (3, 4, 9)]
    for shape in (one for one in [*SHAPES, *simple] if one.schedule == schedule and refused(one) is None):
        facts = facts_of(shape)
        cell = a_cell(strategy=facts.spec.text, gpus=shape.ranks, micro_batch=shape.pieces)
        for rank in range(shape.ranks):
            actions = [tuple(one) for one in order(shape, rank)]
            assert facts.in_flight(cell, rank) == most(actions, "backward", "input"), shape
            assert facts.kept(cell, rank) == most(actions, "backward", "weights"), shape
        assert facts.bubble(shape.ranks) == pytest.approx(idle_share(shape)), shape


def test_the_idle_time_of_a_divided_backward_pass_by_hand() -> None:
    """ZB-H1: (p - 1) (F + B - W) of m (F + B + W), but at least (p - 1) F, until the last rank begins."""
    for forward, inputs, weights, idle in ((1, 1, 1, 3), (2, 3, 1, 12), (1, 1, 3, 3), (4, 1, 2, 12)):
        seconds = {"forward": forward, "input": inputs, "weights": weights}
        work = 8 * (forward + inputs + weights)
        assert idle_share(Shape("zero-bubble", 4, 1, 8), seconds) == pytest.approx(idle / work)
        assert idle_share(Shape("zero-bubble", 4, 2, 8), seconds) == pytest.approx(idle / work / 2)
    # Half of an interleaved pipeline idles for (p - 1) (F + B) / v.
    assert idle_share(Shape("interleaved", 4, 2, 8)) == pytest.approx(3 / (2 * 8))
    assert idle_share(Shape("zbv", 4, 2, 8)) == pytest.approx(3 / (6 * 8))
    assert idle_share(Shape("dualpipev", 4, 2, 8)) == pytest.approx(3 / (6 * 8))
    # Breadth first, the first of two microbatches comes from the last of four ranks two passes late.
    assert idle_share(Shape("looped-bfs", 4, 2, 2)) == pytest.approx((3 + 2) / (2 * 2))


def test_the_bubble_of_unequal_stages_by_hand() -> None:
    """Rank 0 begins its backward passes at 8 and 15, when rank 1 has ended its own; 17 - 14 idle."""
    seconds = {(0, "forward"): 1, (0, "backward"): 2, (1, "forward"): 3, (1, "backward"): 4}
    assert replayed_bubble(Shape("1f1b", 2, 1, 2), seconds) == pytest.approx(3 / 17)
    with_loss = {**seconds, (1, "forward"): 2, (1, "loss"): 1}
    assert replayed_bubble(Shape("1f1b", 2, 1, 2), with_loss) == pytest.approx(3 / 17)


def test_a_replay_of_equal_stages_is_the_formula() -> None:
    for shape in (one for one in SHAPES if refused(one) is None):
        alike = {(stage, part): EQUAL[part] for stage in range(shape.last + 1) for part in EQUAL}
        idle = idle_share(shape)
        assert replayed_bubble(shape, alike) == pytest.approx(idle / (1 + idle)), shape
