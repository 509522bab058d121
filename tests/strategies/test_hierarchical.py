"""Sums inside of nodes and compressed sums across them, against sums of plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np
import pytest
import torch
from exchanging import whole_numbers
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.collectives.catalog import build_route
from strategies.collectives.link import Link
from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor
from strategies.compression.none import Dense
from strategies.exchange.buckets import Bucket, BucketRange

PIECES = (BucketRange(name="weight", offset=0, shape=torch.Size([2])),)
NUMELS = [0, 1, 5, 12, 101]
CASES = [
    pytest.param(size, node_size, via, marks=pytest.mark.slow if size in (5, 7) else ())
    for size in range(2, 9)
    for node_size in sorted({1, 2, 3, 4, size})
    for via in ("shards", "leaders")
    if node_size <= size and (via == "leaders" or size % node_size == 0)
]


class EverySecond(Compressor):
    """Sends the elements at even places, to all ranks, where they are added; keeps the others."""

    def __init__(self) -> None:
        super().__init__(feedback=True)
        self.seen: list[tuple[int, tuple[BucketRange, ...], int, int]] = []

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        self.seen.append((bucket.index, bucket.pieces, wire.rank, wire.size))
        if residual is not None:
            residual.copy_(bucket.values)
            residual[::2] = 0
        summed = wire.all_gather(bucket.values[::2].contiguous()).sum(0)
        bucket.values.zero_()
        bucket.values[::2] = summed


def exchanged(
    group: ExchangeGroup, node_size: int, via: str, make: Callable[[], Compressor]
) -> list[tuple[list[float], list[float], int]]:
    """On a rank, of each length: the sums, the residual, and the bytes handed over."""
    route = build_route(f"hierarchical:via={via}", Link(group), node_size=node_size)
    found = []
    for index, numel in enumerate(NUMELS):
        before = group.traffic.payload_bytes
        values = whole_numbers(group.rank(), numel)
        residual = torch.full((numel,), torch.nan)
        route.sum_shares(Bucket(index=index, values=values, pieces=PIECES), residual, make())
        found.append((values.tolist(), residual.tolist(), group.traffic.payload_bytes - before))
    return found


@pytest.mark.parametrize(
    ("size", "node_size", "via"),
    [
        *(
            (size, node_size, via)
            for size, node_size in ((3, 1), (4, 4), (6, 3))
            for via in ("shards", "leaders")
        ),
        (7, 3, "leaders"),
    ],
)
def test_uncompressed_it_hands_over_what_each_way_takes(threads, size, node_size, via) -> None:
    """Its sums are in test_collective_laws.py."""
    for rank, found in enumerate(threads(size, exchanged, node_size, via, Dense)):
        for numel, (_, _, payload) in zip(NUMELS, found, strict=True):
            assert payload == 4 * floats_handed_over(rank, size, node_size, via, numel)


def floats_handed_over(rank: int, size: int, node_size: int, via: str, numel: int) -> int:
    """Over one node, or nodes of one rank: one all-reduce. Else the calls of each way added up."""
    if node_size in (1, size):
        return numel
    if via == "shards":
        # A reduce-scatter of all shards, an all-reduce of one, an all-gather of one.
        shard = ceil(numel / node_size)
        return node_size * shard + shard + shard
    # A reduce and a broadcast, and an all-reduce between leaders.
    return 2 * numel + (numel if rank % node_size == 0 else 0)


def expected_of_every_second(
    size: int, node_size: int, via: str, numel: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sums, and by rank what it keeps, when a node's sum is sent only at even places of each shard."""
    shares = [2.0**rank * (1000 + np.arange(numel)) for rank in range(size)]
    residuals = [np.zeros(numel) for _ in range(size)]
    if node_size == size:
        return np.sum(shares, axis=0), residuals
    shard = ceil(numel / node_size) if via == "shards" else numel
    odd = np.array([place % shard % 2 == 1 for place in range(numel)], dtype=bool)
    for first in range(0, size, node_size):
        node = range(first, min(first + node_size, size))
        whole = np.sum([shares[rank] for rank in node], axis=0)
        for place in range(numel):
            keeper = first + (place // shard if via == "shards" else 0)
            residuals[keeper][place] = whole[place] if odd[place] else 0
    return np.where(odd, 0, np.sum(shares, axis=0)), residuals


@pytest.mark.parametrize(("size", "node_size", "via"), CASES)
def test_the_unsent_part_of_a_nodes_sum_is_kept_once(threads, size, node_size, via) -> None:
    found = threads(size, exchanged, node_size, via, EverySecond)
    for index, numel in enumerate(NUMELS):
        sums, residuals = expected_of_every_second(size, node_size, via, numel)
        total = np.zeros(numel)
        for rank in range(size):
            assert found[rank][index][0] == sums.tolist()
            assert found[rank][index][1] == residuals[rank].tolist()
            total += residuals[rank]
        # The law of conservation, of the expectation itself.
        assert (sums + total).tolist() == [(2**size - 1) * (1000 + place) for place in range(numel)]


def seen_by_the_compressor(
    group: ExchangeGroup, node_size: int, via: str
) -> list[tuple[int, tuple[BucketRange, ...], int, int]]:
    route = build_route(f"hierarchical:via={via}", Link(group), node_size=node_size)
    compressor = EverySecond()
    for index in (3, 4):
        # Nobody asks for the residual.
        bucket = Bucket(index=index, values=whole_numbers(group.rank(), 6), pieces=PIECES)
        route.sum_shares(bucket, None, compressor)
    return compressor.seen


def test_a_compressor_sees_shards_without_pieces_or_whole_buckets_on_leaders(threads) -> None:
    # Ranks 0 1 2 and 3 4 5 are nodes; across, every rank is one of two.
    shards = threads(6, seen_by_the_compressor, 3, "shards")
    assert shards == [[(index, (), rank // 3, 2) for index in (3, 4)] for rank in range(6)]
    # Nodes 0 1 2, 3 4 5 and 6: of them 0, 3 and 6 are leaders.
    leaders = threads(7, seen_by_the_compressor, 3, "leaders")
    assert leaders == [
        [(index, PIECES, rank // 3, 3) for index in (3, 4)] if rank % 3 == 0 else [] for rank in range(7)
    ]


def test_one_node_is_not_compressed_and_makes_no_groups(threads) -> None:
    for node_size in (2, 5):
        assert threads(2, seen_by_the_compressor, node_size, "shards") == [[], []]
    # A world of one.
    assert threads(1, seen_by_the_compressor, 1, "leaders") == [[]]


def test_nodes_of_one_rank_are_compressed_as_if_there_were_none(threads) -> None:
    assert threads(3, seen_by_the_compressor, 1, "shards") == [
        [(index, PIECES, rank, 3) for index in (3, 4)] for rank in range(3)
    ]


def unequal(group: ExchangeGroup) -> None:
    build_route("hierarchical", Link(group), node_size=2)


def test_shards_need_equal_nodes(threads) -> None:
    with pytest.raises(AssertionError, match="equal nodes"):
        threads(3, unequal)
