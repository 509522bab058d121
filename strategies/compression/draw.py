"""Random draws that follow from a key, so that no generator has to be kept, sent or restored."""

from __future__ import annotations

import hashlib

import torch


def generator_of(device: torch.device, *key: int | str) -> torch.Generator:
    """A new generator whose seed follows from `key` alone: the same in every process and every run.

    torch's own generators, from which dropout and data order are drawn, are left as they are.
    """
    # Hashed, not added up: bucket 1 at step 0 must not draw what bucket 0 draws at step 1.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
