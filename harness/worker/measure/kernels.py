"""The kernels of a few steps on a CUDA device, by torch's profiler: how long they compute and communicate.

Not run on a device so far: the classification and the sums are tested on made-up kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from results.derivation.intervals import Span, intersection, length
from results.recorded import KernelTimes

PROFILED_STEPS = 3
LONGEST_PERIOD = 20
"""Steps: a strategy of longer periods is not profiled, as whole ones would fill the host's memory."""
_COMMUNICATES = ("nccl", "rccl")
"""What names of kernels that communicate contain, in lower case."""
_NO_KERNELS = ("memset", "memcpy")
"""What the device's copy engines do is neither."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on the device, in nanoseconds of the profiler's clock."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def communicates(self) -> bool:
        return any(part in self.name.lower() for part in _COMMUNICATES)

    @property
    def interval(self) -> Span:
        return self.start_ns, self.end_ns


def kernel_times(kernels: Iterable[Kernel], steps: int) -> KernelTimes:
    """Unions of the intervals of both kinds, and of what they have in common."""
    compute: list[Span] = []
    communication: list[Span] = []
    for kernel in kernels:
        if not kernel.name.lower().startswith(_NO_KERNELS):
            (communication if kernel.communicates else compute).append(kernel.interval)
    return KernelTimes(
        steps=steps,
        compute_ns=length(compute),
        communication_ns=length(communication),
        overlap_ns=length(intersection(compute, communication)),
    )


@cache
def attach_profiler(device: torch.device) -> None:
    """On CUDA profile nothing, once in this process: the profiler stays attached to the driver from then on,
    so that the first cell of a launch is measured as those that come after a profiled block."""
    if device.type == "cuda":
        with profiled_kernels(device):
            pass


@contextmanager
def profiled_kernels(device: torch.device) -> Iterator[list[Kernel]]:
    """The kernels of this device in the context, whose list is filled when it has been left."""
    kernels: list[Kernel] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield kernels
        torch.cuda.synchronize(device)
    kernels += kernels_on(device, profiler.events() or [])


def kernels_on(device: torch.device, events: Iterable[FunctionEvent]) -> Iterator[Kernel]:
    """The kernels of one CUDA device among the profiler's events."""
    for event in events:
        # Not `is`: torch makes a new object for the same device type at each call.
        on_device = event.device_type == DeviceType.CUDA and event.device_index == device.index
        # A range that somebody has named is no kernel, though it stands among them.
        if on_device and not event.is_user_annotation:
            span = event.time_range
            yield Kernel(event.name, round(span.start * 1e3), round(span.end * 1e3))
