"""Steps under torch's profiler: the kernels of a CUDA device, and traces that people look at.

`kernel_times` says how long the kernels of a few steps compute and communicate. It has not run on a device so
far: the classification and the sums are tested on made-up kernels.

`--trace` asks for a few further steps, after all measuring, which are kept as a Chrome trace. They train on
from where measuring ended, and come after the parameters were hashed, so that no figure of the run knows of
them. All ranks take them, for a step is collective; the chosen ranks are profiled.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from harness.worker.rank.control import Control
from results.derivation.intervals import Span, intersection, length
from results.files import read, write_once
from results.record import KernelTimes
from strategies.trainer import Trainer
from strategies.training.observer import Phase, SilentObserver
from workloads.batch import Batch

PROFILED_STEPS = 3
LONGEST_PERIOD = 20
"""Steps: a strategy of longer periods is not profiled, as a complete one would fill the host's memory."""
_COMMUNICATES = ("nccl", "rccl")
"""Parts of the names of kernels that communicate, in lower case."""
_NO_KERNELS = ("memset", "memcpy")
"""Names of the device's copies, which neither compute nor communicate, begin like this."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on the device, in nanoseconds of the profiler's clock."""

    name: str
    start_ns: int
    end_ns: int


def kernel_times(kernels: Iterable[Kernel], steps: int) -> KernelTimes:
    """Return the time in which kernels compute, the time in which they communicate, and the time in which
    both happen."""
    compute: list[Span] = []
    communication: list[Span] = []
    for kernel in kernels:
        name, span = kernel.name.lower(), (kernel.start_ns, kernel.end_ns)
        if not name.startswith(_NO_KERNELS):
            (communication if any(part in name for part in _COMMUNICATES) else compute).append(span)
    return KernelTimes(
        steps=steps,
        compute_ns=length(compute),
        communication_ns=length(communication),
        overlap_ns=length(intersection(compute, communication)),
    )


@cache
def attach_profiler(device: torch.device) -> None:
    """On CUDA, start the profiler once in this process without a step in it. It stays attached to the driver
    from then on, so that the first cell of a launch is measured as those that come after a profiled block."""
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
        # A range that somebody has named is listed among the kernels, and is not a kernel.
        if on_device and not event.is_user_annotation:
            span = event.time_range
            yield Kernel(event.name, round(span.start * 1e3), round(span.end * 1e3))


STEPS = 3
WARM_UP_STEPS = 1
"""Steps that are taken under the profiler and not kept, because the start of the profiler takes time."""


class PhaseMarks:
    """An observer that puts the phases of a step into the trace, as ranges with their names."""

    def __init__(self) -> None:
        self._range = ExitStack()

    def begins(self, phase: Phase) -> None:
        self._range.close()
        self._range.enter_context(record_function(phase.value))

    def step_done(self, loss: Tensor) -> None:
        self._range.close()


def traced_steps(
    trainer: Trainer, batches: Iterator[Batch], control: Control, *, keep: bool
) -> profile | None:
    """Take a few steps, or a whole period of the strategy if that is more. Collective.

    Returns what the profiler saw of all of them but the first, if this rank is to keep it.
    """
    steps = max(STEPS, trainer.model.period)
    profiler = None
    if keep:
        devices = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
        window = schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1)
        profiler = profile(activities=[ProfilerActivity.CPU, *devices], schedule=window, record_shapes=True)
    before, trainer.observer = trainer.observer, PhaseMarks() if keep else SilentObserver()
    with profiler or nullcontext():
        for number in range(WARM_UP_STEPS + steps):
            if number == WARM_UP_STEPS:
                # The others have waited for the profiler to begin; the wait is not to look like training.
                control.barrier()
            trainer.step(batches)
            if number + 1 in (WARM_UP_STEPS, WARM_UP_STEPS + steps):
                control.synchronize()
            if profiler is not None:
                profiler.step()
    trainer.observer = before
    return profiler


def write_trace(profiler: profile, path: Path) -> dict[str, str]:
    """Write the trace as JSON packed by gzip, which chrome://tracing and Perfetto open as it is.

    Returns the reason under `trace` if it could not be written.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            write_once(path, gzip.compress(read(plain, most=2**31).data, compresslevel=6, mtime=0))
    except Exception as error:
        # A full disk, say. A trace is an extra: the run is good without.
        return {"trace": f"{type(error).__name__}: {error}"}
    return {}
