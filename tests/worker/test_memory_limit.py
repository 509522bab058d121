"""A limit on memory that the kernel enforces, each time in a separate process, as it cannot be undone."""

from __future__ import annotations

import os
import pickle
import resource
import threading
import traceback
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.worker.cell import memory
from harness.worker.cell.memory import MIB, HostMemory, MemoryLimit
from harness.worker.proof.compressor_promises import Witness
from harness.worker.rank.failure import classify
from results.errors import UsageError
from results.outcome import Outcome
from strategies.collectives.link import Link
from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor
from strategies.devices import Cuda, MemoryFigures
from strategies.exchange.buckets import Bucket

Found = list[object]
FULL = Outcome.OUT_OF_MEMORY


def in_a_child(function: Callable[[], Found]) -> Found:
    """Call `function` in a forked process, which has a separate C library and limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            held = use_up_the_heap()
            os.write(writer, pickle.dumps(function()))
            del held
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    assert data, "the child failed: its words are above"
    found: Found = pickle.loads(data)
    return found


def take(mib: int) -> Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8)


def use_up_the_heap() -> list[Tensor]:
    """Take what the C library has kept of earlier tests: the kernel would not be asked for it."""
    gauge, held = HostMemory(), list[Tensor]()
    for mib in (128, 64, 32, 16, 8, 4, 2, 1):
        while True:
            before = gauge.taken()
            block = take(mib)
            if gauge.taken() > before:
                break
            held.append(block)
    return held


def fits(mib: int) -> bool | Outcome:
    try:
        take(mib)
    except RuntimeError as error:
        return classify(error)[0]
    return True


def test_the_kernel_refuses_what_goes_beyond_and_forgets_the_limit_afterwards() -> None:
    def child() -> Found:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        with MemoryLimit(100).kept():
            inside = [fits(90), fits(110), fits(90)]
        return [*inside, fits(110), resource.getrlimit(resource.RLIMIT_DATA) == before]

    assert in_a_child(child) == [True, FULL, True, True, True]


def test_what_was_freed_can_be_taken_again_in_small_tensors_and_large() -> None:
    """80 + 60 MiB do not fit, one after another do; in tensors of 1 MiB too, which the C library would keep
    in its heap, below one that is still used, once it has seen a larger one freed."""

    def child() -> Found:
        found: Found = []
        with MemoryLimit(100).kept():
            take(24)
            for _ in range(3):
                kept = [take(1) for _ in range(80)]
                last = take(1)
                found.append(fits(60))
                del kept
                found.append(fits(60))
                del last
        return found

    assert in_a_child(child) == [FULL, True] * 3


def test_what_is_taken_while_it_is_lifted_leaves_the_room_as_it_was() -> None:
    def child() -> Found:
        limit = MemoryLimit(100)
        found: Found = []
        with limit.kept():
            own = [take(50)]
            with limit.lifted():
                beside = [take(300)]
                with limit.kept():
                    found += [fits(40), fits(60)]
                beside.append(take(200))
            found += [fits(40), fits(60)]
            with limit.lifted():
                beside.clear()
            found += [fits(40), fits(60)]
            own.clear()
        return found

    assert in_a_child(child) == [True, FULL] * 3


def test_a_thread_whose_stack_has_no_room_is_out_of_memory_too() -> None:
    def child() -> Found:
        # Larger than any stack that the C library keeps from threads that have ended.
        threading.stack_size(64 * 2**20)
        try:
            with MemoryLimit(1).kept():
                Thread(target=print).start()
        except (RuntimeError, MemoryError) as error:
            return list(classify(error))
        return []

    assert in_a_child(child) == [FULL, "MemoryError: the limit leaves no room for the stack of a thread"]


def test_an_exception_inside_lifts_it() -> None:
    def child() -> Found:
        try:
            with MemoryLimit(100).kept():
                take(200)
        except RuntimeError:
            return [fits(200)]
        return []

    assert in_a_child(child) == [True]


class Purse:
    """A gauge whose arithmetic is seen: bytes taken, and the caps that were set."""

    def __init__(self) -> None:
        self.bytes = 1000
        self.caps: list[int | None] = []

    def taken(self) -> int:
        return self.bytes

    def cap(self, most_bytes: int | None) -> None:
        self.caps.append(most_bytes)


@pytest.fixture
def purse(monkeypatch) -> Purse:
    purse = Purse()
    monkeypatch.setattr(memory, "HostMemory", lambda: purse)
    return purse


def test_the_cap_moves_with_what_is_not_the_strategys(purse) -> None:
    limit = MemoryLimit(1)
    purse.bytes += 5
    with limit.kept():
        purse.bytes += 100
        with limit.lifted():
            purse.bytes += 30
            with limit.kept():
                purse.bytes += 200
            purse.bytes -= 10
        purse.bytes -= 300
    # 1000 idle and 1 MiB; 5 came before, then 30 more beside, of which 10 went.
    allowed = 1000 + MIB
    assert purse.caps == [allowed + 5, None, allowed + 35, None, allowed + 25, None]


def test_what_is_freed_of_the_strategys_while_it_is_lifted_takes_no_room_from_it(purse) -> None:
    limit = MemoryLimit(1)
    with limit.kept():
        purse.bytes += 100
        with limit.lifted():
            purse.bytes -= 100
    assert purse.caps == [1000 + MIB, None, 1000 + MIB, None]


def test_on_cuda_it_is_a_fraction_of_the_device(monkeypatch) -> None:
    fractions: list[tuple[float, torch.device]] = []
    device = torch.device("cuda", 1)
    figures = dict.fromkeys(("allocated", "allocated_peak", "reserved_peak", "free"), 0)
    figures |= {"reserved": 2 * MIB, "total": 8 * MIB}
    monkeypatch.setattr(Cuda, "memory", lambda _: MemoryFigures(**figures))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, which: fractions.append((share, which))
    )
    with MemoryLimit(1, device).kept():
        assert fractions == [(3 / 8, device)]
    assert fractions == [(3 / 8, device), (1.0, device)]


def test_without_a_number_nothing_is_asked_of_the_system(monkeypatch) -> None:
    monkeypatch.setattr(memory, "HostMemory", None)
    limit = MemoryLimit(None, torch.device("cpu"))
    with limit.kept(), limit.lifted():
        pass


def test_a_kernel_that_only_nods_is_found_out(monkeypatch) -> None:
    monkeypatch.setattr(HostMemory, "cap", lambda *_: None)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: type("", (), {"mallopt": lambda *_: 1}))
    with pytest.raises(UsageError, match="does not enforce RLIMIT_DATA"):
        MemoryLimit(64)


def test_a_c_library_without_the_call_is_found_out(monkeypatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    with pytest.raises(UsageError, match="does not enforce RLIMIT_DATA"):
        MemoryLimit(64)


class _Passing(Compressor):
    """Sends all of it, and takes no memory."""

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        residual.fill_(0.25)


def test_what_a_witness_keeps_of_an_exchange_is_not_under_the_limit() -> None:
    def watched() -> Found:
        values, residual = torch.ones(8 * MIB), torch.zeros(8 * MIB)
        bucket = Bucket(index=0, values=values, pieces=())
        limit = MemoryLimit(8)
        witness = Witness(_Passing(feedback=True), after_ramp=False)
        witness.watching = True
        with limit.kept():
            # Copies of 32 MiB each of what went in, was sent, came out, and of the residual.
            witness.sum_shares(bucket, residual, Link(None))
            room = [fits(2), fits(32)]
        [seen] = witness.taken()
        found = (float(part.sum()) / len(part) for part in (seen.values, seen.sent, seen.sums, seen.residual))
        return [*room, *found]

    def alone() -> Found:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return watched()

    assert in_a_child(alone) == [True, FULL, 1.0, 0.75, 1.0, 0.25]
