"""`topk` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, RATIO, SELECT, CompressorFacts


class TopKFacts(CompressorFacts):
    """Ranks choose different indices."""

    name = "topk"
    help = "the largest elements of each bucket, with their indices"
    positional = RATIO
    options = MappingProxyType({"select": SELECT, "feedback": FEEDBACK})
    compressor = "strategies.compression.topk.compressor:TopK"
    need = "all-gather"
