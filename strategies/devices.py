"""Kinds of devices as training and measuring use them: streams, moments, memory, random state.

One class a kind, and `device_of` for the one of a torch.device: no other code asks whether a device is a
GPU in order to know how to wait for it, to time it or to read its memory. What a GPU says of itself (its
name, driver, telemetry, kernels) is not here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.futures import Future

from results.cell import Device
from results.errors import UsageError

Moment = Any
"""An integer on the host, an event on a stream."""


class Event(Protocol):
    """A place in the queue of a stream."""

    def synchronize(self) -> None:
        """The host waits until the stream has come there."""


class Stream(Protocol):
    """A queue of a device: its work is done in order, and concurrently with other queues."""

    def wait_stream(self, stream: Any) -> None:
        """Work queued here from now on waits for the work queued in `stream` so far."""

    def wait_event(self, event: Any) -> None:
        """Work queued here from now on waits until the event's stream has reached it."""

    def record_event(self) -> Event:
        """Record an event after the work queued so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes of a device, as torch's allocator counts them for this process."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    free: int
    """Free bytes of the whole device, whichever process uses the rest."""
    total: int


class DeviceKind(ABC):
    """A device of one kind."""

    kind: ClassVar[Device]
    """The name of the kind in cells."""
    asynchronous: ClassVar[bool]
    """Whether a call returns when its work is queued; else it returns when it is done."""
    clock: ClassVar[Literal["monotonic", "cuda-event"]]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that this process has queued."""

    @abstractmethod
    def finish_stream(self) -> None:
        """Wait until the current stream has done what is queued in it."""

    @abstractmethod
    def begin_copy_to_host(self, values: Tensor) -> Tensor:
        """`values` in host memory, to be read after `finish_stream`; not copied where they are there."""

    @abstractmethod
    def moment(self) -> Moment:
        """The present moment; on an asynchronous device in the current stream, and no call waits for it."""

    @abstractmethod
    def elapsed_ns(self, first: Moment, second: Moment) -> int:
        """From one moment to another, which have both come."""

    @abstractmethod
    def future(self) -> Future[Any]:
        """A future for values of this device: who waits for it has his stream wait for theirs."""

    @abstractmethod
    def memory(self) -> MemoryFigures | None:
        """None where the device's memory is the host's."""

    @abstractmethod
    def reset_memory_peaks(self) -> None: ...

    @abstractmethod
    def release_memory(self) -> None:
        """Give back what is cached and not in use."""

    @abstractmethod
    def limit_memory(self, share: float) -> None:
        """The allocator may reserve this share of the device for this process."""

    @abstractmethod
    def random_state(self) -> Tensor | None:
        """The state of the device's own generator; None where the device draws from the host's."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the device's own generator."""

    @abstractmethod
    def seeded_state(self, seed: int) -> Tensor | None:
        """The state of a new generator of the device with this seed; None where it draws from the host's."""


class StreamedDevice(DeviceKind):
    """A device with streams."""

    asynchronous = True

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def room_on_host(self, values: Tensor) -> Tensor:
        """Memory of the host for a copy of `values`, pinned: copies to it and from it hold nobody up."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The one that the calling thread queues in."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """The calling thread queues in `stream` meanwhile."""

    @abstractmethod
    def keep_memory(self, values: Tensor, stream: Any) -> None:
        """Memory of another stream's is given to nobody before what `stream` does with `values` is done."""


class Host(DeviceKind):
    """The CPU."""

    kind = "cpu"
    asynchronous = False
    clock = "monotonic"

    def synchronize(self) -> None: ...

    def finish_stream(self) -> None: ...

    def begin_copy_to_host(self, values: Tensor) -> Tensor:
        return values

    def moment(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ns(self, first: int, second: int) -> int:
        return second - first

    def future(self) -> Future[Any]:
        return Future()

    def memory(self) -> None:
        return None

    def reset_memory_peaks(self) -> None: ...

    def release_memory(self) -> None: ...

    def limit_memory(self, share: float) -> None:
        raise AssertionError("the memory of a host is limited by the kernel")

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("the CPU has no generator beside torch's default one")

    def seeded_state(self, seed: int) -> None:
        return None


class Cuda(StreamedDevice):
    """A GPU, by torch.cuda. Not run on a device so far."""

    kind = "cuda"
    clock = "cuda-event"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def finish_stream(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def begin_copy_to_host(self, values: Tensor) -> Tensor:
        return self.room_on_host(values).copy_(values, non_blocking=True)

    def room_on_host(self, values: Tensor) -> Tensor:
        return torch.empty_like(values, device="cpu", pin_memory=True)

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_ns(self, first: torch.cuda.Event, second: torch.cuda.Event) -> int:
        return round(float(first.elapsed_time(second)) * 1e6)

    def future(self) -> Future[Any]:
        return Future(devices=[self.device])

    def memory(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryFigures(
            allocated=torch.cuda.memory_allocated(self.device),
            allocated_peak=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.memory_reserved(self.device),
            reserved_peak=torch.cuda.max_memory_reserved(self.device),
            free=free,
            total=total,
        )

    def reset_memory_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def limit_memory(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def seeded_state(self, seed: int) -> Tensor:
        return torch.Generator(self.device).manual_seed(seed).get_state()

    def new_stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.device))

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def keep_memory(self, values: Tensor, stream: Any) -> None:
        values.record_stream(stream)


KINDS: dict[str, type[DeviceKind]] = {"cpu": Host, "cuda": Cuda}
"""The classes by torch's name of a kind. Tests replace the CPU by a device with streams."""


def device_of(device: torch.device) -> DeviceKind:
    """Return the kind of this device. Raises UsageError for an unknown kind."""
    if device.type not in KINDS:
        raise UsageError(f"{device} is no device that training knows: use {' or '.join(KINDS)}")
    return KINDS[device.type](device)
