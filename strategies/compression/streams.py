"""Random numbers of the compressors' own: torch's global generators are the model's and its data's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from strategies.compression.base import State
from strategies.compression.draw import generator_of
from strategies.exchange.buckets import Bucket


class Streams:
    """A fresh generator for every exchange of every bucket.

    It follows from the key, the bucket's index and how often the bucket has been exchanged; these counts
    are all its state. Ranks with equal keys draw alike: always on CPU, on CUDA on devices of one model.
    """

    def __init__(self, *key: int) -> None:
        self._key = key
        self._counts: dict[int, int] = {}

    def count(self, bucket: Bucket) -> int:
        """How often the bucket has been exchanged so far."""
        return self._counts.get(bucket.index, 0)

    def next(self, bucket: Bucket) -> torch.Generator:
        """The generator of the exchange that begins now, on the bucket's device; counts it."""
        count = self.count(bucket)
        self._counts[bucket.index] = count + 1
        return generator_of(bucket.values.device, *self._key, bucket.index, count)

    def state_dict(self) -> State:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._counts = dict(cast("dict[int, int]", state["counts"]))
