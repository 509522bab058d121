"""The recorder: which operations a step has, by closed forms; when each began and ended; what it leaves."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_builders import CPU, MS, a_stopwatch, batches, network
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import functional as F

from harness.worker.exchange import recorder as recorder_module
from harness.worker.exchange.group import ExchangeGroup, open_exchange
from harness.worker.exchange.recorder import (
    MOST_OPERATIONS,
    Recorder,
    TooManyOperationsError,
    group_text,
    steps_to_record,
)
from harness.worker.measure.clock import StepClock
from harness.worker.rank.control import parameters_hash
from results.layout import ModelLayout
from results.record import POINT_TO_POINT, Operations, Recorded, StageTimes, StepColumns
from strategies import Phase, Trainer, TrainSettings
from strategies.training.observer import SilentObserver

Row = tuple[int, str, str, int]

# Linear(8, 48), BatchNorm1d(48), Linear(48, 5): 384 + 48, 48 + 48 and 240 + 5 floats.
NUMEL = 773
# Running mean and variance, and the number of batches, an int64.
STATISTICS_BYTES, COUNTER_BYTES = 2 * 48 * 4, 8


def trainer_of(exchange: ExchangeGroup, **settings: Any) -> Trainer:
    chosen = TrainSettings(**{"optimizer": "sgd:lr=0.05", **settings})
    return Trainer(network(), F.cross_entropy, device=CPU, settings=chosen, group=exchange)


def rows_of(operations: Operations) -> list[Row]:
    """Step, name, group and bytes of each row."""
    return [
        (step, operations.names[name], operations.groups[group], payload)
        for step, name, group, payload in zip(
            operations.step, operations.name, operations.group, operations.payload_bytes, strict=True
        )
    ]


def apart(operations: Operations) -> bool:
    """Whether the collectives of a step and group come one after another."""
    free: dict[tuple[int, int], int] = {}
    for index, name in enumerate(operations.name):
        if operations.names[name] in POINT_TO_POINT:
            continue
        queue = operations.step[index], operations.group[index]
        issued, duration = operations.issued_ns[index], operations.duration_ns[index]
        if duration and issued < free.get(queue, 0):
            return False
        free[queue] = max(free.get(queue, 0), issued + duration)
    return True


class LikeNccl:
    """A backend that gives no work where torch asks for a synchronous operation, as NCCL does."""

    def __init__(self, backend: dist.ProcessGroup) -> None:
        self._backend = backend
        self.synchronous = 0

    def __getattr__(self, name: str) -> Callable[..., dist.Work | None]:
        def call(*arguments: Any) -> dist.Work | None:
            work: dist.Work = getattr(self._backend, name)(*arguments)
            if getattr(arguments[-1], "asyncOp", True):
                return work
            work.wait()
            self.synchronous += 1
            return None

        return call


def recorded_rows(rank: int, settings: dict[str, Any], steps: int, like_nccl: bool = False) -> dict[str, Any]:
    """On a rank: the operations of some steps after two others, and what the group counted meanwhile."""
    exchange = open_exchange()
    backend = LikeNccl(exchange.backend)
    if like_nccl:
        exchange._transport = backend
    trainer, data = trainer_of(exchange, **settings), batches(rank)
    for _ in range(2):
        trainer.step(data)
    traffic, clock = exchange.traffic, StepClock(CPU)
    traffic.payload_bytes = traffic.operations = 0
    trainer.observer = traffic.recorder = recorder = Recorder(clock, CPU)
    for _ in range(steps):
        trainer.step(data)
    recorded = recorder.take(clock.drain())
    counted = traffic.payload_bytes, traffic.operations
    traffic.recorder = None
    trainer.step(data)
    assert not recorder.take(clock.drain()).operations.step, "the recorder is off"
    operations = recorded.operations
    for index, step in enumerate(operations.step):
        issued, duration = operations.issued_ns[index], operations.duration_ns[index]
        # Of two that are in flight at once, the later may have no time of its own.
        assert 0 < issued <= issued + duration <= recorded.step_ns[step] + 500 * MS
    assert not operations.step or max(operations.duration_ns) > 0
    assert apart(operations), "each collective begins when the one before it on its group has ended"
    exchange.reset()
    return {
        "rows": rows_of(operations),
        "traffic": counted,
        "helpers": recorded.exchange_cpu_ns,
        "synchronous": backend.synchronous,
    }


def everybody(size: int) -> str:
    return {2: "0-1", 3: "0-2", 4: "0-3"}[size]


SMALL = "bucket_mb=0.001"
# 1048 bytes close a bucket, from the last layer on: the 980 of Linear(48, 5) and half of BatchNorm's 384,
# then the other half and the 1728 of Linear(8, 48).
SMALL_BUCKETS = [("allreduce", 980 + 192), ("allreduce", 192 + 1728)]
DDP_BUFFERS = [("broadcast", STATISTICS_BYTES), ("broadcast", COUNTER_BYTES)]
ONE_MESSAGE = [("broadcast", STATISTICS_BYTES + COUNTER_BYTES)]

CASES: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "ddp": ({"strategy": "ddp"}, [*DDP_BUFFERS, ("allreduce", 4 * NUMEL)]),
    "ddp, small buckets": ({"strategy": f"ddp:{SMALL}"}, [*DDP_BUFFERS, *SMALL_BUCKETS]),
    "scratch-ddp": (
        {"strategy": f"scratch-ddp:{SMALL}:first_{SMALL}"},
        [*ONE_MESSAGE, *SMALL_BUCKETS],
    ),
    # The largest 77 of 773, a value and a place of 4 bytes each.
    "topk": (
        {"strategy": "scratch-ddp", "compression": "topk:0.1"},
        [*ONE_MESSAGE, ("_allgather_base", 77 * 8)],
    ),
    # Of (48, 8) and (5, 48) factors of two columns: 48 + 5 rows of P, with the 149 floats of biases and
    # BatchNorm, which go as they are; then 8 + 48 of Q.
    "powersgd": (
        {"strategy": "scratch-ddp", "compression": "powersgd:2"},
        [*ONE_MESSAGE, ("allreduce", 4 * (2 * 53 + 149)), ("allreduce", 4 * 2 * 56)],
    ),
    "ddp with topk": (
        {"strategy": "ddp", "compression": "topk:0.1"},
        [*DDP_BUFFERS, ("_allgather_base", 77 * 8)],
    ),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_of_the_closed_form_in_the_same_order_on_all_ranks(ranks, case, size) -> None:
    settings, expected = CASES[case]
    for found in ranks(size, recorded_rows, settings, 3):
        assert found["rows"] == [
            (step, name, everybody(size), payload) for step in range(3) for name, payload in expected
        ]
        assert found["traffic"] == (3 * sum(payload for _, payload in expected), 3 * len(expected))
        # Compressors run on a thread of their own; the backend's all-reduce needs none.
        assert (found["helpers"] is not None) == ("compression" in settings)


@pytest.mark.parametrize(
    ("strategy", "synchronous"),
    [("fsdp", True), ("ddp", False), ("zero1", False), ("scratch-fsdp", False)],
)
def test_synchronous_operations_are_recorded_where_the_backend_gives_no_work_for_them(
    ranks, strategy, synchronous
) -> None:
    """FSDP2 asks for them; torch's C++ and our own strategies always wait for a work."""
    as_gloo = ranks(2, recorded_rows, {"strategy": strategy}, 3)
    as_nccl = ranks(2, recorded_rows, {"strategy": strategy}, 3, True)
    for gloo, nccl in zip(as_gloo, as_nccl, strict=True):
        assert nccl["rows"] == gloo["rows"]
        assert nccl["traffic"] == gloo["traffic"]
        assert len(nccl["rows"]) >= 3
        assert (nccl["synchronous"] > 0) == synchronous


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_sends_and_receives_segments(ranks, size) -> None:
    """Rank r sends the segments r, r - 1, ... for 2 (p - 1) rounds, and rank r + 1 receives them."""
    lengths = [4 * (NUMEL * (r + 1) // size - NUMEL * r // size) for r in range(size)]

    def passed_on_by(rank: int) -> Counter[int]:
        return Counter(lengths[(rank - back) % size] for back in range(2 * (size - 1)))

    settings = {"strategy": "scratch-ddp", "collective": "ring"}
    for rank, found in enumerate(ranks(size, recorded_rows, settings, 1)):
        rows = found["rows"]
        assert {group for _, _, group, _ in rows} == {everybody(size)}
        assert Counter(payload for _, name, _, payload in rows if name == "send") == passed_on_by(rank)
        assert Counter(payload for _, name, _, payload in rows if name == "recv") == passed_on_by(rank - 1)
        counted = [payload for _, name, _, payload in rows if name != "recv"]
        assert found["traffic"] == (sum(counted), len(counted))
        assert len(rows) == 1 + 4 * (size - 1)


def test_groups_of_nodes_are_recorded_by_the_ranks_of_the_launch(ranks) -> None:
    settings = {"strategy": "scratch-ddp", "collective": "hierarchical", "node_size": 2}
    for rank, found in enumerate(ranks(4, recorded_rows, settings, 2)):
        inside = "0-1" if rank < 2 else "2-3"
        across = "0,2" if rank % 2 == 0 else "1,3"
        groups = [group for _, name, group, _ in found["rows"] if name != "broadcast"]
        assert set(groups) == {inside, across}
        payload = sum(payload for _, name, _, payload in found["rows"] if name != "recv")
        assert found["traffic"][0] == payload


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (range(8), "0-7"),
        ([0, 1], "0-1"),
        ([0, 2, 4], "0,2,4"),
        ([0, 1, 4, 5, 7], "0-1,4-5,7"),
        ([3], "3"),
    ],
)
def test_a_group_is_written_by_its_ranks(group, text) -> None:
    assert group_text(group) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_group_can_be_read_back(group) -> None:
    read = []
    for part in group_text(sorted(group)).split(","):
        first, _, last = part.partition("-")
        read += range(int(first), int(last or first) + 1)
    assert read == sorted(group)


