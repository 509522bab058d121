"""A lane that runs exchanges one after another, in the order given, while the backward pass continues.

On CPU it is a thread, on CUDA a stream. An exchange is then sequential code, with any number of collectives,
and still overlaps with the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from strategies.devices import Event, StreamedDevice, device_of

LaneTask = Callable[[], None]


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> object:
        """Return when it is done (on CUDA: make the current stream wait), or raise its error."""


def open_lane(device: torch.device) -> StreamLane | ThreadLane:
    """Open the lane of one exchange on `device`."""
    on = device_of(device)
    return StreamLane(on) if isinstance(on, StreamedDevice) else ThreadLane()


class ThreadLane:
    """A lane of one thread, which ends when the lane is freed."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")

    def run(self, job: LaneTask) -> Pending:
        """Run `job` after all jobs before it."""
        return _Result(self._executor.submit(_under_no_grad, job))

    def memory(self) -> AbstractContextManager[None]:
        """Allocate device memory for the lane in this context, as a job does; not to be used during a job."""
        return nullcontext()


class StreamLane:
    """A lane of one stream of a device; the calling thread queues jobs on it."""

    def __init__(self, device: StreamedDevice) -> None:
        self._device = device
        self._stream = device.new_stream()

    def run(self, job: LaneTask) -> Pending:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            _under_no_grad(job)
            done = self._stream.record_event()
        return _OnStream(self._device, done)

    @contextmanager
    def memory(self) -> Iterator[None]:
        before = self._device.current_stream()
        self._stream.wait_stream(before)
        with self._device.on_stream(self._stream):
            yield
        before.wait_stream(self._stream)


class _Result:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _OnStream:
    def __init__(self, device: StreamedDevice, done: Event) -> None:
        self._device = device
        self._done = done

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._done)


def _under_no_grad(job: LaneTask) -> None:
    # Each thread has its own setting for recording gradients, which is on at first.
    with torch.no_grad():
        job()
