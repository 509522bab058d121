"""`topk` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, RATIO, SELECT, CompressorFacts


class TopKFacts(CompressorFacts):
    """Ranks choose different places."""

    name = "topk"
    help = "the largest elements of each bucket, with their places"
    positional = RATIO
    options = MappingProxyType({"select": SELECT, "feedback": FEEDBACK})
    compressor = "strategies.compression.topk.compressor:TopK"
    need = "all-gather"
