"""`powersgd`, and `torch-powersgd`, torch's hook of the same algorithm, without torch."""

from __future__ import annotations

import math
from types import MappingProxyType

from strategies.compression.facts import (
    FEEDBACK,
    RANK,
    ROUNDINGS,
    UNIT_ROUNDOFF,
    WARMUP,
    CompressorFacts,
)
from strategies.compression.promise import CompressorPromise, Projection


class LowRankFacts(CompressorFacts):
    """Matrices are sent as low-rank factors."""

    positional = RANK
    whole_matrices = True

    def law_tolerance(self, ranks: int) -> float:
        # A product of factors of r terms, whose norms are up to sqrt(r) times that of the matrix.
        rank = self.spec.count
        return max(ROUNDINGS, math.sqrt(rank) * (rank + ranks)) * UNIT_ROUNDOFF


class PowerSGDFacts(LowRankFacts):
    """Our implementation, over any all-reduce."""

    name = "powersgd"
    help = "a low-rank approximation of each matrix, warm-started"
    options = MappingProxyType({"warmup": WARMUP, "feedback": FEEDBACK})
    compressor = "strategies.compression.powersgd.compressor:PowerSGD"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        return (Projection(),)


class TorchPowerSGDFacts(LowRankFacts):
    """The hook of torch, with which our implementation is compared."""

    name = "torch-powersgd"
    help = "torch's PowerSGD hook, only for ddp"
    instead = PowerSGDFacts.name
    ddp_hook = "strategies.ddp.hook:TorchPowerSgd"
