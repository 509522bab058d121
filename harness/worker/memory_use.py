"""The memory of a run on this rank: what the idle worker takes, and the peaks beyond it."""

from __future__ import annotations

import torch

from harness.worker.usage import rss_bytes, rss_peak_bytes
from results.record import Memory


class MemoryUse:
    """Made before a model is built, when the worker is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._idle_rss = rss_bytes()
        self._idle_device = None if self._device is None else torch.cuda.memory_allocated(self._device)

    def record(self) -> Memory:
        """The peaks so far; those of a device are None on a CPU."""
        device = self._device
        return Memory(
            rss_peak_bytes=rss_peak_bytes(),
            rss_idle_bytes=self._idle_rss,
            device_allocated_peak_bytes=None if device is None else torch.cuda.max_memory_allocated(device),
            device_reserved_peak_bytes=None if device is None else torch.cuda.max_memory_reserved(device),
            device_idle_bytes=self._idle_device,
        )
