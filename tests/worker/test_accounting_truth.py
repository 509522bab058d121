"""The accounting against planted truths: a transport that sleeps, and computation that takes a known time.

A transfer holds no core while it lasts, so that ranks can share two. The truth of every step is known by the
moments at which computation and transfers ended, whatever else ran on the machine meanwhile; how much longer
than its CPU time the computation took is known as well. What is left of a disturbance only ever adds to a
time: of some steps the one with the least must be within 10 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest
import torch
from rank_builders import CPU, MS, a_stopwatch
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.measure.blocks import Stopwatch
from results.cell import StepPolicy
from strategies import Trainer, TrainSettings

Millis = list[float]

BYTES_PER_MS = 4096
SLACK_MS = 10.0
"""Time of a step besides the planted times: messages, threads that are woken, the update."""
DDP = "ddp:bucket_mb=0.001"
SCRATCH = "scratch-ddp:bucket_mb=0.001:first_bucket_mb=0.001"
FEWEST = 300
"""Elements of a parameter: 1200 bytes fill a bucket of 1048, so that each has a separate one."""


class SleepingTransport:
    """A backend whose all-reduces take, from when the last rank has come, their bytes at a bandwidth.

    One after another, as on one link; Gloo carries them, and then a thread sleeps.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._line = ThreadPoolExecutor(1)
        self.ended_ns: list[int] = []

    def allreduce(self, tensors: list[Tensor], *options: object) -> Any:
        done: Future[list[Tensor]] = Future()

        def carry() -> None:
            self._backend.allreduce(tensors, *options).wait()
            time.sleep(sum(tensor.nbytes for tensor in tensors) / BYTES_PER_MS / 1e3)
            self.ended_ns.append(time.perf_counter_ns())
            done.set_result(tensors)

        self._line.submit(carry)
        return _create_work_from_future(done)


class Computation:
    """Burns CPU for a thread time; keeps how long it took each time, and when it ended."""

    def __init__(self, cpu_ms: float) -> None:
        self._cpu_ns = int(cpu_ms * MS)
        self.wall_ns: list[int] = []
        self.ended_ns: list[int] = []
        self._matrix = torch.ones(48, 48)

    def forget(self) -> None:
        self.wall_ns.clear()
        self.ended_ns.clear()

    def run(self) -> None:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        while time.thread_time_ns() - cpu < self._cpu_ns:
            # In torch, which lets other threads run Python meanwhile.
            self._matrix @ self._matrix
        self.ended_ns.append(time.perf_counter_ns())
        self.wall_ns.append(self.ended_ns[-1] - wall)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, computation: Computation) -> Tensor:
        context.computation = computation
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        context.computation.run()
        return gradients[0], None


class Planted(nn.Module):
    """Two parameters, whose gradients take known times to transfer, and computation between them.

    In backward the gradient of `late` comes first, then the computation, then the gradient of `early`.
    """

    def __init__(self, *, early_ms: float, late_ms: float, compute_ms: float) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.zeros(max(FEWEST, round(early_ms * BYTES_PER_MS / 4))))
        self.late = nn.Parameter(torch.zeros(max(FEWEST, round(late_ms * BYTES_PER_MS / 4))))
        self.computation = Computation(compute_ms)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = _InBackward.apply(inputs + self.early.sum(), self.computation)
        total: Tensor = hidden + self.late.sum()
        return total


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.zeros(1), torch.zeros(1)


def stopwatch(model: Planted, exchange: ExchangeGroup, strategy: str) -> Stopwatch:
    """After two steps, in which strategies lay out their buckets; transfers are slow from then on."""
    settings = TrainSettings(strategy=strategy, optimizer="sgd:lr=0")
    trainer = Trainer(model, lambda y, t: (y - t).sum(), device=CPU, settings=settings, group=exchange)
    data = batches()
    for _ in range(2):
        trainer.step(data)
    exchange._transport = SleepingTransport(exchange._transport)
    return a_stopwatch(trainer, data)


def ms(durations_ns: Sequence[int]) -> Millis:
    return [duration / MS for duration in durations_ns]


