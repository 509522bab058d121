"""Between cells: nothing of a run may be left for the next one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
from importlib import import_module

import numpy as np
import torch

from strategies.devices import device_of

FRAGMENTED_ABOVE = 0.2
"""Share of a device's memory that the allocator may hold without using it before a fresh launch is due."""


def keep_imports() -> None:
    """Take what the process has so far out of all later collections, which begin here.

    torch alone is 300,000 objects, through which each of them would go: 0.14 s of a run, three times. What
    every optimizer imports when the first one is made (0.3 s) comes before, and is no part of the first run.
    """
    import_module("torch._dynamo")
    gc.freeze()
    gc.enable()


def tune_kernels(device: torch.device) -> None:
    """On a GPU, have cuDNN time its algorithms when it first meets a convolution, and keep the fastest: the
    batches of a cell have one shape. Until `tear_down`."""
    torch.backends.cudnn.benchmark = device_of(device).asynchronous


def tear_down(device: torch.device) -> None:
    """Free what the last run left and set the process's switches back."""
    if "torch._dynamo" in sys.modules:
        # Else the limit on recompilations, which counts over cells, falls back to eager without a word.
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
    """Give back to the system what nothing refers to any more, so that peaks after it are of what follows."""
    gc.collect()
    device_of(device).release_memory()
    # The C library keeps freed memory for itself, and with it the resident size, unless it is asked.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def fragmented(device: torch.device) -> bool:
    """Whether the allocator still holds much memory after everything was freed."""
    figures = device_of(device).memory()
    return figures is not None and figures.reserved - figures.allocated > FRAGMENTED_ABOVE * figures.total
