"""Whether replicas are equal, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from strategies.devices import device_of
from strategies.training.trainer import Trainer

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
    """Pseudo-random odd numbers of 64 bits, one a place: those of SplitMix64 (Steele, Lea & Flood 2014), with
    arithmetic shifts."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * (0x9E3779B97F4A7C15 - 2**64)
    mixed = (mixed ^ (mixed >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ (mixed >> 27)) * (0x94D049BB133111EB - 2**64)
    return (mixed ^ (mixed >> 31)) | 1
