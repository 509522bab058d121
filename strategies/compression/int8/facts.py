"""`int8` without torch."""

from __future__ import annotations

import math
from types import MappingProxyType

from results.spec import Option
from strategies.compression.facts import CompressorFacts
from strategies.compression.promise import CompressorPromise, UnbiasedLevels, WireBytes

SMALLEST_STEP = 2.0**-126
"""The smallest normal number of fp32, for a block of zeros too: nothing is divided by zero, and no step is
subnormal."""


class Int8Facts(CompressorFacts):
    """Unbiased, so that feedback is an option and not a need."""

    name = "int8"
    help = "8 bits with a scale a block, stochastically rounded, in two stages"
    options = MappingProxyType(
        {
            "block": Option(
                kind="int", default=256, minimum=8, maximum=65536, help="values that share one scale"
            ),
            "feedback": Option(kind="bool", default=False, help="add what was not sent to the next gradient"),
        }
    )
    compressor = "strategies.compression.int8.compressor:Int8"
    need = "all-to-all"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        block = self.spec.integer("block")

        def size(values: int, ranks: int, before: int) -> int:
            # A shard for every rank, and the sum of its own: a byte a value, and 4 of each block's step.
            return (ranks + 1) * math.ceil(values / (ranks * block)) * (block + 4)

        return WireBytes(of=size), UnbiasedLevels(block=block, levels=127, smallest_step=SMALLEST_STEP)
