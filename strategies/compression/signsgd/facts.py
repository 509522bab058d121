"""`signsgd` without torch."""

from __future__ import annotations

import math
from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, CompressorFacts
from strategies.compression.promise import CompressorPromise, ScaledSigns, WireBytes


class ScaledSignFacts(CompressorFacts):
    """Scaled signs, shard by shard."""

    name = "signsgd"
    help = "one bit an element and a scale, in two stages"
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "strategies.compression.signsgd.compressor:ScaledSign"
    need = "all-to-all"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        def size(values: int, ranks: int, before: int) -> int:
            # A shard for every rank, and the sum of its own: a bit a value, and 4 bytes of the scale.
            return (ranks + 1) * (math.ceil(values / (ranks * 8)) + 4)

        return WireBytes(of=size), ScaledSigns(unit=8)
