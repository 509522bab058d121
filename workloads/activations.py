"""Common parts of closed forms of activations: the bytes that autograd saves for a model's parts.

Counted for the modules of this package in fp32 on a CPU, each storage once, without parameters and buffers: a
linear layer or a convolution saves its input, LayerNorm its input with mean and 1 / deviation of each token,
GELU and SiLU their input, ReLU its result, attention query, key, value, its result and the logarithm of each
row's sum (Dao et al. 2022, arXiv:2205.14135, section 3.1), cross-entropy the logarithms of the probabilities
and the targets. Compare Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, which has the same list for
half precision, dropout and no fused attention.

In the shapes T is the tokens of a sample, d the width, h the heads, V the rows of the vocabulary.
"""

from __future__ import annotations

from typing import Literal

from results.parts import VALUE_BYTES, Part, Saved, Weight
from workloads.shape import TextShape

INDEX_BYTES = 8
"""Bytes of a token, a class, or a place in a max-pooling window: int64."""
SCALAR = VALUE_BYTES
"""Bytes of the sum of weights that cross-entropy divides by."""


def saved(*, whole: int = 0, split: int = 0) -> Saved:
    """Return the bytes that these numbers of values take."""
    return Saved(whole=VALUE_BYTES * whole, split=VALUE_BYTES * split)


def linear(inputs: int, outputs: int, *, by: Literal["outputs", "inputs"]) -> tuple[Weight, Weight]:
    """Return matrix and bias of a linear layer; a layer that is split by inputs has an unsplit bias."""
    if by == "inputs":
        return Weight(rows=outputs, columns=inputs, split="columns"), Weight(rows=outputs)
    return Weight(rows=outputs, columns=inputs, split="rows"), Weight(rows=outputs, split="rows")


def joined(first: Part, second: Part) -> Part:
    """Return both parts as one, which takes the input of the first."""
    return Part(
        weights=first.weights + second.weights,
        saved=_sum(first.saved, second.saved),
        products=_sum(first.products, second.products),
        saved_once=first.saved_once + second.saved_once,
        input=first.input,
        dispatched=first.dispatched + second.dispatched,
        flops=first.flops + second.flops,
    )


def _sum(first: Saved, second: Saved) -> Saved:
    return Saved(whole=first.whole + second.whole, split=first.split + second.split)


def text_head(weights: tuple[Weight, ...], shape: TextShape, *, kept: int) -> Part:
    """Return the part with the last norm, which saves `kept` values, the vocabulary product and
    cross-entropy."""
    t, logits = shape.seq, shape.seq * shape.rows
    return Part(
        weights=weights,
        saved=Saved(whole=VALUE_BYTES * (kept + logits) + INDEX_BYTES * t),
        saved_once=SCALAR,
        input=VALUE_BYTES * t * shape.width,
        flops=2 * logits * shape.width,
    )
