"""The memory of a run on this rank: what it uses, and a limit that simulates smaller devices.

The limit (`memory_limit_mb`) is RLIMIT_DATA (getrlimit(2)) on CPU: the kernel refuses private writable memory
beyond it, and the allocator raises as a full device would. The limit applies to the address space that VmData
of /proc/self/status reports (proc(5)), so that the stack of a thread that a strategy starts counts in full,
usually 8 MiB. The C library is asked to take each block of 128 KiB or more from the kernel and to return it
when it is freed (mallopt(3), M_MMAP_THRESHOLD), else its heap would hide what is free and what is not: steps
under a limit pay for fresh pages. On CUDA it is the fraction of the device that torch's allocator may
reserve.

Only the strategy is limited. What the proof adds, complete replicas and gathered states, does not belong to
the cell: `lifted` lets it be taken, and leaves the strategy as much room as it had before.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from harness.worker.rank.usage import reset_rss_peak, rss_bytes, rss_peak_bytes, status_field
from results.errors import UsageError
from results.record import Memory
from strategies.devices import DeviceKind, MemoryFigures, device_of

MIB = 2**20
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM = 128 * 1024
"""Bytes; the C library's own value before it adapts."""
_NO_THREAD = re.compile(r"can't start new thread|Resource temporarily unavailable")
"""Errors of Python and C++ where the C library finds no memory for a stack (pthread_create(3), EAGAIN)."""


class MemoryLimit:
    """A limit of `limit_mb` MiB beyond what this rank has taken when the limit is made (None: no limit, and
    no cost).

    Make it when the worker is idle. Raises UsageError where this machine enforces no limit.
    """

    def __init__(self, limit_mb: int | None = None, device: torch.device | None = None) -> None:
        self._gauge: Gauge | None = None
        if limit_mb is not None:
            on = None if device is None else device_of(device)
            self._gauge = HostMemory() if on is None or on.memory() is None else DeviceMemory(on)
            self._mark = self._gauge.taken()
            self._most = self._mark + limit_mb * MIB
        self._holds = False
        self._others = 0
        """Bytes taken while the limit was lifted and not given back; the limit does not count them."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Limit the memory that is taken in this context: allocators raise beyond the limit, and the start of
        a thread raises MemoryError."""
        with self._switched(holds=True):
            try:
                yield
            except RuntimeError as error:
                if self._gauge is not None and _NO_THREAD.search(str(error)):
                    raise MemoryError("the limit leaves no room for the stack of a thread") from error
                raise

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Do not count the memory that is taken in this context and given back while the limit is lifted."""
        with self._switched(holds=False):
            yield

    @contextmanager
    def _switched(self, *, holds: bool) -> Iterator[None]:
        if self._gauge is None:
            yield
            return
        before = self._holds
        self._switch(self._gauge, holds=holds)
        try:
            yield
        finally:
            self._switch(self._gauge, holds=before)

    def _switch(self, gauge: Gauge, *, holds: bool) -> None:
        now = gauge.taken()
        if not self._holds:
            # Others may free memory of the strategy, which does not lower the strategy's limit.
            self._others = max(0, self._others + now - self._mark)
        self._mark, self._holds = now, holds
        gauge.cap(self._most + self._others if holds else None)


class HostMemory:
    """Memory of this process, as RLIMIT_DATA counts it."""

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            self.taken()
            mapped = ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        except (OSError, AttributeError):
            mapped = 0
        if not mapped or not self._refuses():
            raise UsageError("memory_limit_mb: this system does not enforce RLIMIT_DATA")

    def taken(self) -> int:
        """Bytes now."""
        taken_kib = status_field(Path("/proc/self/status"), "VmData:")
        if taken_kib is None:
            raise OSError("no VmData in /proc/self/status")
        return int(taken_kib) * 1024

    def cap(self, most_bytes: int | None) -> None:
        """Refuse allocations beyond this number of bytes; None: no limit."""
        soft, hard = self._before
        resource.setrlimit(resource.RLIMIT_DATA, (soft if most_bytes is None else most_bytes, hard))

    def _refuses(self) -> bool:
        """Whether the kernel does what it says; some only emulate the call."""
        self.cap(self.taken() + MIB)
        try:
            mmap.mmap(-1, 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return True
        finally:
            self.cap(None)
        return False


class DeviceMemory:
    """Memory of a device, as torch's allocator reserves it for this process."""

    def __init__(self, device: DeviceKind) -> None:
        self._device = device

    def taken(self) -> int:
        # The allocator's cached free memory belongs to no part, and would leave less for the next one.
        self._device.release_memory()
        return self._figures().reserved

    def cap(self, most_bytes: int | None) -> None:
        share = 1.0 if most_bytes is None else min(1.0, most_bytes / self._figures().total)
        self._device.limit_memory(share)

    def _figures(self) -> MemoryFigures:
        figures = self._device.memory()
        assert figures is not None
        return figures


Gauge = HostMemory | DeviceMemory
"""One kind of memory: how much of it this rank has taken, and a cap on it."""


def reset_peaks(device: torch.device) -> dict[str, str]:
    """Begin to count the peaks of memory anew. Returns why a peak is not the run's own, if it is not."""
    device_of(device).reset_memory_peaks()
    if reset_rss_peak():
        return {}
    return {"memory": "the kernel does not reset peaks: the peak is the process's, not the run's"}


class MemoryUse:
    """The memory that a run uses on this rank; make it when the worker is idle, before a model is built."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._idle_rss = rss_bytes()
        self._idle = self._device.memory()

    def record(self) -> Memory:
        """The peaks so far; a device's are None on a CPU."""
        figures = self._device.memory()
        return Memory(
            rss_peak_bytes=rss_peak_bytes(),
            rss_idle_bytes=self._idle_rss,
            device_allocated_peak_bytes=None if figures is None else figures.allocated_peak,
            device_reserved_peak_bytes=None if figures is None else figures.reserved_peak,
            device_idle_bytes=None if self._idle is None else self._idle.allocated,
        )
