"""`int8` without torch."""

from __future__ import annotations

from types import MappingProxyType

from results.spec import Option
from strategies.compression.facts import CompressorFacts


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
