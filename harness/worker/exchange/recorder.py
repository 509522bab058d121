"""The recorder: every operation of an exchange, when it was issued and when it was done on this rank.

An `ExchangeGroup` passes it each operation, and the Trainer, which it observes together with the clock,
reports steps and phases. Its steps are steps like any other, but they are not timed, as each operation then
costs some microseconds more of the thread that issues it.

The end of an operation on CPU. Gloo completes a work on a separate thread and calls the work's future from
there, whether or not anybody waits: the moment is read in that call. Python lets one thread run at a time, so
the call comes about 0.1 ms late while the training thread computes in torch, and up to 5 ms (the
interpreter's switch interval) while it runs nothing but Python; while the training thread waits, which is
where communication is exposed, nothing delays it. In torch 2.13, Gloo's sends, receives and
`_reduce_scatter_base` have no future: they count as done when the wait for them returns, which is late where
others were waited for first.

The end on CUDA (not run on a device so far). The callback of a future runs on a stream that waits for the
collective, so that an event recorded there is its end. NCCL has no work for a synchronous operation, as FSDP2
asks for: it runs on the current stream, and an event recorded after the call is its end.

A pipeline's stage idles where the thread that trains waits for a neighbour: until it has received a message,
or until the neighbour takes one, because Gloo sends only to a rank that already receives. One rank's clock
cannot show what part of it is transfer. On CUDA the thread does not wait, and no idle time is recorded.

The beginning. A collective can begin at its issue, or when the one before it on the same group has ended: on
CUDA a group has one stream, and Gloo's two threads share the network.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist

from results.grouping import grouped
from results.record import (
    MOST_OPERATIONS,
    POINT_TO_POINT,
    RECORDED_STEPS,
    Operations,
    Recorded,
    StageTimes,
    StepColumns,
)
from strategies.devices import DeviceKind, Moment, device_of
from strategies.training.observer import Phase, StepObserver

_LATE_S = 1.0
"""Time that a callback may be late after the end of its operation."""


class TooManyOperationsError(Exception):
    """One period has more operations than a record can hold; raised on all ranks."""

    def __init__(self, operations: int) -> None:
        super().__init__(f"a period has {operations} operations, a record holds {MOST_OPERATIONS}")


def steps_to_record(period: int, operations: int) -> int:
    """Whole periods of `operations` each: about 20 steps, fewer where a record could not hold them.

    Raises TooManyOperationsError if it cannot hold one.
    """
    if operations > MOST_OPERATIONS:
        raise TooManyOperationsError(operations)
    return min(max(1, RECORDED_STEPS // period), MOST_OPERATIONS // max(1, operations)) * period


def group_text(ranks: Iterable[int]) -> str:
    """A group by its ranks in ascending order, runs of neighbours as one: `0-7`, `0,2,4`, `0-1,4-5`."""
    runs = itertools.groupby(enumerate(ranks), key=lambda item: item[1] - item[0])
    bounds = [[rank for _, rank in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in bounds)


@dataclass(slots=True, kw_only=True)
class _Operation:
    """One operation under way, or done."""

    device: DeviceKind
    name: str
    group: str
    payload_bytes: int
    step: int
    issued: Moment
    ended: Moment = None
    promised: bool = False
    """Whether its future will say when it is done."""

    def end(self, _: object = None) -> None:
        if self.ended is None:
            self.ended = self.device.moment()


class _WaitedFor(dist.Work):
    """A work without a future, which counts as done when a wait for it returns."""

    def __init__(self, work: dist.Work, done: Callable[[int], None]) -> None:
        """`done` is called with the nanoseconds for which a waiting thread was held up."""
        super().__init__()
        self._work = work
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        began_ns = time.perf_counter_ns()
        finished = self._work.wait(timeout)
        self._done(time.perf_counter_ns() - began_ns)
        return finished

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _Blocked:
    """Wall time less CPU time of the thread that trains, outside of the data phase."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._wall_ns = self._cpu_ns = self._blocked_ns = 0

    def begins(self, phase: Phase | None) -> None:
        """Note that the phase before has ended; with None, so has the step."""
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        if self._phase is not None and self._phase is not Phase.DATA:
            self._blocked_ns += (wall_ns - self._wall_ns) - (cpu_ns - self._cpu_ns)
        self._phase, self._wall_ns, self._cpu_ns = phase, wall_ns, cpu_ns

    def take(self) -> int:
        """Return the blocked time since the last call; never less than 0, as the two clocks tick apart."""
        blocked_ns, self._blocked_ns = self._blocked_ns, 0
        return max(0, blocked_ns)