@pytest.mark.parametrize(
    ("period", "operations", "steps"),
    [
        (1, 3, 20),
        (8, 3, 16),  # two periods
        (16, 3, 16),
        (50, 3, 50),
        (1, 0, 20),
        (1, 300, 13),  # 13 x 300 = 3900
        (8, 2001, 8),
        (1, 4000, 1),
    ],
)
def test_about_20_steps_in_whole_periods_and_what_a_record_holds(period, operations, steps) -> None:
    assert steps_to_record(period, operations) == steps


def test_a_period_that_no_record_holds_is_refused() -> None:
    with pytest.raises(TooManyOperationsError, match="4001 operations, a record holds 4000"):
        steps_to_record(1, 4001)


@contextmanager
def a_recorded_step(exchange: ExchangeGroup) -> Iterator[list[Recorded]]:
    """A step whose operations are recorded; the record is in the list when the context has been left."""
    clock, found = StepClock(CPU), list[Recorded]()
    exchange.traffic.recorder = recorder = Recorder(clock, CPU)
    recorder.begins(Phase.FORWARD)
    yield found
    recorder.step_done(torch.tensor(0.0))
    found.append(recorder.take(clock.drain()))


def slow_ends(rank: int, what: str) -> dict[str, Any]:
    """On a rank: an operation to which rank 1 comes 80 ms after rank 0, and for which nobody waits for 300 ms
    after it is done."""
    exchange, buffer = open_exchange(), torch.ones(6)
    store, issued = dist.distributed_c10d._get_default_store(), f"{what} is issued"
    with a_recorded_step(exchange) as recorded:
        if rank == 1:
            store.wait([issued])
        time.sleep(0.08)
        began = time.monotonic()
        if what == "allreduce":
            work = exchange.allreduce([buffer])
        elif what == "_reduce_scatter_base":
            work = exchange._reduce_scatter_base(torch.empty(6 // dist.get_world_size()), buffer)
        else:
            work = exchange.send([buffer], 1, 0) if rank == 0 else exchange.recv([buffer], 0, 0)
        if rank == 0:
            store.set(issued, "")
        end = began + 60
        while what == "allreduce" and not work.get_future().done() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
        unasked_ms = (time.monotonic() - began) * 1e3
        work.wait()
    operations, [blocked_ns] = recorded[0].operations, recorded[0].blocked_ns or []
    return {
        "row": rows_of(operations),
        "unasked_ms": unasked_ms,
        "issued_ms": operations.issued_ns[0] / MS,
        "duration_ms": operations.duration_ns[0] / MS,
        "blocked_ms": blocked_ns / MS,
    }


def test_an_operation_ends_when_it_is_done_and_not_when_somebody_asks(ranks) -> None:
    first, second = ranks(2, slow_ends, "allreduce")
    assert first["row"] == second["row"] == [(0, "allreduce", "0-1", 24)]
    assert min(first["issued_ms"], second["issued_ms"]) >= 80
    # Rank 0 is in it until rank 1 comes; of the last 300 ms before somebody asks, neither.
    assert first["duration_ms"] >= 80
    for found in (first, second):
        assert found["duration_ms"] < found["unasked_ms"] - 200
    assert first["blocked_ms"] >= 380


@pytest.mark.parametrize("what", ["_reduce_scatter_base", "send"])
def test_what_has_no_future_ends_when_it_has_been_waited_for(ranks, what) -> None:
    first, second = ranks(2, slow_ends, what)
    other = "recv" if what == "send" else what
    assert [first["row"], second["row"]] == [[(0, what, "0-1", 24)], [(0, other, "0-1", 24)]]
    for found in (first, second):
        assert found["duration_ms"] >= 300


def unwaited(rank: int) -> tuple[int, int]:
    exchange, buffer = open_exchange(), torch.ones(1)
    with a_recorded_step(exchange) as recorded:
        work = exchange.send([buffer], 1, 0) if rank == 0 else exchange.recv([buffer], 0, 0)
        time.sleep(0.05)
    work.wait()
    operations = recorded[0].operations
    return operations.issued_ns[0] + operations.duration_ns[0], recorded[0].step_ns[0]


def test_what_nobody_has_waited_for_ends_with_its_step(ranks) -> None:
    for end_ns, step_ns in ranks(2, unwaited):
        assert end_ns == pytest.approx(step_ns, abs=20 * MS)
        assert end_ns > 50 * MS


def recorder_alone() -> tuple[Recorder, StepClock]:
    clock = StepClock(CPU)
    return Recorder(clock, CPU), clock


def work_of(future: Future[int]) -> Any:
    return SimpleNamespace(get_future=lambda: future, wait=lambda timeout: True)


def done() -> Any:
    future: Future[int] = Future()
    future.set_result(0)
    return work_of(future)


def test_a_callback_that_comes_after_its_step_still_says_when_the_work_was_done() -> None:
    recorder, clock = recorder_alone()
    future: Future[int] = Future()
    recorder.begins(Phase.FORWARD)
    recorder.issue("allreduce", "0-1", 4, lambda: work_of(future))
    recorder.step_done(torch.tensor(0.0))
    threading.Timer(0.06, lambda: future.set_result(0)).start()
    [duration_ns] = recorder.take(clock.drain()).operations.duration_ns
    assert duration_ns > 50 * MS


def test_blocked_is_wall_less_cpu_time_of_all_phases_but_data() -> None:
    recorder, clock = recorder_alone()
    began_ns = time.perf_counter_ns()
    for phase, seconds in ((Phase.DATA, 0.2), (Phase.FORWARD, 0.03), (Phase.BACKWARD, 0.02)):
        recorder.begins(phase)
        time.sleep(seconds)
    recorder.begins(Phase.OPTIMIZER)
    burn(30)
    recorder.step_done(torch.tensor(0.0))
    whole_ns = time.perf_counter_ns() - began_ns
    recorder.begins(Phase.DATA)
    recorder.step_done(torch.tensor(0.0))
    first, second = recorder.take(clock.drain()).blocked_ns or []
    # 30 + 20 ms asleep, and what else has the core; neither 200 ms of data nor 30 ms that are burnt.
    assert 50 * MS <= first <= whole_ns - 229 * MS
    assert second == 0


def burn(milliseconds: float) -> None:
    start = time.thread_time_ns()
    while time.thread_time_ns() - start < milliseconds * MS:
        pass


def test_exchange_cpu_is_that_of_the_threads_which_issue_beside_the_one_that_trains() -> None:
    recorder, clock = recorder_alone()

    def compress(milliseconds: float) -> None:
        burn(milliseconds)
        time.sleep(0.05)
        recorder.issue("allreduce", "0-1", 4, done)

    with ThreadPoolExecutor(1) as lane:
        for milliseconds in (0, 30, 10):
            recorder.begins(Phase.FORWARD)
            burn(20)
            recorder.issue("allreduce", "0-1", 4, done)
            lane.submit(compress, milliseconds).result()
            recorder.step_done(torch.tensor(0.0))
    _, second, third = recorder.take(clock.drain()).exchange_cpu_ns or []
    # Its own CPU time alone: not its sleep, nor what it had used before, nor what the training thread uses.
    assert 30 * MS <= second < 45 * MS
    assert 10 * MS <= third < 20 * MS


def through_torch(rank: int) -> list[Row]:
    """On a rank: operations that come by way of torch's own functions, and so from C++."""
    exchange, values = open_exchange(), torch.arange(4.0) + rank
    with a_recorded_step(exchange) as recorded:
        dist.broadcast(values, src=1, group=exchange)
        assert values.tolist() == [1.0, 2.0, 3.0, 4.0]
        dist.all_reduce(values, group=exchange, async_op=True).wait()
        assert values.tolist() == [2.0, 4.0, 6.0, 8.0]
    return rows_of(recorded[0].operations)


def test_operations_of_torchs_functions_are_recorded_and_work_as_ever(ranks) -> None:
    expected = [(0, "broadcast", "0-1", 16), (0, "allreduce", "0-1", 16)]
    assert ranks(2, through_torch) == [expected] * 2


def switched_off(rank: int) -> list[Row]:
    exchange = open_exchange()
    exchange.traffic.enabled = False
    with a_recorded_step(exchange) as recorded:
        exchange.allreduce([torch.ones(1)]).wait()
        exchange.recv([torch.ones(1)], 1 - rank, 0).wait()
    return rows_of(recorded[0].operations)


def test_an_exchange_that_is_off_has_nothing_to_record(ranks) -> None:
    assert ranks(2, switched_off) == [[]] * 2


def block_or_steps(rank: int, settings: dict[str, Any], recording: bool) -> dict[str, Any]:
    """On a rank: a recorded block, or only its steps; then the state that training continues from."""
    exchange = open_exchange()
    trainer, data = trainer_of(exchange, **settings), batches(rank)
    trainer.step(data)
    watch = a_stopwatch(trainer, data)
    before, shape = trainer.observer, None
    period = trainer.model.period
    if recording:
        recorded = watch.record(exchange, CPU)
        assert trainer.observer is before
        assert exchange.traffic.recorder is None
        operations = recorded.operations
        shape = len(recorded.step_ns), len(recorded.blocked_ns or []), sorted(set(operations.step))
    else:
        for _ in range(period + 20 // period * period):
            trainer.step(data)
    trainer.model.settle()
    found = {"hash": parameters_hash(trainer), "next": next(data)[0].tolist(), "shape": shape}
    exchange.reset()
    return found


@pytest.mark.parametrize(
    ("settings", "steps", "with_operations"),
    [
        ({"strategy": "ddp"}, 20, list(range(20))),
        ({"strategy": "scratch-ddp", "compression": "topk:0.1"}, 20, list(range(20))),
        # One step before and three in the period that is not kept: the first recorded one is the second of
        # its period.
        ({"strategy": "local-sgd:3"}, 18, [1, 4, 7, 10, 13, 16]),
    ],
)
def test_recorded_steps_are_steps_like_any_other(ranks, settings, steps, with_operations) -> None:
    recorded = ranks(2, block_or_steps, settings, True)
    plain = ranks(2, block_or_steps, settings, False)
    for found, expected in zip(recorded, plain, strict=True):
        assert found["shape"] == (steps, steps, with_operations)
        assert (found["hash"], found["next"]) == (expected["hash"], expected["next"])
    assert recorded[0]["hash"] == recorded[1]["hash"]


class Hours:
    """Stands for the module `time`: a clock that advances only where somebody waits."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.monotonic, self.sleep = time.monotonic, time.sleep

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def thread_time_ns(self) -> int:
        return 0

    def work(self, held_up_ns: int) -> Any:
        """A work without a future; a wait for it takes `held_up_ns`."""

        def no_future() -> Any:
            raise RuntimeError

        def wait(timeout: object) -> bool:
            self.now_ns += held_up_ns
            return True

        return SimpleNamespace(get_future=no_future, wait=wait)


@pytest.mark.parametrize(("stages", "bubbles"), [(False, None), (True, [30 + 60, 3 + 6, 0])])
def test_a_stage_idles_where_it_waits_for_a_neighbour(monkeypatch, stages, bubbles) -> None:
    hours = Hours()
    monkeypatch.setattr(recorder_module, "time", hours)
    recorder = Recorder(SilentObserver(), CPU, stages=stages)
    for unit_ns in (30, 3, 0):
        recorder.begins(Phase.FORWARD)
        # Neither what a collective takes, nor the time between issue and wait.
        for name, held_up_ns in (("recv", unit_ns), ("send", 2 * unit_ns), ("_reduce_scatter_base", 500)):
            work = recorder.issue(name, "0-1", 4, partial(hours.work, held_up_ns))
            hours.now_ns += 1000
            assert work.wait()
        recorder.step_done(torch.tensor(0.0))
    assert recorder.take(columns(3)).bubble_ns == bubbles


def test_on_a_device_nobody_sees_a_stage_idle() -> None:
    recorder = Recorder(SilentObserver(), torch.device("cuda"), stages=True)
    recorder._device = Moments(0, 10)
    recorder.begins(Phase.FORWARD)
    recorder.step_done(torch.tensor(0.0))
    assert recorder.take(columns(1)).bubble_ns is None


class Pipe(nn.Sequential):
    def stem(self, x: Tensor) -> Tensor:
        y: Tensor = self[0](x)
        return y

    def head(self, x: Tensor) -> Tensor:
        y: Tensor = self[-1](x)
        return y


def bubbles(rank: int, settings: dict[str, Any]) -> Any:
    """On a rank: idle time and time of each recorded step."""
    exchange = open_exchange()
    trainer = Trainer(
        Pipe(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)),
        F.cross_entropy,
        device=CPU,
        settings=TrainSettings(**settings),
        layout=ModelLayout(blocks=("1", "2"), stem=("0",), head=("3",), sample=(8,)),
        group=exchange,
    )
    data = batches(0)
    trainer.step(data)
    recorded = a_stopwatch(trainer, data).record(exchange, CPU)
    exchange.reset()
    return recorded.bubble_ns, recorded.step_ns, {own.stage: own.part_ns for own in recorded.stages}


def test_strategies_with_stages_alone_have_a_bubble(ranks) -> None:
    for rank, (idle_ns, step_ns, stages) in enumerate(ranks(2, bubbles, {"strategy": "pipeline:gpipe"})):
        assert len(idle_ns) == len(step_ns) == 20
        assert all(0 < idle < step for idle, step in zip(idle_ns, step_ns, strict=True))
        # Four microbatches a step; a stage does not compute while it waits.
        assert {stage: [*parts] for stage, parts in stages.items()} == {
            rank: ["forward", "loss", "backward"] if rank else ["forward", "backward"]
        }
        assert 0 < 4 * sum(stages[rank].values()) <= (sum(step_ns) - sum(idle_ns)) / 20
    # A ring receives as well.
    for idle_ns, _, stages in ranks(2, bubbles, {"strategy": "scratch-ddp", "collective": "ring"}):
        assert (idle_ns, stages) == (None, {})


def test_the_times_of_a_stage_are_means_over_its_microbatches() -> None:
    recorder = Recorder(SilentObserver(), torch.device("cuda"), stages=True)
    # The step takes 0 to 100: forward 10 to 20 and 30 to 50, backward 60 to 90.
    recorder._device = Moments(0, 10, 20, 30, 50, 60, 90, 100)
    recorder.begins(Phase.FORWARD)
    for part in ("forward", "forward", "backward"):
        with recorder.part(3, part):
            pass
    recorder.step_done(torch.tensor(0.0))
    assert recorder.take(columns(1)).stages == [StageTimes(stage=3, part_ns={"forward": 15, "backward": 30})]
    recorder._device = Moments(0, 10)
    recorder.begins(Phase.FORWARD)
    recorder.step_done(torch.tensor(0.0))
    assert recorder.take(columns(1)).stages == []


def limited(rank: int, most: int) -> str:
    """On a rank: what is recorded if a record holds `most` operations."""
    exchange = open_exchange()
    trainer = trainer_of(exchange, strategy="scratch-ddp", collective="tree")
    for _ in range(2):
        trainer.step(batches(rank))
    watch = a_stopwatch(trainer, batches(rank))
    recorder_module.MOST_OPERATIONS = most
    try:
        recorded = watch.record(exchange, CPU)
        operations = len(recorded.operations.step) // len(recorded.step_ns)
        return f"{len(recorded.step_ns)} steps of {operations}"
    except TooManyOperationsError as error:
        return str(error)
    finally:
        recorder_module.MOST_OPERATIONS = MOST_OPERATIONS
        exchange.reset()


def test_ranks_agree_on_the_steps_by_the_one_with_the_most_operations(ranks) -> None:
    # Of three ranks in a tree each has its own number of operations.
    found = ranks(3, limited, 4000)
    counts = [int(text.rpartition(" ")[2]) for text in found]
    assert min(counts) < max(counts)
    found = ranks(3, limited, 3 * max(counts) + 1)
    assert found == [f"3 steps of {count}" for count in counts]
    found = ranks(3, limited, max(counts) - 1)
    assert found == [f"a period has {max(counts)} operations, a record holds {max(counts) - 1}"] * 3


def columns(steps: int) -> StepColumns:
    return StepColumns(**{name: [1_234_567_890] * steps for name in StepColumns.__struct_fields__})


class Moments:
    """A device with moments that are written here, one after another."""

    asynchronous = True

    def __init__(self, *moments: int) -> None:
        self._moments = iter(moments)

    def moment(self) -> int:
        return next(self._moments)

    def elapsed_ns(self, first: int, second: int) -> int:
        return second - first


def test_a_device_begins_an_operation_when_the_one_before_it_on_the_same_group_has_ended() -> None:
    recorder = Recorder(SilentObserver(), torch.device("cuda"))
    # The step begins at 1000. Group a: issued at 1010, done at 1100; issued at 1050, done at 1160, so begun
    # at 1100. Group b: issued at 1060, done at 1070. The step ends at 1200; the next one begins at 1300.
    recorder._device = Moments(1000, 1010, 1100, 1050, 1160, 1060, 1070, 1200, 1300, 1320, 1325, 1400)

    for groups in (["a", "a", "b"], ["a"]):
        recorder.begins(Phase.FORWARD)
        for group in groups:
            recorder.issue("allreduce", group, 4, done)
        recorder.step_done(torch.tensor(0.0))
    recorded = recorder.take(columns(2))
    assert recorded.operations.issued_ns == [10, 100, 60, 20]
    assert recorded.operations.duration_ns == [90, 60, 10, 5]
    assert recorded.operations.step == [0, 0, 0, 1]
    assert (recorded.blocked_ns, recorded.exchange_cpu_ns) == (None, None)
    assert recorded.dispatch_ns is not None
    assert len(recorded.dispatch_ns) == 2


def test_a_synchronous_operation_ends_on_a_device_where_the_stream_is_after_the_call() -> None:
    recorder = Recorder(SilentObserver(), torch.device("cuda"))
    # The step begins at 1000 and ends at 1200; the operation is issued at 1010, and done at 1100.
    recorder._device = Moments(1000, 1010, 1100, 1200)
    recorder.begins(Phase.FORWARD)
    assert recorder.issue("_allgather_base", "a", 4, lambda: None) is None
    recorder.step_done(torch.tensor(0.0))
    operations = recorder.take(columns(1)).operations
    assert (operations.issued_ns, operations.duration_ns) == ([10], [90])


def test_a_record_of_the_most_operations_is_not_a_quarter_of_a_mebibyte() -> None:
    """4000 rows of a 256-rank launch with ten groups, each figure as long as it comes."""
    rows = MOST_OPERATIONS
    table = Operations(
        names=["allreduce", "_allgather_base", "_reduce_scatter_base", "send", "recv"],
        groups=[group_text(range(start, 256, 8)) for start in range(10)],
        step=[row % 20 for row in range(rows)],
        name=[row % 5 for row in range(rows)],
        group=[row % 10 for row in range(rows)],
        payload_bytes=[26_214_400] * rows,
        issued_ns=[1_234_567_890] * rows,
        duration_ns=[123_456_789] * rows,
    )
    # What else there is: at most 40 and 200 x 5 steps by default, of six columns. 32 KiB are left.
    steps = columns(40 + 200 * 5)
    size = len(msgspec.json.encode(table)) + len(msgspec.json.encode(steps))
    assert size < (256 - 32) * 1024
