"""The two trees: their shape, and what each rank sends. Their sums: test_collective_laws.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.collectives.link import Link
from strategies.collectives.tree import Tree, TreeNode, binary_tree

Threads = Callable[..., list[Any]]

CHUNK = 16
"""Bytes: four values in single precision."""

MESSAGES = {
    1: [0],
    2: [1, 1],
    3: [1, 2, 1],
    4: [1, 3, 1, 1],
    5: [1, 3, 1, 2, 1],
    6: [1, 3, 1, 2, 1, 2],
    7: [1, 3, 1, 2, 1, 3, 1],
    8: [1, 3, 1, 3, 1, 3, 1, 1],
}
"""By number of ranks: what each node of the first tree sends for a chunk, one up and one to every child.

Labels 1 to 8 have the root 8, below it 4, below that 2 and 6, and the odd ones are leaves; fewer labels
leave out the others: 5 has the root 4, below it 2 and 5.
"""


def test_the_trees_of_seven_ranks() -> None:
    # Label 4 is the root, 2 and 6 are below it. Rank r has the label r + 1 ...
    assert binary_tree(7, 0) == [
        TreeNode(parent=1, children=(), depth=2),
        TreeNode(parent=3, children=(0, 2), depth=1),
        TreeNode(parent=1, children=(), depth=2),
        TreeNode(parent=None, children=(1, 5), depth=0),
        TreeNode(parent=5, children=(), depth=2),
        TreeNode(parent=3, children=(4, 6), depth=1),
        TreeNode(parent=5, children=(), depth=2),
    ]
    # ... and with a shift of one r + 2: rank 2 is the root, and rank 6 has label 1.
    assert binary_tree(7, 1) == [
        TreeNode(parent=2, children=(6, 1), depth=1),
        TreeNode(parent=0, children=(), depth=2),
        TreeNode(parent=None, children=(0, 4), depth=0),
        TreeNode(parent=4, children=(), depth=2),
        TreeNode(parent=2, children=(3, 5), depth=1),
        TreeNode(parent=4, children=(), depth=2),
        TreeNode(parent=0, children=(), depth=2),
    ]


@pytest.mark.parametrize("size", range(1, 65))
def test_no_rank_is_an_inner_node_of_both_trees(size: int) -> None:
    trees = [binary_tree(size, shift) for shift in (0, 1)]
    assert not any(first.children and second.children for first, second in zip(*trees, strict=True))
    for tree in trees:
        assert [node.parent for node in tree].count(None) == 1
        for rank, node in enumerate(tree):
            assert len(node.children) <= 2
            assert all(tree[child].parent == rank for child in node.children)
            assert all(tree[child].depth == node.depth + 1 for child in node.children)
            assert node.depth <= math.log2(size)
        assert sum(len(node.children) for node in tree) == size - 1


def whole_numbers(rank: int, numel: int) -> Tensor:
    """Of rank r at place i: 2 ** r * (1000 + i), exact in single precision in any order of the sum."""
    return 2.0**rank * (1000 + torch.arange(numel, dtype=torch.float32))


def lengths(size: int) -> list[int]:
    """None, fewer than ranks, as many, and around the borders of halves and chunks."""
    return sorted({0, 1, size - 1, size, size + 1, 7, 8, 9, 1000})


def sum_whole_numbers(group: ExchangeGroup) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """On a rank: sums of all lengths, one after another; and the bytes and messages of each."""
    tree = Tree(Link(group), chunk_bytes=CHUNK)
    sums, sent = [], []
    for numel in lengths(group.size()):
        group.reset()
        values = whole_numbers(group.rank(), numel)
        tree.all_reduce(values)
        sums.append(values)
        sent.append((group.traffic.payload_bytes, group.traffic.operations))
    return sums, sent


@pytest.mark.parametrize("size", range(1, 9))
def test_sums_of_whole_numbers_are_exact_and_each_rank_sends_what_its_places_say(
    threads: Threads, size: int
) -> None:
    for rank, (sums, sent) in enumerate(threads(size, sum_whole_numbers)):
        # In the second tree a rank has the label of the next one in the first.
        first, second = MESSAGES[size][rank], MESSAGES[size][(rank + 1) % size]
        for numel, values, found in zip(lengths(size), sums, sent, strict=True):
            # Of 2 ** r over all ranks: 2 ** size - 1.
            assert values.tolist() == [(2**size - 1) * (1000 + place) for place in range(numel)]
            low = numel // 2
            high = numel - low
            assert found == (
                4 * (first * low + second * high),
                first * math.ceil(low / 4) + second * math.ceil(high / 4),
            )


def test_the_messages_add_up() -> None:
    # An edge is used up and down: 2 (p - 1) messages a chunk; no rank sends four halves' worth or more.
    for size, messages in MESSAGES.items():
        assert sum(messages) == 2 * (size - 1)
        assert max(messages[rank] + messages[(rank + 1) % size] for rank in range(size)) <= 4