class _Helpers:
    """The threads that issue operations, except the one that trains, and their CPU time."""

    def __init__(self) -> None:
        self._trains = threading.get_ident()
        self._clocks: dict[int, int] = {}
        self._started_ns: dict[int, int] = {}

    @property
    def known(self) -> bool:
        return bool(self._clocks)

    def saw_this_thread(self) -> None:
        """Note the calling thread, which issues an operation. The CPU time of a new thread counts from its
        first call."""
        thread = threading.get_ident()
        if thread != self._trains and thread not in self._clocks:
            clock = time.pthread_getcpuclockid(thread)
            self._started_ns[thread] = time.clock_gettime_ns(clock)
            self._clocks[thread] = clock

    def step_begins(self) -> None:
        self._started_ns = self._read()
        self._clocks = {thread: self._clocks[thread] for thread in self._started_ns}

    def step_ends(self) -> int:
        """CPU time of all these threads since the step began."""
        return sum(now_ns - self._started_ns[thread] for thread, now_ns in self._read().items())

    def _read(self) -> dict[int, int]:
        read = {}
        for thread, clock in list(self._clocks.items()):
            try:
                read[thread] = time.clock_gettime_ns(clock)
            except OSError:
                # The thread has ended, and its clock with it.
                continue
        return read


class Recorder:
    """Records the steps of a Trainer whose observer it is, and the operations of the groups it is set on.

    It passes steps and phases on to `clock`. The thread that trains must make it.
    """

    def __init__(self, clock: StepObserver, device: torch.device, *, stages: bool = False) -> None:
        """`stages` says whether messages between two ranks are between stages of a pipeline."""
        self._clock = clock
        self._stages = stages
        self._device = device_of(device)
        self._blocked = _Blocked()
        self._helpers = _Helpers()
        self._without_future: set[str] = set()
        self._in_step = False
        self._forget()

    def _forget(self) -> None:
        self._operations: list[_Operation] = []
        self._steps: list[tuple[Moment, Moment]] = []
        self._blocked_ns: list[int] = []
        self._bubble_ns: list[int] = []
        self._idle_ns = 0
        self._dispatch_ns: list[int] = []
        self._helpers_ns: list[int] = []
        self._parts: list[tuple[int, str, Moment, Moment]] = []

    def begins(self, phase: Phase) -> None:
        if not self._in_step:
            self._in_step = True
            self._helpers.step_begins()
            self._host_start = time.perf_counter_ns()
            self._start = self._device.moment()
        self._blocked.begins(phase)
        self._clock.begins(phase)

    def step_done(self, loss: torch.Tensor) -> None:
        self._clock.step_done(loss)
        self._blocked.begins(None)
        self._steps.append((self._start, self._device.moment()))
        self._dispatch_ns.append(time.perf_counter_ns() - self._host_start)
        self._blocked_ns.append(self._blocked.take())
        self._bubble_ns.append(self._idle_ns)
        self._idle_ns = 0
        self._helpers_ns.append(self._helpers.step_ends())
        self._in_step = False

    @contextmanager
    def part(self, stage: int, part: str) -> Iterator[None]:
        """Note the time in which a stage of a pipeline computes one part of a pass."""
        begin = self._device.moment()
        yield
        self._parts.append((stage, part, begin, self._device.moment()))

    def issue(
        self, name: str, group: str, payload_bytes: int, call: Callable[[], dist.Work | None]
    ) -> dist.Work | None:
        """Make the `call` that issues an operation; on any thread.

        Returns the operation's work, or, if the work has no future, a wrapper that records when the wait for
        it ends; None if the call returns None (a synchronous operation of NCCL).
        """
        self._helpers.saw_this_thread()
        operation = _Operation(
            device=self._device,
            name=name,
            group=group,
            payload_bytes=payload_bytes,
            step=len(self._steps),
            issued=self._device.moment(),
        )
        self._operations.append(operation)
        work = call()
        if work is None:
            operation.end()
            return None
        if operation.name not in self._without_future:
            try:
                future = work.get_future()
            except RuntimeError:
                self._without_future.add(operation.name)
            else:
                operation.promised = True
                future.add_done_callback(operation.end)
                return work
        return _WaitedFor(work, partial(self._waited, operation))

    def _waited(self, operation: _Operation, held_up_ns: int) -> None:
        operation.end()
        if operation.name in POINT_TO_POINT:
            self._idle_ns += held_up_ns

    def take(self, columns: StepColumns) -> Recorded:
        """Return the records since the last call, of the steps of `columns`; the device has finished them."""
        # torch wakes the threads that wait for a work before it calls the work's callbacks.
        late = time.monotonic() + _LATE_S
        while time.monotonic() < late and any(
            operation.promised and operation.ended is None for operation in self._operations
        ):
            time.sleep(0.001)
        queued = self._device.asynchronous
        recorded = Recorded(
            step_ns=columns.step_ns,
            blocked_ns=None if queued else self._blocked_ns,
            dispatch_ns=self._dispatch_ns if queued else None,
            # On CUDA, autograd's own threads issue.
            exchange_cpu_ns=self._helpers_ns if self._helpers.known and not queued else None,
            bubble_ns=self._bubble_ns if self._stages and not queued else None,
            stages=self._stage_times(),
            operations=self._table(),
        )
        self._forget()
        return recorded

    def _stage_times(self) -> list[StageTimes]:
        found = grouped(
            (stage, (part, self._device.elapsed_ns(begin, end))) for stage, part, begin, end in self._parts
        )
        return [
            StageTimes(
                stage=stage, part_ns={part: round(fmean(each)) for part, each in grouped(parts).items()}
            )
            for stage, parts in sorted(found.items())
        ]

    def _table(self) -> Operations:
        names = _numbered(operation.name for operation in self._operations)
        groups = _numbered(operation.group for operation in self._operations)
        spans = self._spans()
        return Operations(
            names=list(names),
            groups=list(groups),
            step=[operation.step for operation in self._operations],
            name=[names[operation.name] for operation in self._operations],
            group=[groups[operation.group] for operation in self._operations],
            payload_bytes=[operation.payload_bytes for operation in self._operations],
            issued_ns=[begin for begin, _ in spans],
            duration_ns=[max(0, end - begin) for begin, end in spans],
        )

    def _spans(self) -> list[tuple[int, int]]:
        """Return when each operation could begin and when it was done, from the start of its step.

        A collective waits in its group's queue for the one before it. Without that, what several share of
        the network would count once in each of them.
        """
        spans = []
        free_ns: dict[tuple[int, str], int] = {}
        for operation in self._operations:
            start, end = self._steps[operation.step]
            begin_ns = self._device.elapsed_ns(start, operation.issued)
            # When a step has ended, no operation is in flight, so an operation without an end ended with it.
            end_ns = self._device.elapsed_ns(start, end if operation.ended is None else operation.ended)
            if operation.name not in POINT_TO_POINT:
                queue = operation.step, operation.group
                begin_ns = min(max(begin_ns, free_ns.get(queue, begin_ns)), end_ns)
                free_ns[queue] = max(end_ns, free_ns.get(queue, end_ns))
            spans.append((begin_ns, end_ns))
        return spans


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    """Each different text with its number, in the order in which they come."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}
