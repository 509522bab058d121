"""`tree`: sums go up a binary tree of the ranks and come down again, in chunks that follow each other.

A leaf of a binary tree sends once what an inner node sends three times. So there are two trees, each for one
half of the values, and no rank is an inner node of both: none sends more than the vector twice (Sanders,
Speck & Traff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan). A chunk is there
and back in about 2 log2(p) messages, where a ring takes 2 (p - 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from results.spec import Spec
from strategies.collectives.facts import CHUNK_MB, CollectiveFacts
from strategies.collectives.route import Flat, Route
from strategies.collectives.schedule import Receive, Schedule, ScheduledWire, Send, chunks

if TYPE_CHECKING:
    from strategies.collectives.link import Link


class TreeFacts(CollectiveFacts):
    """Point-to-point messages between CPU ranks."""

    name = "tree"
    help = "ours: up and down two binary trees, each for half of the values, in chunks that follow each other"
    options = MappingProxyType({"chunk_mb": CHUNK_MB})
    sends = True
    route = "strategies.collectives.tree:route"
    implements = frozenset(("all-reduce",))
    on_cuda = "--collective default with NCCL_ALGO=Tree"


TREES = 2
LEAD = 2
"""Ticks from a send to its receive: one for the transfer of a chunk, one for a rank that is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """The place of a rank in a tree."""

    parent: int | None
    """None: the root."""
    children: tuple[int, ...]
    depth: int
    """Edges to the root."""


def binary_tree(size: int, shift: int) -> list[TreeNode]:
    """The nodes of ranks 0 to `size` - 1, rank r under the label (r + `shift`) % `size` + 1.

    The root of a range of labels is the label that the highest power of two divides, and the labels on
    either side of it form its subtrees. Odd labels are thus leaves and even ones are not, so that inner
    nodes of a tree are leaves of the one with the next shift.
    """
    nodes: dict[int, TreeNode] = {}

    def grow(first: int, last: int, parent: int | None, depth: int) -> tuple[int, ...]:
        if first > last:
            return ()
        label = max(range(first, last + 1), key=lambda label: label & -label)
        rank = (label - 1 - shift) % size
        left = grow(first, label - 1, rank, depth + 1)
        right = grow(label + 1, last, rank, depth + 1)
        nodes[rank] = TreeNode(parent=parent, children=left + right, depth=depth)
        return (rank,)

    grow(1, size, None, 0)
    return [nodes[rank] for rank in range(size)]


class Tree(ScheduledWire):
    """Sums over two binary trees at once; for any number of ranks and values.

    A root sums its half in one order, and passes the sum down: all ranks end with the same bits.
    """

    def __init__(self, link: Link, *, chunk_bytes: int) -> None:
        super().__init__(link, chunk_bytes=chunk_bytes)
        trees = [binary_tree(self.size, shift) for shift in range(TREES)]
        self._nodes = [tree[self.rank] for tree in trees]
        self._height = max(node.depth for tree in trees for node in tree)

    def sum_schedule(self, numel: int, chunk: int) -> Schedule:
        """Return the steps tick by tick: a rank receives a chunk `LEAD` ticks after another sends it.

        Chunk i leaves depth d for the root in tick i + LEAD (height - d), and is back there on its way down
        in tick i + LEAD (height + d). No step waits for a later send, so it cannot deadlock.
        """
        halves = [
            (node, chunks(numel * index // TREES, numel * (index + 1) // TREES, chunk))
            for index, node in enumerate(self._nodes)
        ]
        longest = max(len(parts) for _, parts in halves)
        steps: list[Send | Receive] = []
        for tick in range(longest + 2 * LEAD * self._height):
            for node, parts in halves:
                for part in _due(parts, tick - LEAD * (self._height - node.depth)):
                    steps += _up(node, part)
            for node, parts in halves:
                for part in _due(parts, tick - LEAD * (self._height + node.depth)):
                    steps += _down(node, part)
        return steps


def _up(node: TreeNode, part: slice) -> Iterator[Send | Receive]:
    """Yield the steps of a node for a part on its way to the root."""
    for child in node.children:
        yield Receive(part=part, source=child, adds=True)
    if node.parent is not None:
        yield Send(part=part, to=node.parent)


def _down(node: TreeNode, part: slice) -> Iterator[Send | Receive]:
    """Yield the steps of a node for a sum on its way from the root."""
    if node.parent is not None:
        yield Receive(part=part, source=node.parent, adds=False)
    for child in node.children:
        yield Send(part=part, to=child)


def _due(parts: list[slice], index: int) -> list[slice]:
    """A list of the part with that index, or an empty list if the index is out of range."""
    return parts[index : index + 1] if index >= 0 else []


def route(spec: Spec, link: Link, node_size: int) -> Route:
    """All ranks at once."""
    return Flat(Tree(link, chunk_bytes=int(spec.number("chunk_mb") * 2**20)))
