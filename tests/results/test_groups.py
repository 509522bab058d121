"""Ranks as a grid: grids by hand, and that every grid is a partition."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.groups import GRID, GroupLayout

DEGREE = st.integers(1, 3)
LAYOUTS = st.builds(GroupLayout, pipeline=DEGREE, replicate=DEGREE, shard=DEGREE, tensor=DEGREE)


@pytest.mark.parametrize(
    ("layout", "dimension", "groups"),
    [
        # Stages are rows of replicas: 0 1 / 2 3 / 4 5.
        (GroupLayout(pipeline=3, replicate=2), "pipeline", [[0, 2, 4], [1, 3, 5]]),
        (GroupLayout(pipeline=3, replicate=2), "replicate", [[0, 1], [2, 3], [4, 5]]),
        # Nodes are rows of shards, tensor parts are neighbours: [0 1] [2 3] / [4 5] [6 7].
        (GroupLayout(replicate=2, shard=2, tensor=2), "tensor", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (GroupLayout(replicate=2, shard=2, tensor=2), "shard", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (GroupLayout(replicate=2, shard=2, tensor=2), "replicate", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (GroupLayout(shard=3), "replicate", [[0], [1], [2]]),
    ],
)
def test_groups_are_those_of_the_grid(layout, dimension, groups) -> None:
    assert layout.groups(dimension) == groups


def test_groups_of_two_dimensions_span_both() -> None:
    layout = GroupLayout(replicate=2, shard=2, tensor=2)
    assert layout.groups("replicate", "shard") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("shard", "tensor") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_places_and_replicas_of_a_grid_by_hand() -> None:
    # Two stages, two copies, three shards: rank 10 = (1 x 2 + 1) x 3 + 1.
    layout = GroupLayout(pipeline=2, replicate=2, shard=3)
    assert layout.place(10) == {"pipeline": 1, "replicate": 1, "shard": 1, "context": 0, "tensor": 0}
    assert [layout.replica(rank) for rank in range(12)] == [0, 1, 2, 3, 4, 5] * 2
    assert (layout.ranks, layout.replicas, layout.model_parallel) == (12, 6, 2)


@given(LAYOUTS, st.sets(st.sampled_from(GRID)))
def test_groups_partition_the_ranks(layout, dimensions) -> None:
    groups = layout.groups(*dimensions)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
    assert groups == sorted(sorted(group) for group in groups)
    size = 1
    for dimension in dimensions:
        size *= getattr(layout, dimension)
    assert {len(group) for group in groups} == {size}
    for group in groups:
        for one, other in combinations(group, 2):
            ours, theirs = layout.place(one), layout.place(other)
            assert {name for name in GRID if ours[name] != theirs[name]} <= dimensions


@given(LAYOUTS)
def test_a_place_is_of_one_rank_and_within_its_degrees(layout) -> None:
    for rank in range(layout.ranks):
        place = layout.place(rank)
        assert all(0 <= place[name] < getattr(layout, name) for name in GRID)
        number = 0
        for name in ("pipeline", "replicate", "shard", "tensor"):
            number = number * getattr(layout, name) + place[name]
        assert number == rank


@given(LAYOUTS)
def test_a_replica_is_what_its_stages_and_parts_make_up(layout) -> None:
    wholes = layout.groups("pipeline", "tensor")
    assert [{layout.replica(rank) for rank in group} for group in wholes] == [
        {number} for number in range(layout.replicas)
    ]


@given(st.builds(GroupLayout, pipeline=DEGREE, replicate=DEGREE, shard=DEGREE, context=DEGREE, tensor=DEGREE))
def test_each_group_that_exchanges_has_its_dimension(layout) -> None:
    for dimension in GRID:
        for group in layout.peers(dimension):
            if len(group) > 1:
                # Shards on the ranks of one sequence alone: the group is of both dimensions.
                both = dimension in ("shard", "context") and layout.shard == 1
                assert layout.dimension(group) == (None if both else dimension)
    if layout.replicate > 1 < layout.tensor:
        assert layout.dimension(layout.groups("replicate", "tensor")[0]) is None
