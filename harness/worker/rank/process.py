"""The process of a rank: what one run leaves for the next, and runs in separate processes.

A run must leave nothing for the next one (`tear_down`). With `forks` each run has its own process, forked
from a rank that has imported what the runs need and nothing more. fork(2) copies only the calling thread: a
lock that another thread holds stays locked in the child for ever, and neither process groups, CUDA nor the
threads of OpenMP and autograd outlive it (torch's notes on multiprocessing). So a rank forks while it has one
thread and no device, and each child opens groups anew.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from harness.machine.kernel import die_with_parent
from results.cell import Cell
from results.launch import Slot
from strategies.catalog import STRATEGIES
from strategies.devices import device_of
from workloads.build import import_builder

FRAGMENTED_ABOVE = 0.2
"""Share of a device's memory that the allocator may hold without using it before a fresh launch is due."""


def keep_imports() -> None:
    """Take what the process has so far out of all later collections, which begin here.

    torch alone is 300,000 objects, through which each of them would go: 0.14 s of a run, three times. What
    every optimizer imports when the first one is made (0.3 s) is imported here, before the first run.
    """
    import_module("torch._dynamo")
    gc.freeze()
    gc.enable()


def tune_kernels(device: torch.device, *, deterministic: bool, on: bool = True) -> bool:
    """On a GPU, have cuDNN time its algorithms when it next meets a convolution, and keep the fastest: the
    batches of a cell have one shape. Returns whether it does.

    It is off in a proof, whose two sides must not compute by different algorithms, and after `tear_down`.
    `deterministic` is whether the user's code wants only deterministic algorithms: the timed steps then use
    the algorithms of the proof.
    """
    cudnn, queued = torch.backends.cudnn, device_of(device).asynchronous
    cudnn.benchmark = on and queued
    # torch keeps the algorithm of each convolution by a key that has `deterministic` and not `benchmark`
    # (`ConvolutionParams` in ATen/native/cudnn/ConvShared.h): with one key nothing would be timed any more.
    cudnn.deterministic = deterministic or (queued and not on)
    return cudnn.benchmark


def tear_down(device: torch.device) -> None:
    """Free what the last run left and set the process's switches back."""
    if "torch._dynamo" in sys.modules:
        # Without the reset, recompilations of all cells add up, and at the limit torch silently runs eagerly.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    free_memory(device)
    on = device_of(device)
    on.synchronize()
    on.reset_memory_peaks()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def free_memory(device: torch.device) -> None:
    """Return unreferenced memory to the system, so that later peaks do not include it."""
    gc.collect()
    device_of(device).release_memory()
    # The C library keeps freed memory, so the resident size stays high until `malloc_trim` returns it.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def fragmented(device: torch.device) -> bool:
    """Whether the allocator still holds much memory after everything was freed."""
    figures = device_of(device).memory()
    return figures is not None and figures.reserved - figures.allocated > FRAGMENTED_ABOVE * figures.total


STOPPED = 64
"""The exit code of a child after which no other run is to follow, although its rank is well."""


def import_for(cells: Sequence[Cell], source_folder: str | None) -> None:
    """Import what runs of these cells would import one by one, user code too."""
    # Every optimizer imports it when it is made; 2 s.
    import_module("torch._dynamo")
    for cell in cells:
        # A module that cannot be imported, or calls sys.exit, fails again in the run, which records it.
        with suppress(Exception, SystemExit):
            facts = STRATEGIES.facts(cell.strategy)
            import_module(facts.model.partition(":")[0])
            import_builder(cell.workload, source_folder=Path(source_folder) if source_folder else None)
            if facts.engine is not None:
                facts.engine.load(cell.device)


def fork_obstacle() -> str | None:
    """Why this process cannot be forked any more; None if it can."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"it has {threads} threads before the first run: user code starts them when it is imported"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "user code uses CUDA when it is imported"
    return None


def run_of_this_process(slots: Sequence[Slot]) -> Slot | int:
    """Fork a child for each slot, one after another, and wait for its end.

    Returns in each child the slot that it runs. In this process it returns the exit code of the first child
    which did not end well, else 0. A child that a signal ends takes this process with it, so that torchrun
    reports the signal.
    """
    parent = os.getpid()
    for slot in slots:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            return slot
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(parent, -code)
        if code:
            return 0 if code == STOPPED else code
    return 0
