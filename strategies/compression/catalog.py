"""The compressors that there are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from results.spec import Catalog, Entry, Option

_RATIO = Option(kind="float", minimum=1e-6, maximum=1.0, help="the share that is sent, such as 0.01")
_RANK = Option(kind="int", minimum=1, maximum=1024, help="the rank of the approximation, such as 4")
_SELECT = Option(
    kind="str",
    default="exact",
    choices=("exact", "sampled", "block"),
    help="how the largest are found: all of them, by a threshold from a sample, or one of each block",
)
_FEEDBACK = Option(kind="bool", default=True, help="add what was not sent to the next gradient")
_NO_FEEDBACK = Option(kind="bool", default=False, help="add what was not sent to the next gradient")
_WARMUP = Option(kind="int", default=0, minimum=0, help="steps before it works as it will")
_BLOCK = Option(kind="int", default=256, minimum=8, maximum=65536, help="values that share one scale")
_MOMENTUM = Option(kind="float", default=0.9, minimum=0, maximum=1, help="momentum, kept before compression")

COMPRESSIONS = Catalog(
    "compression",
    [
        Entry(name="none", help="gradients are exchanged as they are, in full precision"),
        Entry(name="fp16", help="half precision, scaled so that no sum overflows"),
        Entry(name="bf16", help="bfloat16: the range of full precision, 8 bits of it"),
        Entry(
            name="topk",
            help="the largest elements of each bucket, with their places",
            positional=_RATIO,
            options=MappingProxyType({"select": _SELECT, "feedback": _FEEDBACK}),
        ),
        Entry(
            name="randomk",
            help="random elements, the same on all ranks, so that places need not be sent",
            positional=_RATIO,
            options=MappingProxyType({"feedback": _FEEDBACK}),
        ),
        Entry(
            name="powersgd",
            help="a low-rank approximation of each matrix, warm-started",
            positional=_RANK,
            options=MappingProxyType({"warmup": _WARMUP, "feedback": _FEEDBACK}),
        ),
        Entry(name="torch-powersgd", help="torch's PowerSGD hook, for ddp alone", positional=_RANK),
        Entry(
            name="int8",
            help="8 bits with a scale a block, stochastically rounded, in two stages",
            options=MappingProxyType({"block": _BLOCK, "feedback": _NO_FEEDBACK}),
        ),
        Entry(
            name="signsgd",
            help="one bit an element and a scale, in two stages",
            options=MappingProxyType({"feedback": _FEEDBACK}),
        ),
        Entry(
            name="dgc",
            help="deep gradient compression: top-k with momentum correction and masking",
            positional=_RATIO,
            options=MappingProxyType({"momentum": _MOMENTUM, "warmup": _WARMUP, "select": _SELECT}),
        ),
    ],
)

STANDS_ON: Mapping[str, str] = MappingProxyType(
    {"topk": "all-gather", "dgc": "all-gather", "int8": "all-to-all", "signsgd": "all-to-all"}
)
"""The collective that a compressor needs, where it is not an all-reduce."""

LOSSLESS_ENOUGH = ("none", "fp16", "bf16")
"""Compressors that hand on an overflow of fp16's scaled gradients, and keep nothing of it."""
