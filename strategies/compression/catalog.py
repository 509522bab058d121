"""The catalog of compressors, and how one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from results.registry import Registry, load
from strategies.compression.casts import Bf16Facts, Fp16Facts
from strategies.compression.dgc import DgcFacts
from strategies.compression.facts import CompressorFacts
from strategies.compression.int8 import Int8Facts
from strategies.compression.none import Uncompressed
from strategies.compression.powersgd.facts import PowerSGDFacts, TorchPowerSGDFacts
from strategies.compression.randomk import RandomKFacts
from strategies.compression.signsgd import ScaledSignFacts
from strategies.compression.topk import TopKFacts

if TYPE_CHECKING:
    from strategies.compression.base import Compressor

COMPRESSIONS: Registry[CompressorFacts] = Registry(
    "compression",
    (
        Uncompressed,
        Fp16Facts,
        Bf16Facts,
        TopKFacts,
        RandomKFacts,
        PowerSGDFacts,
        TorchPowerSGDFacts,
        Int8Facts,
        ScaledSignFacts,
        DgcFacts,
    ),
    base=CompressorFacts,
)


def build_compressor(text: str, *, seed: int, rank: int) -> Compressor:
    """Build the compressor that `text` names; `seed` and `rank` as in `Compressor.of`. Raises SpecError for
    an unknown one."""
    facts = COMPRESSIONS.facts(text)
    kind: type[Compressor] = load(facts.compressor)
    return kind.of(facts.spec, seed=seed, rank=rank)
