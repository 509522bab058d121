"""The ring over real sockets: what it sends and receives. Its sums: test_collective_laws.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.collectives.link import Link
from strategies.collectives.ring import Ring

Threads = Callable[..., list[Any]]

CHUNK = 16
"""Bytes: four values in single precision."""


def whole_numbers(rank: int, numel: int) -> Tensor:
    """Of rank r at place i: 2 ** r * (1000 + i), exact in single precision in any order of the sum."""
    return 2.0**rank * (1000 + torch.arange(numel, dtype=torch.float32))


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
