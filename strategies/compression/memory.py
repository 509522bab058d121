"""A vector for each bucket, which survives when the parameters are distributed over new buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from strategies.exchange.buckets import Bucket, BucketRange, pieces_of


class BucketMemory:
    """One vector a bucket, zero at first: its residual, for example.

    It belongs to the parameters, not to the buckets: when buckets are formed anew (DDP does so after the
    first step) each parameter's part goes with it.
    """

    def __init__(self) -> None:
        self._vectors: dict[int, tuple[tuple[BucketRange, ...], Tensor]] = {}
        self._loose: dict[str, Tensor] = {}
        """The parts of parameters whose new bucket is not known yet."""

    def of(self, bucket: Bucket) -> Tensor:
        """Return the vector of `bucket`, to be read and written in place."""
        held = self._vectors.get(bucket.index)
        if held is None or held[0] != bucket.pieces:
            if held is not None:
                self._loosen()
            vector = torch.zeros_like(bucket.values)
            for piece in bucket.pieces:
                part = self._loose.pop(piece.name, None)
                if part is not None:
                    piece.of(vector).copy_(part)
            held = self._vectors[bucket.index] = bucket.pieces, vector
        if held[1].device != bucket.values.device:
            # A checkpoint was read into host memory.
            held = self._vectors[bucket.index] = bucket.pieces, held[1].to(bucket.values.device)
        return held[1]

    def vectors(self) -> Iterator[tuple[int, tuple[BucketRange, ...], Tensor]]:
        """Yield index, pieces and vector of every bucket so far."""
        for index, (pieces, vector) in self._vectors.items():
            yield index, pieces, vector

    def scale(self, factor: float) -> None:
        """Multiply all vectors by `factor`."""
        for vector in (*self._loose.values(), *(vector for _, vector in self._vectors.values())):
            vector.mul_(factor)

    def state_dict(self) -> dict[str, object]:
        """Return copies of this rank's parts by the names of the parameters, and the names in each bucket by
        its index."""
        return {
            "parts": {name: part.clone() for name, part in self._parts().items()},
            "buckets": {
                index: [piece.name for piece in pieces] for index, (pieces, _) in self._vectors.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a `state_dict`; parameters that it does not name start at zero."""
        self._loose = dict(cast("dict[str, Tensor]", state["parts"]))
        self._vectors = {}
        for index, names in cast("dict[int, list[str]]", state["buckets"]).items():
            parts = [self._loose.pop(name) for name in names]
            pieces = pieces_of((name, part.shape) for name, part in zip(names, parts, strict=True))
            self._vectors[index] = pieces, torch.cat([part.flatten() for part in parts])
        self._loose = {name: part.clone() for name, part in self._loose.items()}

    def _parts(self) -> dict[str, Tensor]:
        parts = dict(self._loose)
        for pieces, vector in self._vectors.values():
            parts |= {piece.name: piece.of(vector) for piece in pieces}
        return parts

    def _loosen(self) -> None:
        self._loose = self._parts()
        self._vectors = {}
