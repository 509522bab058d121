"""`randomk` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, RATIO, CompressorFacts
from strategies.compression.promise import (
    Chosen,
    CompressorPromise,
    RandomPlaces,
    WireBytes,
)


class RandomKFacts(CompressorFacts):
    """All ranks choose the same places."""

    name = "randomk"
    help = "random elements, the same on all ranks, so that places need not be sent"
    positional = RATIO
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "strategies.compression.randomk.compressor:RandomK"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        size = WireBytes(of=lambda values, ranks, before: 4 * self.count_sent(values, before))
        chosen = Chosen(count=self.count_sent, scaled=not self.spec.flag("feedback"))
        return size, chosen, RandomPlaces(count=self.count_sent)
