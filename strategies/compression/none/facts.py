"""`none` without torch."""

from __future__ import annotations

from strategies.compression.facts import CompressorFacts


class Uncompressed(CompressorFacts):
    """Nothing is left out, so nothing is kept."""

    name = "none"
    help = "gradients are exchanged as they are, in full precision"
    compressor = "strategies.compression.none.compressor:Dense"
    keeps_residual = False
