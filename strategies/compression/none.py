"""`none`: gradients are exchanged as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies.compression.base import Compressor
from strategies.compression.facts import CompressorFacts

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.exchange.buckets import Bucket


class Uncompressed(CompressorFacts):
    """All values are sent, so no residual is kept."""

    name = "none"
    help = "gradients are exchanged as they are, in full precision"
    compressor = "strategies.compression.none:Dense"
    keeps_residual = False


class Dense(Compressor):
    """All values are sent, so no residual is kept."""

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        wire.all_reduce(bucket.values)
        if residual is not None:
            residual.zero_()
