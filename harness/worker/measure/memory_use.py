"""The memory of a run on this rank: what the idle worker takes, and the peaks beyond it."""

from __future__ import annotations

import torch

from harness.worker.rank.usage import rss_bytes, rss_peak_bytes
from results.record import Memory
from strategies.devices import device_of


class MemoryUse:
    """Made before a model is built, when the worker is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._idle_rss = rss_bytes()
        self._idle = self._device.memory()

    def record(self) -> Memory:
        """The peaks so far; those of a device are None on a CPU."""
        figures = self._device.memory()
        return Memory(
            rss_peak_bytes=rss_peak_bytes(),
            rss_idle_bytes=self._idle_rss,
            device_allocated_peak_bytes=None if figures is None else figures.allocated_peak,
            device_reserved_peak_bytes=None if figures is None else figures.reserved_peak,
            device_idle_bytes=None if self._idle is None else self._idle.allocated,
        )
