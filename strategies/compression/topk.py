"""`topk`: every rank sends the largest elements of its share, with their indices.

Ranks choose different indices. So an all-gather moves the pairs of value and index, and the bytes that a rank
receives grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from results.spec import Spec
from strategies.compression.base import Compressor, State
from strategies.compression.facts import FEEDBACK, RATIO, SELECT, CompressorFacts, share_of
from strategies.compression.promise import Chosen, CompressorPromise, Forgotten, WireBytes
from strategies.compression.streams import Streams

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.compression.selection import Select
    from strategies.exchange.buckets import Bucket


class TopKFacts(CompressorFacts):
    """Ranks choose different indices."""

    name = "topk"
    help = "the largest elements of each bucket, with their indices"
    positional = RATIO
    options = MappingProxyType({"select": SELECT, "feedback": FEEDBACK})
    compressor = "strategies.compression.topk:TopK"
    need = "all-gather"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        # An index goes with each value: 4 bytes each.
        size = WireBytes(of=lambda values, ranks, before: 8 * self.count_sent(values, before))
        return size, self.largest_sent(), Chosen(count=self.count_sent), Forgotten(count=self.count_sent)


class TopK(Compressor):
    """k = ratio n of n elements (Aji and Heafield 2017, arXiv:1704.05021)."""

    def __init__(self, ratio: float, select: Select, streams: Streams, *, feedback: bool) -> None:
        """`streams` has the random numbers of this rank for a sampled selection."""
        super().__init__(feedback=feedback)
        self._ratio, self._select, self._streams = ratio, select, streams

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> TopK:
        from strategies.compression.selection import SELECTIONS

        select = SELECTIONS[spec.word("select")]
        return cls(spec.ratio, select, Streams(seed, rank), feedback=spec.flag("feedback"))

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        values = bucket.values
        k = share_of(values.numel(), self._ratio)
        sum_chosen(values, self._select(values, k, self._streams.next(bucket)), residual, wire)

    def state_dict(self) -> State:
        return self._streams.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._streams.load_state_dict(state)


def sum_chosen(values: Tensor, indices: Tensor, residual: Tensor | None, wire: Wire) -> None:
    """Replace `values` (n,) by the sum over the ranks of the values that each has at its own `indices` (k,).

    A rank sends 8 k bytes: k fp32 values, then k int32 indices, in one buffer. Values of another type are
    rounded to fp32, and the residual has their rounding error. The residual has every element that is not
    sent. All ranks add in the order of ranks, and so end with the same bits.
    """
    import torch

    assert values.numel() < 2**31, "indices are int32"
    chosen = values.index_select(0, indices)
    sent = chosen.float()
    if residual is not None:
        # An infinity that has been sent has no rounding error, instead of infinity less infinity.
        error = chosen.sub(sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        residual.copy_(values).index_copy_(0, indices, error.to(residual.dtype))
    pairs = wire.all_gather(torch.cat([sent.view(torch.int32), indices.to(torch.int32)]))
    values.zero_()
    for theirs, where in pairs.view(wire.size, 2, -1):
        values.index_add_(0, where, theirs.view(torch.float32).to(values.dtype))
