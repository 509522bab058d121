"""A link to other ranks: each call on the group that counts and on the default one, on and off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies.collectives.link import Link


def own(rank: int) -> Tensor:
    """[1, 0], [2, -1], [3, -2]: of ranks 0, 1 and 2."""
    return torch.tensor([1.0 + rank, -float(rank)])


def rows(rank: int) -> Tensor:
    """Row r, for rank r, is [10 * rank + r, 100]."""
    return torch.tensor([[10.0 * rank + row, 100.0] for row in range(3)])


def call_all(link: Link) -> dict[str, list[Any]]:
    """Each collective once, of three ranks."""
    rank = link.rank
    found: dict[str, Tensor] = {}
    for name, call in {
        "all_reduce": link.all_reduce,
        "started": lambda values: link.start_all_reduce(values).wait(),
        "largest": link.largest,
        "broadcast": lambda values: link.broadcast(values, 1),
        "reduce": lambda values: link.reduce(values, 1),
    }.items():
        found[name] = own(rank)
        call(found[name])
    found["all_gather"] = link.all_gather(own(rank))
    found["all_to_all"] = link.all_to_all(rows(rank))
    found["reduce_scatter"] = link.reduce_scatter(rows(rank))
    return {name: values.tolist() for name, values in found.items()}


def expected(rank: int) -> dict[str, list[Any]]:
    sums = [6.0, -3.0]
    return {
        "all_reduce": sums,
        "started": sums,
        "largest": [3.0, 0.0],
        "broadcast": [2.0, -1.0],
        "reduce": sums,
        "all_gather": [[1.0, 0.0], [2.0, -1.0], [3.0, -2.0]],
        "all_to_all": [[0.0 + rank, 100.0], [10.0 + rank, 100.0], [20.0 + rank, 100.0]],
        # Over the ranks 0 + r, 10 + r and 20 + r.
        "reduce_scatter": [30.0 + 3 * rank, 300.0],
    }


def counted(group: ExchangeGroup) -> tuple[dict[str, list[Any]], int, int]:
    found = call_all(Link(group))
    return found, group.traffic.payload_bytes, group.traffic.operations


def check(found: dict[str, list[Any]], rank: int) -> None:
    """Only the root of a reduce has a meaningful result."""
    ignored = set() if rank == 1 else {"reduce"}
    assert {name: value for name, value in found.items() if name not in ignored} == {
        name: value for name, value in expected(rank).items() if name not in ignored
    }


def test_collectives_of_the_group_that_counts(threads) -> None:
    for rank, (found, payload, operations) in enumerate(threads(3, counted)):
        check(found, rank)
        # Six times two floats, twice six.
        assert (payload, operations) == (6 * 8 + 2 * 24, 8)


class Later:
    """Work that is done when it is waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class Lazy:
    """The group with every collective put off until it is waited for; its results are NaN until then."""

    def __init__(self, group: ExchangeGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def __getattr__(self, name: str) -> Callable[..., Later]:
        def begin(*arguments: Any) -> Later:
            results = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            given = [result.clone() for result in results]
            for result in results:
                result.fill_(torch.nan)

            def finish() -> None:
                for result, before in zip(results, given, strict=True):
                    result.copy_(before)
                getattr(self._group, name)(*arguments).wait()

            return Later(finish)

        return begin


def over_a_lazy_group(group: ExchangeGroup) -> dict[str, list[Any]]:
    lazy: Any = Lazy(group)
    return call_all(Link(lazy))


def test_a_call_returns_when_its_result_is_there(threads) -> None:
    for rank, found in enumerate(threads(3, over_a_lazy_group)):
        check(found, rank)


def on_default_group(rank: int) -> dict[str, list[Any]]:
    assert (Link().rank, Link().size) == (rank, 3)
    return call_all(Link())


def test_collectives_of_the_default_group(ranks) -> None:
    for rank, found in enumerate(ranks(3, on_default_group)):
        check(found, rank)


def switched_off(group: ExchangeGroup) -> tuple[dict[str, list[Any]], int, int]:
    group.traffic.enabled = False
    return counted(group)


def test_with_the_exchange_off_everything_is_this_ranks_own(threads) -> None:
    for rank, (found, payload, operations) in enumerate(threads(3, switched_off)):
        unchanged = dict.fromkeys(
            ("all_reduce", "started", "largest", "broadcast", "reduce"), own(rank).tolist()
        )
        assert found == {
            **unchanged,
            "all_gather": [own(rank).tolist()] * 3,
            "all_to_all": rows(rank).tolist(),
            "reduce_scatter": rows(rank)[rank].tolist(),
        }
        assert (payload, operations) == (0, 0)


def pass_on(group: ExchangeGroup) -> tuple[list[float], list[float], int]:
    """On a rank: two messages to the next rank, received from the one before."""
    link = Link(group)
    sent = [torch.full((3,), 10.0 * link.rank), torch.full((1,), 10.0 * link.rank + 1)]
    arrived = [torch.zeros(3), torch.zeros(1)]
    works = [link.send(values, (link.rank + 1) % link.size) for values in sent]
    works += [link.receive(values, (link.rank - 1) % link.size) for values in arrived]
    for work in works:
        work.wait()
    return arrived[0].tolist(), arrived[1].tolist(), group.traffic.payload_bytes


def test_messages_arrive_in_the_order_sent_and_the_sender_counts(threads) -> None:
    assert threads(3, pass_on) == [([20.0] * 3, [21.0], 16), ([0.0] * 3, [1.0], 16), ([10.0] * 3, [11.0], 16)]


PARTS = [[0, 3], [1], [2, 4]]
PLACES = [(0, 2, [0.0, 3.0]), (0, 1, [1.0]), (0, 2, [2.0, 4.0]), (1, 2, [0.0, 3.0]), (1, 2, [2.0, 4.0])]
"""For each rank: its rank in its part, the part's size, and who is in it."""


def placed(link: Link) -> tuple[int, int, list[float]]:
    part = link.split(PARTS)
    return part.rank, part.size, part.all_gather(torch.tensor([float(link.rank)])).flatten().tolist()


def in_a_part(group: ExchangeGroup) -> tuple[tuple[int, int, list[float]], int]:
    return placed(Link(group)), group.traffic.operations


def test_a_part_has_its_own_ranks_and_is_counted_with_the_whole(threads) -> None:
    assert threads(5, in_a_part) == [(place, 1) for place in PLACES]


def in_a_part_of(rank: int, counting: bool) -> tuple[int, int, list[float]]:
    group = open_exchange() if counting else None
    found = placed(Link(group))
    if group is not None:
        group.reset()
    return found


@pytest.mark.parametrize("counting", [False, True])
def test_a_part_of_processes(ranks, counting) -> None:
    assert ranks(5, in_a_part_of, counting) == PLACES


def test_a_program_that_holds_a_link_ends_without_threads_of_its_group() -> None:
    program = """
import atexit, pathlib, time

def threads():
    found = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            found += "gloo" in (task / "comm").read_text()
        except OSError:  # it has ended
            pass
    return found

def until(there):
    while bool(threads()) is not there:
        time.sleep(0.01)  # a thread names itself after its start, and is listed a little after its end

atexit.register(until, False)
import torch.distributed as dist
from strategies.collectives.link import Link

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
link = Link()
until(True)
dist.destroy_process_group()
"""
    # Threads that stay would keep it from ending.
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
