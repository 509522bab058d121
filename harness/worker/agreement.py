"""Whether replicas are equal, bit for bit."""

from __future__ import annotations

import hashlib

import torch

from harness.worker.control import Control
from strategies.trainer import Trainer


def parameters_hash(trainer: Trainer) -> str:
    """16 hex digits over all parameters, names and bits."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in trainer.model.named_parameters():
        digest.update(name.encode())
        bits = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(bits.numpy().data)
    return digest.hexdigest()


def replicas_agree(trainer: Trainer, control: Control) -> bool:
    """Whether the parameters are bit for bit equal on all ranks; collective."""
    # 52 bits, which a float64 holds exactly.
    value = float(int(parameters_hash(trainer)[:13], 16))
    largest, negated = control.largest([value, -value])
    return largest == -negated
