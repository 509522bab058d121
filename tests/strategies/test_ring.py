"""The ring over real sockets: exact sums, the same bits on all ranks, and what it sends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.worker.exchange import ExchangeGroup
from strategies.collectives.build import build_route
from strategies.collectives.link import Link
from strategies.collectives.ring.route import Ring
from strategies.compression.none.compressor import Dense
from strategies.exchange.buckets import Bucket

Threads = Callable[..., list[Any]]

CHUNK = 16
"""Bytes: four values in single precision."""


def bytes_of(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def whole_numbers(rank: int, numel: int) -> Tensor:
    """Of rank r at place i: 2 ** r * (1000 + i), exact in single precision in any order of the sum."""
    return 2.0**rank * (1000 + torch.arange(numel, dtype=torch.float32))


def lengths(size: int) -> list[int]:
    """None, fewer than ranks, as many, and around the borders of segments and chunks."""
    return sorted({0, 1, size - 1, size, size + 1, 4 * size - 1, 4 * size, 4 * size + 1, 1000})


def sum_whole_numbers(group: ExchangeGroup) -> list[Tensor]:
    """On a rank: sums of all lengths, one after another through one ring."""
    ring, found = Ring(Link(group), chunk_bytes=CHUNK), []
    for numel in lengths(group.size()):
        values = whole_numbers(group.rank(), numel)
        ring.all_reduce(values)
        found.append(values)
    return found


@pytest.mark.parametrize("size", range(1, 9))
def test_sums_of_whole_numbers_are_exact(threads: Threads, size: int) -> None:
    for found in threads(size, sum_whole_numbers):
        for numel, values in zip(lengths(size), found, strict=True):
            # Of 2 ** r over all ranks: 2 ** size - 1.
            assert values.tolist() == [(2**size - 1) * (1000 + place) for place in range(numel)]


def random_values(rank: int) -> Tensor:
    return torch.randn(3001, generator=torch.Generator().manual_seed(rank))


def sum_random(group: ExchangeGroup) -> Tensor:
    values = random_values(group.rank())
    Ring(Link(group), chunk_bytes=256).all_reduce(values)
    return values


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_random_sums_are_right_and_have_the_same_bits_on_all_ranks(threads: Threads, size: int) -> None:
    found = threads(size, sum_random)
    assert len({bytes_of(values) for values in found}) == 1
    shares = np.stack([random_values(rank).double().numpy() for rank in range(size)])
    # p - 1 additions: gamma(p - 1) of the sum of magnitudes (Higham 2002, section 4.2), u = 2 ** -24.
    gamma = (size - 1) * 2.0**-24 / (1 - (size - 1) * 2.0**-24)
    error = np.abs(found[0].double().numpy() - shares.sum(0))
    assert (error <= gamma * np.abs(shares).sum(0)).all()


def sum_of_type(group: ExchangeGroup, dtype: torch.dtype) -> Tensor:
    values = (torch.arange(50) % 7 + group.rank()).to(dtype)
    Ring(Link(group), chunk_bytes=CHUNK).all_reduce(values)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_types(threads: Threads, dtype: torch.dtype) -> None:
    # 3 * (i % 7) + 0 + 1 + 2, at most 21: exact in all of them.
    expected = [3 * (place % 7) + 3 for place in range(50)]
    for values in threads(3, sum_of_type, dtype):
        assert values.dtype == dtype
        assert values.tolist() == expected


def sent_of_sums(group: ExchangeGroup, numels: list[int]) -> list[tuple[int, int]]:
    """On a rank: bytes and messages of one sum of each length."""
    ring, found = Ring(Link(group), chunk_bytes=CHUNK), []
    for numel in numels:
        group.reset()
        ring.all_reduce(whole_numbers(group.rank(), numel))
        found.append((group.traffic.payload_bytes, group.traffic.operations))
    return found


@pytest.mark.parametrize("size", range(2, 9))
def test_bytes_sent_by_each_rank(threads: Threads, size: int) -> None:
    """Rank r sends the segments r, r - 1, ... for 2 (p - 1) rounds: all twice, but r + 1 and r + 2 once."""
    numels = [0, 3, 100, 1001]
    found = threads(size, sent_of_sums, numels)
    for index, numel in enumerate(numels):
        # Segment s ends before floor(n (s + 1) / p): 3 values over 2 ranks are 1 and 2.
        segments = [end - start for start, end in pairwise(numel * rank // size for rank in range(size + 1))]
        messages = [-(-segment // 4) for segment in segments]
        for rank in range(size):
            once = [(rank + 1) % size, (rank + 2) % size]
            assert found[rank][index] == (
                4 * (2 * numel - sum(segments[segment] for segment in once)),
                2 * sum(messages) - sum(messages[segment] for segment in once),
            )
        assert sum(sent[index][0] for sent in found) == 2 * (size - 1) * numel * 4


def gather(group: ExchangeGroup) -> list[tuple[Tensor, Tensor, int]]:
    """On a rank, of each length: rows, what was handed in, and bytes sent."""
    ring, found = Ring(Link(group), chunk_bytes=CHUNK), []
    for numel in (0, 1, 4, 21):
        group.reset()
        # Whole numbers, as top-k sends them.
        values = torch.arange(numel, dtype=torch.int32) + 100 * group.rank()
        found.append((ring.all_gather(values), values, group.traffic.payload_bytes))
    return found


@pytest.mark.parametrize("size", range(1, 9))
def test_all_gather(threads: Threads, size: int) -> None:
    for rank, found in enumerate(threads(size, gather)):
        for numel, (rows, values, sent_bytes) in zip((0, 1, 4, 21), found, strict=True):
            expected = [[100 * row + place for place in range(numel)] for row in range(size)]
            assert rows.tolist() == expected
            assert values.tolist() == expected[rank]
            assert sent_bytes == (size - 1) * numel * 4


def other_calls(group: ExchangeGroup) -> list[float]:
    ring = Ring(Link(group), chunk_bytes=CHUNK)
    assert (ring.rank, ring.size) == (group.rank(), group.size())
    values = torch.tensor([1.0, -1.0]) * group.rank()
    with pytest.raises(NotImplementedError, match="Ring has no all-to-all"):
        ring.all_to_all(values)
    ring.largest(values)
    return values.tolist()


def test_the_largest_is_asked_of_the_backend_and_an_all_to_all_is_refused(threads: Threads) -> None:
    assert threads(3, other_calls) == [[2.0, 0.0]] * 3


def while_off(group: ExchangeGroup) -> tuple[list[float], list[list[float]], int]:
    ring = Ring(Link(group), chunk_bytes=CHUNK)
    group.traffic.enabled = False
    values = torch.full((6,), 1.0 + group.rank())
    ring.all_reduce(values)
    return values.tolist(), ring.all_gather(values[:1]).tolist(), group.traffic.payload_bytes


def test_with_the_exchange_off_a_rank_goes_on_with_its_own(threads: Threads) -> None:
    for rank, found in enumerate(threads(3, while_off)):
        assert found == ([1.0 + rank] * 6, [[1.0 + rank]] * 3, 0)


def memory_of_slots(group: ExchangeGroup) -> list[set[int]]:
    """On a rank: where chunks of two sums, and of one of another type, were received to be added."""
    received: list[set[int]] = []

    class Watched(Link):
        def receive(self, values: Tensor, source: int) -> Any:
            received[-1].add(values.data_ptr())
            return super().receive(values, source)

    ring = Ring(Watched(group), chunk_bytes=CHUNK)
    for dtype in (torch.float32, torch.float32, torch.float64):
        values = torch.ones(80, dtype=dtype)
        own = range(values.data_ptr(), values.data_ptr() + values.nbytes)
        received.append(set())
        ring.all_reduce(values)
        received[-1] -= set(own)
    return received


def test_scratch_memory_is_kept_from_call_to_call(threads: Threads) -> None:
    for first, second, other in threads(2, memory_of_slots):
        assert first == second
        assert len(first) == 8
        assert not first & other


def through_the_catalog(group: ExchangeGroup, text: str, numel: int) -> tuple[list[float], int]:
    route = build_route(text, Link(group), node_size=1)
    values = whole_numbers(group.rank(), numel)
    route.sum_shares(Bucket(index=0, values=values, pieces=()), None, Dense())
    return values.tolist(), group.traffic.operations


@pytest.mark.parametrize(
    ("text", "numel", "messages"),
    [
        # 0.001 MiB are 1048 bytes, 262 values: what a segment has in one message, and one value more in two.
        ("ring:chunk_mb=0.001", 3 * 262, 4),
        ("ring:chunk_mb=0.001", 3 * 263, 8),
        ("ring", 3 * 263, 4),
    ],
)
def test_built_from_its_spec(threads: Threads, text: str, numel: int, messages: int) -> None:
    expected = [7 * (1000 + place) for place in range(numel)]
    assert threads(3, through_the_catalog, text, numel) == [(expected, messages)] * 3
