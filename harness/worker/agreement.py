"""Whether replicas are equal, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from strategies.training.trainer import Trainer


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
        bits = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(bits.numpy().data)
    return digest.hexdigest()
