"""What the ranks agree on between blocks, over the default group, outside of everything that is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Control:
    """Barriers and small agreements among all ranks of the launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def barrier(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier(device_ids=[self._device.index] if self._device.type == "cuda" else None)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks: the same list on all of them, so the same decisions."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def of_all(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in the order of ranks."""
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return [[float(value) for value in row.tolist()] for row in every]

    def agree(self, value: float) -> bool:
        """Whether all ranks have the same value."""
        largest, negated = self.largest([value, -value])
        return largest == -negated

    def from_first(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.broadcast(tensor, src=0)
        return float(tensor.item())

    def synchronize(self) -> None:
        """Wait for this rank's own device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
