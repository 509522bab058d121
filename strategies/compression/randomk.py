"""`randomk`: random elements, the same on all ranks, so that an all-reduce sums them without indices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from results.spec import Spec
from strategies.compression.base import Compressor, State
from strategies.compression.facts import FEEDBACK, RATIO, CompressorFacts, share_of
from strategies.compression.promise import Chosen, CompressorPromise, RandomPlaces, WireBytes
from strategies.compression.streams import Streams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.exchange.buckets import Bucket


class RandomKFacts(CompressorFacts):
    """All ranks choose the same places."""

    name = "randomk"
    help = "random elements, the same on all ranks, so that places need not be sent"
    positional = RATIO
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "strategies.compression.randomk:RandomK"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        size = WireBytes(of=lambda values, ranks, before: 4 * self.count_sent(values, before))
        chosen = Chosen(count=self.count_sent, scaled=not self.spec.flag("feedback"))
        return size, chosen, RandomPlaces(count=self.count_sent)


class RandomK(Compressor):
    """One random element of each of k nearly equal blocks: no place twice, and no permutation to draw.

    With feedback values are sent as they are, a contraction. Without it they are sent times the length of
    their block, which makes the result unbiased: E C(x) = x, E |C(x) - x|^2 = (n/k - 1) |x|^2 where all
    blocks have n/k elements. Feedback and scaling are never combined: feedback needs a
    contraction (Stich et al. 2018, arXiv:1809.07599, definition 2.1), and sending scaled values is not one.
    """

    def __init__(self, ratio: float, streams: Streams, *, feedback: bool) -> None:
        """`streams` has the same key on all ranks."""
        super().__init__(feedback=feedback)
        self._ratio, self._streams = ratio, streams

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> RandomK:
        return cls(spec.ratio, Streams(seed), feedback=spec.flag("feedback"))

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        values = bucket.values
        k = share_of(values.numel(), self._ratio)
        indices, lengths = draw(values.numel(), k, self._streams.next(bucket))
        sent = values.index_select(0, indices)
        if not self.feedback:
            sent.mul_(lengths)
        # Adds NaN if any value is not finite, sent or not, else 0: this step must show an overflow.
        low, high = values.aminmax()
        sent.add_(0 * low + 0 * high)
        if residual is not None:
            residual.copy_(values).index_add_(0, indices, sent, alpha=-1)
        wire.all_reduce(sent)
        values.zero_().index_copy_(0, indices, sent)

    def state_dict(self) -> State:
        return self._streams.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._streams.load_state_dict(state)


def draw(n: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one index of each of k blocks of n elements; return the indices and the blocks' lengths, (k,)
    each, on the device of the generator."""
    import torch

    from strategies.compression.selection import equal_blocks

    indices, lengths = [], []
    for run in equal_blocks(n, k):
        places = torch.randint(run.length, (run.count,), generator=generator, device=generator.device)
        indices.append(places.add_(run.starts(generator.device)))
        lengths.append(torch.full_like(places, run.length))
    return torch.cat(indices), torch.cat(lengths)
