"""Schedules replayed without a network, and what carries them out over a transport as slow as can be."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from exchanging import whole_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.collectives.link import Link
from strategies.collectives.ring import Ring
from strategies.collectives.schedule import Receive, Schedule, ScheduledWire, Send
from strategies.collectives.tree import Tree, binary_tree

WIRES = [Ring, Tree]
GIVE_UP_S = 10.0


class Nowhere:
    """A link of a rank to nobody, for schedules that are only looked at."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def schedules(wire: Callable[..., ScheduledWire], size: int, numel: int, chunk: int) -> list[Schedule]:
    ranks = [wire(Nowhere(rank, size), chunk_bytes=1) for rank in range(size)]
    return [rank.sum_schedule(numel, chunk) for rank in ranks]


@pytest.mark.parametrize("wire", WIRES)
@settings(max_examples=100, derandomize=True)
@given(size=st.integers(1, 12), numel=st.integers(0, 60), chunk=st.integers(1, 20))
def test_a_part_is_sent_before_it_is_overwritten(wire, size, numel, chunk) -> None:
    """The rule by which a receive may be begun early; and nothing longer than a chunk is sent."""
    for plan in schedules(wire, size, numel, chunk):
        sent = set()
        for step in plan:
            place = (step.part.start, step.part.stop)
            assert 0 < place[1] - place[0] <= chunk
            if isinstance(step, Send):
                sent.add(place)
            else:
                assert step.adds or place in sent


class Late:
    """A transport that does everything at the last moment that its contract allows.

    What is sent is read when its receiver waits for it, and it has arrived only then: who changes what is
    under way, or uses what has not been waited for, computes with wrong values.
    """

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self._rank, self._size, self._mail = rank, size, mail

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Outgoing:
        return self._mail.post(self._rank, to, tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Incoming:
        return Incoming(self._mail, (source, self._rank), tensors[0])


class Outgoing:
    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.read = threading.Event()
        self.is_awaited = False

    def wait(self) -> None:
        self.is_awaited = True
        assert self.read.wait(GIVE_UP_S), "nobody received it"


class Incoming:
    def __init__(self, mail: Mail, way: tuple[int, int], target: Tensor) -> None:
        self._mail, self._way, self._target = mail, way, target

    def wait(self) -> None:
        message = self._mail.next(self._way)
        assert message.values.shape == self._target.shape
        self._target.copy_(message.values)
        message.read.set()


class Mail:
    """The messages under way between the ranks, which are threads."""

    def __init__(self) -> None:
        self._ways: dict[tuple[int, int], deque[Outgoing]] = defaultdict(deque)
        self.posted: list[Outgoing] = []
        self._changed = threading.Condition()

    def post(self, source: int, to: int, values: Tensor) -> Outgoing:
        message = Outgoing(values)
        with self._changed:
            self._ways[source, to].append(message)
            self.posted.append(message)
            self._changed.notify_all()
        return message

    def next(self, way: tuple[int, int]) -> Outgoing:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ways[way], GIVE_UP_S), "nobody sent it"
            return self._ways[way].popleft()


@pytest.fixture
def late() -> Iterator[Callable[..., list[Any]]]:
    """`late(3, function)` calls `function(link)` on three ranks over one late transport."""
    with ThreadPoolExecutor(8) as pool:

        def run(size: int, function: Callable[[Link], Any]) -> list[Any]:
            mail = Mail()
            groups: list[Any] = [Late(rank, size, mail) for rank in range(size)]
            found = list(pool.map(lambda group: function(Link(group)), groups))
            # A receiver that is quick hides in the values that its sender has not waited.
            assert all(message.is_awaited for message in mail.posted), "a send was not waited for"
            return found

        yield run


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("wire", WIRES)
def test_sums_over_a_transport_that_is_late(late, wire, size) -> None:
    """Values are made NaN as soon as the call returns: whoever still needs them then gets NaN."""

    def sums(link: Link) -> list[Tensor]:
        summing = wire(link, chunk_bytes=8)
        found = []
        for numel in (101, 1, 64):
            values = torch.arange(numel, dtype=torch.float32) + 1000 * 2**link.rank
            summing.all_reduce(values)
            found.append(values.clone())
            values.fill_(torch.nan)
        return found

    for found in late(size, sums):
        for values in found:
            expected = size * torch.arange(values.numel()) + 1000.0 * (2**size - 1)
            assert torch.equal(values, expected)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_gathers_over_a_transport_that_is_late(late, size) -> None:
    def gathered(link: Link) -> Tensor:
        values = torch.arange(13, dtype=torch.int32) + 100 * link.rank
        rows = Ring(link, chunk_bytes=8).all_gather(values)
        found = rows.clone()
        rows.fill_(-1)
        return found

    expected = torch.arange(13, dtype=torch.int32) + 100 * torch.arange(size, dtype=torch.int32)[:, None]
    for rows in late(size, gathered):
        assert torch.equal(rows, expected)


def test_eight_receives_are_open_at_any_time_each_into_memory_of_its_own() -> None:
    events: list[str] = []
    filling: set[int] = set()

    class Arriving:
        def __init__(self, place: int) -> None:
            filling.add(place)
            self._place = place

        def wait(self) -> None:
            events.append("arrived")
            filling.remove(self._place)

    class Watching(Nowhere):
        def receive(self, values: Tensor, source: int) -> Arriving:
            events.append("begun")
            assert values.data_ptr() not in filling
            return Arriving(values.data_ptr())

    plan = [Receive(part=slice(place, place + 1), source=1, adds=True) for place in range(20)]
    wire: Any = Ring(Watching(0, 2), chunk_bytes=4)
    wire.carry_out(plan, torch.zeros(20))
    assert events == ["begun"] * 8 + ["arrived", "begun"] * 12 + ["arrived"] * 8


# The ring over real sockets: what it sends and receives. Its sums: test_collective_laws.py.


CHUNK = 16
"""Bytes: four values in single precision."""


def sent_of_sums(group: ExchangeGroup, numels: list[int]) -> list[tuple[int, int]]:
    """On a rank: bytes and messages of one sum of each length."""
    ring, found = Ring(Link(group), chunk_bytes=CHUNK), []
    for numel in numels:
        group.reset()
        ring.all_reduce(whole_numbers(group.rank(), numel))
        found.append((group.traffic.payload_bytes, group.traffic.operations))
    return found


@pytest.mark.parametrize("size", range(2, 9))
def test_bytes_sent_by_each_rank(threads, size) -> None:
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
def test_all_gather(threads, size) -> None:
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


def test_scratch_memory_is_kept_from_call_to_call(threads) -> None:
    for first, second, other in threads(2, memory_of_slots):
        assert first == second
        assert len(first) == 8
        assert not first & other


# The two trees: their shape, and what each rank sends. Their sums: test_collective_laws.py.

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
"""The number of messages, by number of ranks, that each node of the first tree sends for a chunk, one up and
one to every child.

Labels 1 to 8 have the root 8, below it 4, below that 2 and 6, and the odd ones are leaves; fewer labels
leave out the others: 5 has the root 4, below it 2 and 5.
"""


@pytest.mark.parametrize("size", range(1, 65))
def test_no_rank_is_an_inner_node_of_both_trees(size) -> None:
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
def test_sums_of_whole_numbers_are_exact_and_each_rank_sends_what_its_places_say(threads, size) -> None:
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
