"""`randomk` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, RATIO, CompressorFacts


class RandomKFacts(CompressorFacts):
    """All ranks choose the same places."""

    name = "randomk"
    help = "random elements, the same on all ranks, so that places need not be sent"
    positional = RATIO
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "strategies.compression.randomk.compressor:RandomK"
