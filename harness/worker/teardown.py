"""Between cells: nothing of a run may be left for the next one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys

import numpy as np
import torch

FRAGMENTED_ABOVE = 0.2
"""Share of a device's memory that the allocator may hold without using it before a fresh launch is due."""


def tear_down(device: torch.device) -> None:
    """Free what the last run left and set the process's switches back."""
    if "torch._dynamo" in sys.modules:
        # Else the limit on recompilations, which counts over cells, falls back to eager without a word.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    free_memory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def free_memory() -> None:
    """Give back to the system what nothing refers to any more, so that peaks after it are of what follows."""
    gc.collect()
    torch.cuda.empty_cache()
    # The C library keeps freed memory for itself, and with it the resident size, unless it is asked.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def fragmented(device: torch.device) -> bool:
    """Whether the allocator still holds much memory after everything was freed."""
    if device.type != "cuda":
        return False
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return held > FRAGMENTED_ABOVE * torch.cuda.get_device_properties(device).total_memory
