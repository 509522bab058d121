"""The catalog of compressors, and how one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from results.registry import Registry, load
from strategies.compression.facts import CompressorFacts

if TYPE_CHECKING:
    from strategies.compression.base import Compressor

COMPRESSIONS: Registry[CompressorFacts] = Registry(
    "compression",
    {
        "none": "strategies.compression.none:Uncompressed",
        "fp16": "strategies.compression.casts:Fp16Facts",
        "bf16": "strategies.compression.casts:Bf16Facts",
        "topk": "strategies.compression.topk:TopKFacts",
        "randomk": "strategies.compression.randomk:RandomKFacts",
        "powersgd": "strategies.compression.powersgd.facts:PowerSGDFacts",
        "torch-powersgd": "strategies.compression.powersgd.facts:TorchPowerSGDFacts",
        "int8": "strategies.compression.int8:Int8Facts",
        "signsgd": "strategies.compression.signsgd:ScaledSignFacts",
        "dgc": "strategies.compression.dgc:DgcFacts",
    },
    base=CompressorFacts,
)


def build_compressor(text: str, *, seed: int, rank: int) -> Compressor:
    """Build the compressor that `text` names; `seed` and `rank` as in `Compressor.of`. Raises SpecError for
    an unknown one."""
    facts = COMPRESSIONS.facts(text)
    kind: type[Compressor] = load(facts.compressor)
    return kind.of(facts.spec, seed=seed, rank=rank)
