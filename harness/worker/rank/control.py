"""Agreements of ranks between blocks, outside of everything that is timed; hashes to compare replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from strategies.devices import device_of
from strategies.trainer import Trainer

T = TypeVar("T")


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
        """Sum a tensor of host memory over the ranks, in place on rank 0; it is undefined on the others.

        It goes over the default group, so that the exchange of gradients takes no part in it.
        """
        dist.reduce(values, dst=0)

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that at least one rank has, sorted."""
        return sorted({name for own in self.objects(sorted(names)) for name in own})

    def objects(self, own: T) -> list[T]:
        """An object of every rank, in the order of ranks; its tensors are in host memory."""
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return every

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


PIECE = 2**20
"""Words of 32 bits that a device multiplies at a time: 8 MiB as products."""


def parameters_hash(trainer: Trainer) -> str:
    """16 hex digits over all parameters, names and bits."""
    return _digest(trainer.model.named_parameters())


def hash_number(values: Iterable[tuple[str, Tensor]]) -> float:
    """A hash of names and bits as a number to exchange: 52 bits, which a float64 holds exactly."""
    return float(int(_digest(values)[:13], 16))


def _digest(values: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, value in values:
        digest.update(name.encode())
        bits = value.detach().contiguous().flatten().view(torch.uint8)
        if device_of(value.device).asynchronous:
            digest.update(_device_sums(bits).numpy().data)
        else:
            digest.update(bits.numpy().data)
    return digest.hexdigest()


def _device_sums(octets: Tensor) -> Tensor:
    """A number of 64 bits for each piece of what lies on a device, in host memory.

    A model of 28 GB would go to the host, and through one of its threads, in half a minute. Here the words of
    32 bits are multiplied by odd numbers that depend on the place, and added up modulo 2^64 (multilinear
    hashing: Carter & Wegman 1979, J. Comput. Syst. Sci. 18): a word that differs always changes the sum, the
    order of the addition never does. On CPU the bits themselves are hashed, as earlier versions did: runs are
    compared by these hashes.
    """
    if octets.storage_offset() % 4 or octets.numel() % 4:
        octets = functional.pad(octets, (0, -octets.numel() % 4))
    words = octets.view(torch.int32)
    factors = _odd_numbers(min(PIECE, words.numel()), octets.device)
    pieces = torch.split(words, PIECE) if words.numel() else ()
    # Sums and products of int64 wrap around.
    sums = [(piece.long() * factors[: piece.numel()]).sum() for piece in pieces]
    return torch.stack(sums).cpu() if sums else torch.empty(0, dtype=torch.int64)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers of 64 bits, one a place, by SplitMix64 (Steele, Lea & Flood 2014) with
    arithmetic shifts."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * (0x9E3779B97F4A7C15 - 2**64)
    mixed = (mixed ^ (mixed >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ (mixed >> 27)) * (0x94D049BB133111EB - 2**64)
    return (mixed ^ (mixed >> 31)) | 1
