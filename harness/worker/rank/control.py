"""What the ranks agree on between blocks, outside of everything that is timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.devices import device_of


class Control:
    """Barriers and small agreements among all ranks of the launch, and sums of tensors for its checks.

    Agreements go over the default group, which is Gloo's, in host memory (`crew.py` says why). Tensors of the
    device go over the backend of the exchange, and are not counted as exchange.
    """

    def __init__(self, device: torch.device, backend: dist.ProcessGroup | None = None) -> None:
        """`backend` moves tensors of `device` (None: the default group does)."""
        self.device = device
        self._backend = backend

    def barrier(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def begin_together(self, *, devices: bool = True) -> None:
        """A barrier of the ranks, and with `devices` one in the queues of their devices as well: hosts leave
        theirs some 0.1 ms apart."""
        self.barrier()
        if devices and dist.get_world_size() > 1 and device_of(self.device).asynchronous:
            self.all_reduce(torch.zeros(1, device=self.device))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks: the same list on all of them, so the same decisions."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def of_all(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in the order of ranks."""
        own = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return [[float(value) for value in row.tolist()] for row in every]

    def agree(self, value: float) -> bool:
        """Whether all ranks have the same value."""
        largest, negated = self.largest([value, -value])
        return largest == -negated

    def from_first(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(tensor, src=0)
        return float(tensor.item())

    def sum_to_first(self, values: Tensor) -> None:
        """Sum a tensor of host memory over the ranks, in place on rank 0; what is left on the others means
        nothing. Over the default group: nothing of what exchanges gradients takes part."""
        dist.reduce(values, dst=0)

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that any rank has, in their order."""
        every: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(every, sorted(names))
        return sorted({name for own in every for name in own})

    def sum_of_all(self, values: Tensor) -> Tensor:
        """A tensor of host memory summed over the ranks, the same on all of them; as `sum_to_first`."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def all_reduce(self, values: Tensor) -> None:
        """Sum a tensor of the device over the ranks, in place."""
        dist.all_reduce(values, group=self._backend)

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """A contiguous tensor of the device from every rank, in the order of ranks; of one shape on all."""
        every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(every, values, group=self._backend)
        return every

    def broadcast(self, values: Tensor) -> None:
        """Rank 0's values of a tensor of the device, in place."""
        dist.broadcast(values, src=0, group=self._backend)

    def synchronize(self) -> None:
        """Wait for this rank's own device."""
        device_of(self.device).synchronize()
