"""Schedules replayed without a network, and what carries them out over a transport as slow as can be."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strategies.collectives.link import Link
from strategies.collectives.ring import Ring
from strategies.collectives.schedule import Receive, Schedule, ScheduledWire, Send, chunks
from strategies.collectives.tree import Tree

WIRES = [Ring, Tree]
GIVE_UP_S = 10.0


@pytest.mark.parametrize(
    ("start", "stop", "length", "parts"),
    [
        (0, 6, 3, [(0, 3), (3, 6)]),
        (2, 9, 3, [(2, 5), (5, 8), (8, 9)]),
        (4, 5, 3, [(4, 5)]),
        (4, 4, 3, []),
    ],
)
def test_chunks(start: int, stop: int, length: int, parts: list[tuple[int, int]]) -> None:
    assert chunks(start, stop, length) == [slice(first, end) for first, end in parts]


class Nowhere:
    """A link of a rank to nobody, for schedules that are only looked at."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("chunk_bytes", "dtype", "elements"),
    [(10, torch.float32, 2), (10, torch.bfloat16, 5), (8, torch.float64, 1), (3, torch.float32, 1)],
)
def test_a_chunk_is_whole_elements_at_least_one(chunk_bytes: int, dtype: torch.dtype, elements: int) -> None:
    wire = Ring(Nowhere(0, 1), chunk_bytes=chunk_bytes)  # type: ignore[arg-type]
    assert wire.chunk_of(torch.zeros(5, dtype=dtype)) == elements


def schedules(wire: Callable[..., ScheduledWire], size: int, numel: int, chunk: int) -> list[Schedule]:
    ranks = [wire(Nowhere(rank, size), chunk_bytes=1) for rank in range(size)]
    return [rank.sum_schedule(numel, chunk) for rank in ranks]


def replay(plans: list[Schedule], vectors: list[list[int]]) -> list[list[int]]:
    """Do the schedules of all ranks, one step of one rank after another, with a queue a pair of ranks.

    Fails where all that are not done wait for a message, and where a message has another length than its
    receive or is not received at all.
    """
    queues: dict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
    waiting = {rank: deque(plan) for rank, plan in enumerate(plans)}
    moved = True
    while moved:
        moved = False
        for rank, steps in waiting.items():
            while steps and (isinstance(steps[0], Send) or queues[steps[0].source, rank]):
                moved = True
                step = steps.popleft()
                if isinstance(step, Send):
                    queues[rank, step.to].append(vectors[rank][step.part])
                    continue
                arrived, own = queues[step.source, rank].popleft(), vectors[rank][step.part]
                assert len(arrived) == len(own)
                added = [a + b for a, b in zip(arrived, own, strict=True)]
                vectors[rank][step.part] = added if step.adds else arrived
    assert not any(waiting.values()), "all wait for each other"
    assert not any(queues.values()), "nobody asked for a message"
    return vectors


def powers(size: int, numel: int) -> list[list[int]]:
    """Of rank r at place i: 2 ** r * (1000 + i), so that every wrong sum of any ranks or places shows."""
    return [[2**rank * (1000 + place) for place in range(numel)] for rank in range(size)]


@pytest.mark.parametrize("wire", WIRES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(size=st.integers(1, 20), numel=st.integers(0, 60), chunk=st.integers(1, 20))
def test_every_rank_gets_the_sum(
    wire: Callable[..., ScheduledWire], size: int, numel: int, chunk: int
) -> None:
    found = replay(schedules(wire, size, numel, chunk), powers(size, numel))
    # Of 2 ** r over all ranks: 2 ** size - 1.
    assert found == [[(2**size - 1) * (1000 + place) for place in range(numel)]] * size


@pytest.mark.parametrize("wire", WIRES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(size=st.integers(1, 12), numel=st.integers(0, 60), chunk=st.integers(1, 20))
def test_what_is_overwritten_has_been_sent(
    wire: Callable[..., ScheduledWire], size: int, numel: int, chunk: int
) -> None:
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
    under way, or uses what has not been waited for, goes on with wrong values.
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
    """What is under way between the ranks, which are threads."""

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
def test_sums_over_a_transport_that_is_late(
    late: Callable[..., list[Any]], wire: Callable[..., ScheduledWire], size: int
) -> None:
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
def test_gathers_over_a_transport_that_is_late(late: Callable[..., list[Any]], size: int) -> None:
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
    wire: Any = Ring(Watching(0, 2), chunk_bytes=4)  # type: ignore[arg-type]
    wire.carry_out(plan, torch.zeros(20))
    assert events == ["begun"] * 8 + ["arrived", "begun"] * 12 + ["arrived"] * 8