def beyond_ms(last_arrived_ns: list[int], computed_ns: list[int]) -> Millis:
    """Return for each step how long after its computation its last transfer arrived."""
    pairs = zip(last_arrived_ns, computed_ns, strict=True)
    return [max(0, arrived - computed) / MS for arrived, computed in pairs]


QUADS = 4


def exposed(rank: int, strategy: str, planted: dict[str, float]) -> dict[str, Any]:
    """On a rank: what quads and a recorded block find, and what was planted in their steps."""
    exchange, model = open_exchange(), Planted(**planted)
    watch = stopwatch(model, exchange, strategy)
    transport: Any = exchange._transport
    computation = model.computation
    computation.forget()
    quads = watch.measure_exposed(exchange, StepPolicy(block_steps=1, quads=QUADS, target=0))
    # One step each: on, off, off, on. Two transfers in one with the exchange on.
    walls = zip(*(getattr(quads, f"{name}_ns") for name in BLOCKS), strict=True)
    found: dict[str, Any] = {
        "walls": ms([wall for quad in walls for wall in quad]),
        "computed": ms(computation.wall_ns),
        "beyond": beyond_ms(
            transport.ended_ns[1::2],
            [ended for step, ended in enumerate(computation.ended_ns) if step % 4 in (0, 3)],
        ),
    }
    computation.forget()
    transport.ended_ns.clear()
    recorded = watch.record(exchange, CPU)
    # The first step is the one that is not kept.
    return found | {
        "blocked": ms(recorded.blocked_ns or []),
        "recorded beyond": beyond_ms(transport.ended_ns[1::2], computation.ended_ns)[1:],
        "recorded computed": ms(computation.wall_ns)[1:],
    }


BLOCKS = ("on_first", "off_first", "off_second", "on_second")
PLANTED: dict[str, dict[str, float]] = {
    # 15 ms of transfer beside 30 ms of computation.
    "hidden": {"early_ms": 0, "late_ms": 15, "compute_ms": 30},
    # 45 ms beside 20 ms.
    "half hidden": {"early_ms": 0, "late_ms": 45, "compute_ms": 20},
    # 30 ms after all computation.
    "exposed": {"early_ms": 30, "late_ms": 0, "compute_ms": 10},
}
ATTEMPTS = 5
"""To plant: a busy machine may disturb all steps of one. Steps of all of them count, so that what is wrong in
every step is never tried away."""
EXPOSED_MS = {"hidden": 0.0, "half hidden": 45.0 - 20.0, "exposed": 30.0}


def on_less_off_ms(found: dict[str, Any]) -> float:
    """The noise: how much longer the best on block takes than the best off block, less what was exposed.

    Both without their computation, which is not always as long.
    """
    rest: dict[bool, Millis] = {True: [], False: []}
    beyond = iter(found["beyond"])
    for step, (wall, computed) in enumerate(zip(found["walls"], found["computed"], strict=True)):
        on = step % 4 in (0, 3)
        rest[on].append(wall - computed - (next(beyond) if on else 0.0))
    return min(rest[True]) - min(rest[False])


def together(
    attempt: Callable[[], list[dict[str, Any]]],
    misses: Callable[[list[dict[str, Any]]], list[str]],
) -> list[str]:
    """Return the misses of each rank in the steps of up to `ATTEMPTS` attempts together."""
    found = attempt()
    for _ in range(ATTEMPTS - 1):
        if not misses(found):
            break
        pairs = zip(found, attempt(), strict=True)
        found = [{name: before[name] + new[name] for name in new} for before, new in pairs]
    return misses(found)


