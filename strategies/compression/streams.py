"""Random numbers of compressors, apart from torch's global generators, which the model and its data use.

They follow from a key, so that no generator has to be kept, sent or restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from strategies.compression.base import State
    from strategies.exchange.buckets import Bucket


def generator_of(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a new generator whose seed follows only from `key`: the same in every process and every run.

    torch's own generators, from which dropout and data order are drawn, are left as they are.
    """
    import torch

    # Hashed, not added up: bucket 1 at step 0 must not draw what bucket 0 draws at step 1.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


class Streams:
    """A fresh generator for every exchange of every bucket.

    It follows from the key, the bucket's index and the number of exchanges of the bucket; these counts are
    the only state. Ranks with equal keys draw equal numbers: on CPU always, on CUDA on devices of one model.
    """

    def __init__(self, *key: int) -> None:
        self._key = key
        self._counts: dict[int, int] = {}

    def count(self, bucket: Bucket) -> int:
        """Return the number of exchanges of the bucket so far."""
        return self._counts.get(bucket.index, 0)

    def next(self, bucket: Bucket) -> torch.Generator:
        """Count an exchange of the bucket, and return its generator, on the bucket's device."""
        count = self.count(bucket)
        self._counts[bucket.index] = count + 1
        return generator_of(bucket.values.device, *self._key, bucket.index, count)

    def state_dict(self) -> State:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._counts = dict(cast("dict[int, int]", state["counts"]))
