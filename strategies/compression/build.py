"""From a compressor's spec text to the compressor."""

from __future__ import annotations

from collections.abc import Callable

from results.spec import Spec
from strategies.compression.base import Compressor
from strategies.compression.cast import Bf16, Fp16
from strategies.compression.catalog import COMPRESSIONS
from strategies.compression.dense import Dense
from strategies.compression.dgc import Dgc
from strategies.compression.int8 import Int8
from strategies.compression.powersgd import PowerSGD
from strategies.compression.randomk import RandomK
from strategies.compression.selection import SELECTIONS
from strategies.compression.signsgd import ScaledSign
from strategies.compression.streams import Streams
from strategies.compression.topk import TopK


def build_compressor(text: str, *, seed: int, rank: int) -> Compressor:
    """The compressor that `text` names. What ranks draw alike follows from `seed` alone; what each draws
    for itself from `rank` as well. Raises SpecError for one that does not exist."""
    spec = COMPRESSIONS.parse(text)
    return _BUILDERS[spec.name](spec, seed, rank)


Builder = Callable[[Spec, int, int], Compressor]

_BUILDERS: dict[str, Builder] = {
    "none": lambda spec, seed, rank: Dense(),
    "fp16": lambda spec, seed, rank: Fp16(),
    "bf16": lambda spec, seed, rank: Bf16(),
    "topk": lambda spec, seed, rank: TopK(
        spec.ratio, SELECTIONS[spec.word("select")], Streams(seed, rank), feedback=spec.flag("feedback")
    ),
    "randomk": lambda spec, seed, rank: RandomK(spec.ratio, Streams(seed), feedback=spec.flag("feedback")),
    "powersgd": lambda spec, seed, rank: PowerSGD(
        spec.count, warmup=spec.integer("warmup"), seed=seed, feedback=spec.flag("feedback")
    ),
    "int8": lambda spec, seed, rank: Int8(
        block=spec.integer("block"), seed=seed, rank=rank, feedback=spec.flag("feedback")
    ),
    "signsgd": lambda spec, seed, rank: ScaledSign(feedback=spec.flag("feedback")),
    "dgc": lambda spec, seed, rank: Dgc(
        spec.ratio,
        SELECTIONS[spec.word("select")],
        Streams(seed, rank),
        momentum=spec.number("momentum"),
        warmup=spec.integer("warmup"),
    ),
}
