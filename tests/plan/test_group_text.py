"""Groups as they are drawn, against drawings made by hand."""

from __future__ import annotations

from textwrap import dedent

import pytest
from builders import plan_of

from harness.terminal.group_text import description, drawing, group_lines, is_grid
from results.groups import GroupLayout


def by_hand(text: str) -> list[str]:
    return dedent(text).strip("\n").splitlines()


@pytest.mark.parametrize(
    ("groups", "words", "picture"),
    [
        (
            GroupLayout(pipeline=2, replicate=2),
            "2 stages x 2 replicas: 0 and 2 are the stages of one replica, 0 and 1 average their gradients",
            """
                     replica 0  replica 1
            stage 0          0          1
            stage 1          2          3
            """,
        ),
        (
            GroupLayout(pipeline=3),
            "3 stages: 0, 1 and 2 are the stages of one replica",
            """
            stage 0  0
            stage 1  1
            stage 2  2
            """,
        ),
        (
            GroupLayout(shard=2, tensor=2),
            "2 shards x 2 tensor parts: 0 and 2 hold a shard each, 0 and 1 compute each layer together",
            """
            shard 0  shard 1
              [0 1]    [2 3]
            """,
        ),
        (
            GroupLayout(shard=2, context=2, tensor=2),
            "2 batch parts x 2 sequence parts x 2 tensor parts: 0, 2, 4 and 6 hold a shard each, "
            "0 and 2 compute each sequence together, 0 and 1 compute each layer together",
            """
            batch part 0  batch part 1
               [0 1 2 3]     [4 5 6 7]
            """,
        ),
        (
            GroupLayout(tensor=4),
            "4 tensor parts: 0, 1, 2 and 3 compute each layer together",
            """
            [0 1 2 3]
            """,
        ),
        (
            GroupLayout(replicate=2, shard=3),
            "2 nodes x 3 shards: 0 and 3 average their gradients, 0, 1 and 2 hold a shard each",
            """
                    shard 0  shard 1  shard 2
            node 0        0        1        2
            node 1        3        4        5
            """,
        ),
        (
            GroupLayout(replicate=2, shard=2, tensor=2),
            "2 nodes x 2 shards x 2 tensor parts: 0 and 4 average their gradients, 0 and 2 hold a shard "
            "each, 0 and 1 compute each layer together",
            """
                    shard 0  shard 1
            node 0    [0 1]    [2 3]
            node 1    [4 5]    [6 7]
            """,
        ),
        (
            GroupLayout(replicate=16, shard=16),
            "16 nodes x 16 shards: 0, 16, ... and 240 average their gradients, "
            "0, 1, ... and 15 hold a shard each",
            """
                     shard 0  shard 1  ...  shard 15
            node 0         0        1  ...        15
            node 1        16       17  ...        31
            ...
            node 15      240      241  ...       255
            """,
        ),
        (
            # Eight columns of 16 characters and more are too wide.
            GroupLayout(shard=8, tensor=32),
            "8 shards x 32 tensor parts: 0, 32, ... and 224 hold a shard each, "
            "0, 1, ... and 31 compute each layer together",
            """
                 shard 0         shard 1  ...            shard 7
            [0 1 ... 31]  [32 33 ... 63]  ...  [224 225 ... 255]
            """,
        ),
    ],
)
def test_groups_are_drawn_as_by_hand(groups, words, picture) -> None:
    assert description(groups) == words
    assert drawing(groups) == by_hand(picture)


def test_no_line_is_too_long_for_a_terminal_at_256() -> None:
    for groups in (
        GroupLayout(pipeline=16, replicate=16),
        GroupLayout(replicate=16, shard=4, tensor=4),
        GroupLayout(tensor=256),
        GroupLayout(replicate=32, shard=8),
        GroupLayout(pipeline=256),
        GroupLayout(replicate=2, shard=8, tensor=16),
    ):
        lines = drawing(groups)
        assert len(lines) <= 9
        assert max(map(len, lines)) <= 80
        assert lines[-1].endswith(("255", "255]"))


@pytest.mark.parametrize(
    ("groups", "drawn"),
    [
        (GroupLayout(), False),
        (GroupLayout(replicate=4), False),
        (GroupLayout(shard=4), False),
        (GroupLayout(pipeline=2), True),
        (GroupLayout(tensor=2), True),
        (GroupLayout(replicate=2, shard=2), True),
    ],
)
def test_what_has_one_dimension_of_data_needs_no_drawing(groups, drawn) -> None:
    assert is_grid(groups) is drawn


def test_a_plan_draws_each_strategy_and_size_once() -> None:
    plan = plan_of(
        workload="gpt-nano", gpus="2,4", strategy="ddp,fsdp,fsdp:tp=2,hsdp", batch_size="4,8", node_size=2
    )
    assert list(group_lines(plan)) == by_hand(
        """
        fsdp:tp=2 on 4, 2 shards x 2 tensor parts: 0 and 2 hold a shard each, {together}
          shard 0  shard 1
            [0 1]    [2 3]
        hsdp on 4, 2 nodes x 2 shards: 0 and 2 average their gradients, 0 and 1 hold a shard each
                  shard 0  shard 1
          node 0        0        1
          node 1        2        3
        """.replace("{together}", "0 and 1 compute each layer together")
    )


def test_ranks_with_several_stages_are_drawn_with_them() -> None:
    plan = plan_of(
        workload="llama-nano", gpus="2", strategy="pipeline:zbv,pipeline:interleaved", batch_size="4"
    )
    assert list(group_lines(plan)) == [
        "pipeline:zbv on 2, 4 stages: 0 and 1 have the stages of one replica",
        "  stages 0 3  0",
        "  stages 1 2  1",
        "pipeline:interleaved on 2, 4 stages: 0 and 1 have the stages of one replica",
        "  stages 0 2  0",
        "  stages 1 3  1",
    ]


def test_stages_in_shards_and_replicas_of_them_are_drawn() -> None:
    strategy = "pipeline:zbv:pp=2:shard=2"
    plan = plan_of(workload="llama-nano", gpus="4,8", strategy=strategy, batch_size="4")
    assert list(group_lines(plan)) == [
        f"{strategy} on 4, 4 stages x 2 shards: 0 and 2 have the stages of one replica, 0 and 1 hold a shard "
        "each",
        "              shard 0  shard 1",
        "  stages 0 3        0        1",
        "  stages 1 2        2        3",
        f"{strategy} on 8, 4 stages x 2 replicas x 2 shards: 0 and 4 have the stages of one replica, 0 and 2 "
        "average their gradients, 0 and 1 hold a shard each",
        "  replica.shard  0.0  0.1  1.0  1.1",
        "  stages 0 3       0    1    2    3",
        "  stages 1 2       4    5    6    7",
    ]


def test_real_nodes_are_drawn_as_the_virtual_ones_are() -> None:
    plan = plan_of(workload="gpt-nano", gpus=4, strategy="hsdp", gpus_per_node=2)
    assert next(iter(group_lines(plan))).startswith("hsdp on 4, 2 nodes x 2 shards")
