"""`fp16` and `bf16` without torch."""

from __future__ import annotations

from typing import ClassVar

from strategies.compression.facts import CompressorFacts
from strategies.compression.promise import CompressorPromise, Rounded, WireBytes


class CastFacts(CompressorFacts):
    """Sums in half precision."""

    keeps_residual = False
    roundoff: ClassVar[float]
    """Unit roundoff of what is summed."""

    def law_tolerance(self, ranks: int) -> float:
        # Each of p - 1 sums rounds a partial sum, and the shares are rounded before.
        return 2 * ranks * self.roundoff


class Fp16Facts(CastFacts):
    """11 bits in a narrow range."""

    name = "fp16"
    help = "half precision, scaled so that no sum overflows"
    compressor = "strategies.compression.casts.compressor:Fp16"
    roundoff = 2.0**-11

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        # And the largest value, by which ranks agree on a scale.
        return (WireBytes(of=lambda values, ranks, before: 2 * values + 4),)


class Bf16Facts(CastFacts):
    """8 bits in the range of full precision."""

    name = "bf16"
    help = "bfloat16: the range of full precision, 8 bits of it"
    compressor = "strategies.compression.casts.compressor:Bf16"
    roundoff = 2.0**-8

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        size = WireBytes(of=lambda values, ranks, before: 2 * values)
        return size, Rounded(roundoff=self.roundoff)
