"""`topk` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, RATIO, SELECT, CompressorFacts
from strategies.compression.promise import Chosen, CompressorPromise, Forgotten, WireBytes


class TopKFacts(CompressorFacts):
    """Ranks choose different indices."""

    name = "topk"
    help = "the largest elements of each bucket, with their indices"
    positional = RATIO
    options = MappingProxyType({"select": SELECT, "feedback": FEEDBACK})
    compressor = "strategies.compression.topk.compressor:TopK"
    need = "all-gather"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        # An index goes with each value: 4 bytes each.
        size = WireBytes(of=lambda values, ranks, before: 8 * self.count_sent(values, before))
        return size, self.largest_sent(), Chosen(count=self.count_sent), Forgotten(count=self.count_sent)
