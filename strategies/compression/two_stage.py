"""Compressed sums in two stages, for codes that have to be decoded before they are added."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

from strategies.compression.base import Compressor

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.exchange.buckets import Bucket

SCALE_BYTES = 4
"""A scale travels as fp32, together with its codes."""


class TwoStage(Compressor):
    """Every rank sums up one shard: a reduce-scatter and an all-gather, both of codes.

    First each rank encodes a shard for every rank, and an all-to-all sends them. Each rank decodes and adds
    the shards that it received, and encodes the sum for an all-gather. A rank receives at most twice the
    bytes of its codes, for any number of ranks; an all-gather of complete buckets grows with their
    number.

    Both encodings make errors. The owner of the shard makes the second one, and adds it to its own `residual`
    of the first: one residual instead of a worker's and a server's (DoubleSqueeze, Tang et al. 2019,
    arXiv:1905.05957; 1-bit Adam, Tang et al. 2021, arXiv:2102.02888). It belongs to parameters and not to
    shards, so that it survives when buckets are formed anew.
    """

    def __init__(self, *, unit: int, feedback: bool) -> None:
        """The number of values in a shard is a multiple of `unit`."""
        super().__init__(feedback=feedback)
        self.unit = unit

    @abstractmethod
    def encode(self, shards: Tensor, filled: Tensor) -> Tensor:
        """Encode (s, length) fp32 to (s, bytes) uint8. Shard i has filled[i] values, then zeros."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Decode (s, bytes) uint8 to a new (s, length) fp32."""

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        import torch

        values, rank = bucket.values, wire.rank
        count = values.numel()
        shards = _cut(values, wire.size, self.unit)
        length = shards.shape[1]
        filled = (count - length * torch.arange(wire.size, device=values.device)).clamp_(0, length)
        codes = self.encode(shards, filled)
        if residual is not None:
            torch.sub(values, self.decode(codes).flatten()[:count], out=residual)

        received = self.decode(wire.all_to_all(codes))
        own = received[0]
        # In the order of ranks, so that the sum does not depend on which rank makes it.
        for shard in received[1:]:
            own += shard
        own[max(0, count - rank * length) :] = 0  # padding may decode to any value
        code = self.encode(own.unsqueeze(0), filled[rank : rank + 1])
        sums = self.decode(wire.all_gather(code.flatten()))
        if residual is not None:
            part = residual[rank * length : (rank + 1) * length]
            part += (own - sums[rank])[: part.numel()]
        values.copy_(sums.flatten()[:count])


def scales_of(octets: Tensor) -> Tensor:
    """Return (..., 4) uint8 as (..., 1) fp32: a copy, as scales between codes are not aligned for fp32."""
    import torch

    return octets.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _cut(values: Tensor, size: int, unit: int) -> Tensor:
    """Return (n,) as (size, length) in fp32, padded with zeros; not a copy if no value has to change."""
    length = unit * max(1, math.ceil(values.numel() / (size * unit)))
    padding = size * length - values.numel()
    whole = values.float()
    if padding:
        from torch.nn.functional import pad

        whole = pad(whole, (0, padding))
    return whole.view(size, length)
