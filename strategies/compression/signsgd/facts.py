"""`signsgd` without torch."""

from __future__ import annotations

from types import MappingProxyType

from strategies.compression.facts import FEEDBACK, CompressorFacts


class ScaledSignFacts(CompressorFacts):
    """Scaled signs, shard by shard."""

    name = "signsgd"
    help = "one bit an element and a scale, in two stages"
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "strategies.compression.signsgd.compressor:ScaledSign"
    need = "all-to-all"
