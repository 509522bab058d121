"""The compressors that there are."""

from __future__ import annotations

from results.registry import Registry
from strategies.compression.casts.facts import Bf16Facts, Fp16Facts
from strategies.compression.dgc.facts import DgcFacts
from strategies.compression.facts import CompressorFacts
from strategies.compression.int8.facts import Int8Facts
from strategies.compression.none.facts import Uncompressed
from strategies.compression.powersgd.facts import PowerSGDFacts
from strategies.compression.randomk.facts import RandomKFacts
from strategies.compression.signsgd.facts import ScaledSignFacts
from strategies.compression.topk.facts import TopKFacts
from strategies.compression.torch_powersgd.facts import TorchPowerSGDFacts

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
    group="bench.compressors",
)
