"""`topk`: every rank sends the largest elements of its share, with their indices.

Ranks choose different indices. So an all-gather moves the pairs of value and index, and what a rank receives
grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from results.spec import Spec
from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor, State
from strategies.compression.selection import SELECTIONS, Select, count_sent
from strategies.compression.streams import Streams
from strategies.exchange.buckets import Bucket


class TopK(Compressor):
    """k = ratio n of n elements (Aji and Heafield 2017, arXiv:1704.05021)."""

    def __init__(self, ratio: float, select: Select, streams: Streams, *, feedback: bool) -> None:
        """`streams` give this rank's random numbers, which a sampled selection draws from."""
        super().__init__(feedback=feedback)
        self._ratio, self._select, self._streams = ratio, select, streams

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> TopK:
        select = SELECTIONS[spec.word("select")]
        return cls(spec.ratio, select, Streams(seed, rank), feedback=spec.flag("feedback"))

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        values = bucket.values
        k = count_sent(self._ratio, values.numel())
        sum_chosen(values, self._select(values, k, self._streams.next(bucket)), residual, wire)

    def state_dict(self) -> State:
        return self._streams.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._streams.load_state_dict(state)


def sum_chosen(values: Tensor, indices: Tensor, residual: Tensor | None, wire: Wire) -> None:
    """Replace `values` (n,) by the sum over the ranks of what each has at its own `indices` (k,).

    A rank sends 8 k bytes: k fp32 values, then k int32 indices, in one buffer. Values of another type are
    rounded to fp32, and the residual has their rounding error. The residual has every element that is not
    sent. All ranks add in the order of ranks, and so end with the same bits.
    """
    assert values.numel() < 2**31, "indices are int32"
    chosen = values.index_select(0, indices)
    sent = chosen.float()
    if residual is not None:
        # An infinity that has been sent leaves nothing, not infinity less infinity.
        left = chosen.sub(sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        residual.copy_(values).index_copy_(0, indices, left.to(residual.dtype))
    pairs = wire.all_gather(torch.cat([sent.view(torch.int32), indices.to(torch.int32)]))
    values.zero_()
    for theirs, where in pairs.view(wire.size, 2, -1):
        values.index_add_(0, where, theirs.view(torch.float32).to(values.dtype))