def missed_exposed(case: str, results: list[dict[str, Any]]) -> list[str]:
    """Name what quads and the recorder miss, in the least disturbed step of each rank."""
    missed = []
    for rank, found in enumerate(results):
        # What is planted is there; a slow computation hides more.
        beyond = min(found["recorded beyond"])
        least = EXPOSED_MS[case] if case == "exposed" else 0.0
        # The training thread is blocked while it waits, and while others have its core.
        columns = (found[name] for name in ("blocked", "recorded beyond", "recorded computed"))
        noise = min(
            blocked - after - (computed - PLANTED[case]["compute_ms"])
            for blocked, after, computed in zip(*columns, strict=True)
        )
        on_off = on_less_off_ms(found)
        if not least <= beyond < EXPOSED_MS[case] + SLACK_MS:
            missed.append(f"rank {rank}: {beyond} ms were planted after computation")
        if not abs(on_off) < SLACK_MS:
            missed.append(f"rank {rank}: added by the exchange is {on_off} ms beside what was exposed")
        if not -3.0 < noise < SLACK_MS:
            missed.append(f"rank {rank}: blocked {noise} ms beside what was exposed")
    return missed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "strategy"),
    [("hidden", DDP), ("exposed", DDP), *((case, SCRATCH) for case in PLANTED)],
)
def test_on_off_quads_and_the_recorder_find_the_exposed_time(ranks, case, strategy) -> None:
    def attempt() -> list[dict[str, Any]]:
        return ranks(2, exposed, strategy, PLANTED[case])

    assert together(attempt, lambda found: missed_exposed(case, found)) == []


TRANSFER_MS, DELAY_MS = 30.0, 50.0


def delayed(rank: int, strategy: str, slow_rank: int | None, how: str) -> dict[str, Any]:
    """On a rank: in each recorded step the duration in ms of its large collective, and the planted delay."""
    exchange = open_exchange()
    model = Planted(early_ms=TRANSFER_MS, late_ms=0, compute_ms=0)
    watch = stopwatch(model, exchange, strategy)
    delays: Millis = []

    def delay() -> None:
        start = time.perf_counter_ns()
        if how == "sleep":
            time.sleep(DELAY_MS / 1e3)
        else:
            Computation(DELAY_MS).run()
        delays.append((time.perf_counter_ns() - start) / MS)

    if rank == slow_rank:
        # Before the large one and after the small one.
        model.computation.run = delay
    operations = watch.record(exchange, CPU).operations
    large = int(TRANSFER_MS * BYTES_PER_MS)
    assert set(operations.payload_bytes) == {4 * FEWEST, large}
    rows = zip(operations.payload_bytes, operations.duration_ns, strict=True)
    return {"ms": [duration / MS for payload, duration in rows if payload == large], "delays": delays[1:]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow_rank", "how", "strategy"),
    [
        (None, "sleep", DDP),
        (1, "sleep", DDP),
        (None, "sleep", SCRATCH),
        (0, "sleep", SCRATCH),
        (1, "burn", SCRATCH),
    ],
)
def test_a_late_rank_is_a_wait_of_the_others_and_leaves_the_transfer_alone(
    ranks, slow_rank, how, strategy
) -> None:
    """The least transfer may be off by a third; waits, by their medians, by half of the delay."""
    size = 2 if how == "burn" else 3

    def attempt() -> list[dict[str, Any]]:
        return ranks(size, delayed, strategy, slow_rank, how)

    assert together(attempt, lambda found: missed_delay(slow_rank, found)) == []


def missed_delay(slow_rank: int | None, found: list[dict[str, Any]]) -> list[str]:
    transfers = [min(durations) for durations in zip(*(rank["ms"] for rank in found), strict=True)]
    missed = []
    if not TRANSFER_MS <= min(transfers) < TRANSFER_MS * 4 / 3:
        missed.append(f"the least transfer is {min(transfers)} ms")
    planted = [DELAY_MS] * len(transfers) if slow_rank is None else found[slow_rank]["delays"]
    for rank, row in enumerate(found):
        # In parts of the delay, which is never less than planted, and often more on a busy machine.
        wait = median(
            (duration - transfer) / delay
            for duration, transfer, delay in zip(row["ms"], transfers, planted, strict=True)
        )
        waits = slow_rank is not None and rank != slow_rank
        if not (0.5 < wait < 1.5 if waits else wait < 0.5):
            missed.append(f"rank {rank}: waits {wait} of the delay")
    return missed
