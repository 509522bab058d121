"""`none`: gradients are exchanged as they are."""

from __future__ import annotations

from torch import Tensor

from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor
from strategies.exchange.buckets import Bucket


class Dense(Compressor):
    """Nothing is left out, so nothing is kept."""

    def __init__(self) -> None:
        super().__init__(feedback=False)

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        wire.all_reduce(bucket.values)
        if residual is not None:
            residual.zero_()
