"""The route of a bucket: over all ranks at once, or within the nodes and across them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.compression.base import Compressor
    from strategies.exchange.buckets import Bucket


class Route(Protocol):
    """Sums a bucket over all ranks, and compresses it where that saves time."""

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        """Sum the bucket over all ranks, as `Compressor.sum_shares` does over a wire."""


class Flat:
    """All ranks at once, always compressed."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        compressor.sum_shares(bucket, residual, self._wire)
