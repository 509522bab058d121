"""Kinds of devices for training and measuring: streams, moments, memory, random state.

There is one class for each kind, and `device_of` returns the one of a torch.device: no other code checks
whether a device is a GPU to wait for it, to time it or to read its memory. The facts of a GPU (its name,
driver, telemetry, kernels) are elsewhere.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.futures import Future

from results.cell import Device
from results.errors import UsageError

Moment = Any
"""An integer of nanoseconds on the host, an event on a stream."""

Stream = torch.Stream
"""A queue of a device, whose work runs in order, and concurrently with other queues."""
Event = torch.Event
"""A place in the queue of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes of a device, as torch's allocator counts them for this process."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    free: int
    """Free bytes of the device, over all processes."""
    total: int


class DeviceKind(ABC):
    """A device of one kind."""

    kind: ClassVar[Device]
    """The name of the kind in cells."""
    asynchronous: ClassVar[bool]
    """Whether a call returns when its work is queued; otherwise when it is done."""
    clock: ClassVar[Literal["monotonic", "cuda-event"]]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that this process has queued."""

    @abstractmethod
    def begin_copy_to_host(self, values: Tensor) -> Tensor:
        """Begin to copy `values` to host memory, to be read when an event that is recorded after it has
        passed; a host returns `values`."""

    @abstractmethod
    def moment(self) -> Moment:
        """Return the present moment; on an asynchronous device an event of the current stream."""

    @abstractmethod
    def elapsed_ns(self, first: Moment, second: Moment) -> int:
        """Return the time between two moments that have both passed."""

    @abstractmethod
    def future(self) -> Future[Any]:
        """Return a future for values of this device: the stream of the waiting thread waits for their
        stream."""

    @abstractmethod
    def memory(self) -> MemoryFigures | None:
        """Return the memory figures; None if the device uses the memory of the host."""

    @abstractmethod
    def reset_memory_peaks(self) -> None: ...

    @abstractmethod
    def release_memory(self) -> None:
        """Free memory that the allocator has cached and that is not in use."""

    @abstractmethod
    def limit_memory(self, share: float) -> None:
        """Limit the memory that the allocator may reserve for this process to this share of the device."""

    def without_float8(self) -> str | None:
        """Return the name of a device that has no products in float8; None if it has them."""
        return None

    @abstractmethod
    def random_state(self) -> Tensor | None:
        """Return the state of the device's generator; None if the device draws from the host's."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the device's own generator."""

    @abstractmethod
    def seeded_state(self, seed: int) -> Tensor | None:
        """Return the state of a new generator of the device with this seed; None if it draws from the
        host's."""


class StreamedDevice(DeviceKind):
    """A device with streams."""

    asynchronous = True

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def room_on_host(self, values: Tensor) -> Tensor:
        """Allocate pinned host memory for a copy of `values`: copies to it and from it run asynchronously."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream in which the calling thread queues work."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make the calling thread queue work in `stream` within the context."""

    @abstractmethod
    def keep_memory(self, values: Tensor, stream: Any) -> None:
        """Keep the memory of `values`, of another stream, from being reused before `stream` has used it."""


class Host(DeviceKind):
    """The CPU."""

    kind = "cpu"
    asynchronous = False
    clock = "monotonic"

    def synchronize(self) -> None: ...

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
        raise AssertionError("the CPU has only torch's default generator")

    def seeded_state(self, seed: int) -> None:
        return None


class Cuda(StreamedDevice):
    """A GPU, by torch.cuda. Not run on a device so far."""

    kind = "cuda"
    clock = "cuda-event"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

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

    def without_float8(self) -> str | None:
        has = torch.version.hip is None and torch.cuda.get_device_capability(self.device) >= (8, 9)
        return None if has else torch.cuda.get_device_name(self.device)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def seeded_state(self, seed: int) -> Tensor:
        return torch.Generator(self.device).manual_seed(seed).get_state()

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def keep_memory(self, values: Tensor, stream: Any) -> None:
        values.record_stream(stream)


KINDS: dict[str, type[DeviceKind]] = {"cpu": Host, "cuda": Cuda}
"""The classes by torch's name of a kind. Tests replace the CPU by a device with streams."""


def device_of(device: torch.device) -> DeviceKind:
    """Return the kind of this device. Raises UsageError for an unknown kind."""
    if device.type not in KINDS:
        raise UsageError(f"{device} is not a device that training supports: use {' or '.join(KINDS)}")
    return KINDS[device.type](device)
