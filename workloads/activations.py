"""Parts of a model in closed form: its parameters by shape, and the bytes that autograd keeps of them.

Counted from the modules of this package for fp32 on a CPU, each storage once, parameters and buffers not: a
linear layer or a convolution keeps its input, LayerNorm its input with mean and 1 / deviation of each token,
GELU and SiLU their input, ReLU its result, attention query, key, value, its result and the logarithm of each
row's sum (Dao et al. 2022, arXiv:2205.14135, section 3.1), cross-entropy the logarithms of the probabilities
and the targets. Compare Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, which has the same list for
half precision, dropout and no fused attention.

T is the tokens of a sample, d the width, h the heads, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Literal

from results.parts import VALUE_BYTES, ModelParts, Part, Saved, Weight
from results.spec import Spec
from workloads.catalog import shape_of
from workloads.shapes import Convolution, GPTShape, LlamaShape, MLPShape, ResNetShape, Shape, TextShape

_INDEX_BYTES = 8
"""Of a token, a class, a place in a max-pooling window: int64."""
_SCALAR = VALUE_BYTES
"""The sum of weights that cross-entropy divides by."""


def model_parts(workload: Spec) -> ModelParts | None:
    """The parts of a parsed workload; None for a `py:` one, which its own code alone knows."""
    shape = shape_of(workload)
    return None if shape is None else parts_of(shape)


@cache
def parts_of(shape: Shape) -> ModelParts:
    """The parts of a model of these measures."""
    if isinstance(shape, GPTShape):
        return _gpt(shape)
    if isinstance(shape, LlamaShape):
        return _llama(shape)
    return _resnet(shape) if isinstance(shape, ResNetShape) else _mlp(shape)


def _saved(*, whole: int = 0, split: int = 0) -> Saved:
    """From values to bytes."""
    return Saved(whole=VALUE_BYTES * whole, split=VALUE_BYTES * split)


def _gpt(shape: GPTShape) -> ModelParts:
    """A block keeps 16 T d + T (h + 4) values, of which 12 T d + T h are split by tensor parallelism."""
    t, d, vocabulary = shape.seq, shape.width, shape.vocabulary
    norm = (Weight(rows=d), Weight(rows=d))
    block = Part(
        weights=(
            *norm,
            *_linear(d, 3 * d, by="outputs"),
            *_linear(d, d, by="inputs"),
            *norm,
            *_linear(d, 4 * d, by="outputs"),
            *_linear(4 * d, d, by="inputs"),
        ),
        # Whole: the inputs of both norms and what they give. Split: query, key, value, what attention mixes
        # of them, and what goes into GELU and comes out.
        saved=_saved(whole=4 * t * d + 4 * t, split=12 * t * d + t * shape.heads),
        products=_saved(whole=2 * t * d, split=8 * t * d + t * shape.heads),
        input=VALUE_BYTES * t * d,
        flops=24 * t * d**2 + 4 * t**2 * d,
    )
    return ModelParts(
        stem=Part(
            weights=(Weight(rows=vocabulary, columns=d), Weight(rows=shape.context, columns=d)),
            saved=Saved(whole=_INDEX_BYTES * t),
            saved_once=_INDEX_BYTES * t,
            input=_INDEX_BYTES * t,
        ),
        blocks=(block,) * shape.layers,
        head=_text_head(norm, shape, kept=2 * t * d + 2 * t),
        shared_values=vocabulary * d,
        logits=VALUE_BYTES * t * vocabulary,
    )


def _llama(shape: LlamaShape) -> ModelParts:
    """A block keeps 11 T d + 4 T hidden + T (h + 2) values, and 2 T d / h whatever the batch.

    RMSNorm in single steps keeps its input, the input over its size, and 1 / size. Keys and values are kept
    as they go into attention, repeated to the number of queries. What attention mixes is kept twice: its
    queries lie head by head, and so does its result, which is then copied token by token.
    """
    t, d, k, hidden, vocabulary = shape.seq, shape.width, shape.kv_width, shape.hidden, shape.vocabulary
    embedding, norm = Weight(rows=vocabulary, columns=d), Weight(rows=d)
    block = Part(
        weights=(
            norm,
            *(Weight(rows=rows, columns=d, split="rows") for rows in (d, k, k)),
            Weight(rows=d, columns=d, split="columns"),
            norm,
            *(Weight(rows=hidden, columns=d, split="rows") for _ in range(2)),
            Weight(rows=d, columns=hidden, split="columns"),
        ),
        saved=_saved(whole=6 * t * d + 2 * t, split=5 * t * d + 4 * t * hidden + t * shape.heads),
        products=_saved(whole=2 * t * d, split=2 * t * d + 2 * t * k + 2 * t * hidden + t * shape.heads),
        # Cosine and sine of half a head's angles, for queries and for keys.
        saved_once=VALUE_BYTES * 4 * t * (d // shape.heads // 2),
        input=VALUE_BYTES * t * d,
        flops=2 * t * (2 * d**2 + 2 * d * k + 3 * d * hidden) + 4 * t**2 * d,
    )
    own_head = () if shape.tied else (embedding,)
    return ModelParts(
        stem=Part(weights=(embedding,), saved=Saved(whole=_INDEX_BYTES * t), input=_INDEX_BYTES * t),
        blocks=(block,) * shape.layers,
        head=_text_head((norm, *own_head), shape, kept=3 * t * d + t),
        shared_values=vocabulary * d if shape.tied else 0,
        logits=VALUE_BYTES * t * vocabulary,
    )


def _text_head(weights: tuple[Weight, ...], shape: TextShape, *, kept: int) -> Part:
    """The last norm, which keeps so many values, the product with the vocabulary, and cross-entropy."""
    t, logits = shape.seq, shape.seq * shape.vocabulary
    return Part(
        weights=weights,
        saved=Saved(whole=VALUE_BYTES * (kept + logits) + _INDEX_BYTES * t),
        saved_once=_SCALAR,
        input=VALUE_BYTES * t * shape.width,
        flops=2 * logits * shape.width,
    )


def _linear(inputs: int, outputs: int, *, by: Literal["outputs", "inputs"]) -> tuple[Weight, Weight]:
    """Matrix and bias; the bias of a layer that is split by inputs is added once, and so is whole."""
    if by == "inputs":
        return Weight(rows=outputs, columns=inputs, split="columns"), Weight(rows=outputs)
    return Weight(rows=outputs, columns=inputs, split="rows"), Weight(rows=outputs, split="rows")


def _resnet(shape: ResNetShape) -> ModelParts:
    """Each convolution keeps its input, BatchNorm its own with two statistics a channel, ReLU its result.

    What ReLU gives is what the next convolution takes, and is counted there.
    """
    first, *rest = shape.convolutions()
    pooled = ((first.px + 1) // 2) ** 2 * first.outputs
    image, shown = 3 * shape.px**2, first.outputs * first.px**2
    stem = Part(
        weights=_convolved(first),
        # The image, what BatchNorm takes, what ReLU gives, and the place of each maximum.
        saved=Saved(whole=VALUE_BYTES * (image + 2 * shown) + _INDEX_BYTES * pooled),
        saved_once=_statistics(first),
        input=VALUE_BYTES * image,
        flops=first.flops,
    )
    blocks, taken = [], pooled
    for convolutions in _grouped(shape, rest):
        blocks.append(_residual(convolutions, taken, shape.bottleneck))
        taken = _given(convolutions[2 if shape.bottleneck else 1])
    head = Part(
        weights=(Weight(rows=shape.classes, columns=shape.features), Weight(rows=shape.classes)),
        saved=Saved(whole=VALUE_BYTES * (taken + shape.features + shape.classes) + _INDEX_BYTES),
        saved_once=_SCALAR,
        input=VALUE_BYTES * taken,
        flops=2 * shape.features * shape.classes,
    )
    return ModelParts(stem=stem, blocks=tuple(blocks), head=head, logits=VALUE_BYTES * shape.classes)


def _grouped(shape: ResNetShape, convolutions: Sequence[Convolution]) -> Iterator[Sequence[Convolution]]:
    """The convolutions of each block: its own, and in some a last one beside them."""
    own = 3 if shape.bottleneck else 2
    channels, at = 64, 0
    for stage, count in enumerate(shape.blocks):
        outputs = (64 << stage) * shape.expansion
        for _ in range(count):
            size = own + (channels != outputs)
            yield convolutions[at : at + size]
            channels, at = outputs, at + size


def _residual(convolutions: Sequence[Convolution], taken: int, bottleneck: bool) -> Part:
    own = convolutions[: 3 if bottleneck else 2]
    results = sum(_given(convolution) for convolution in convolutions)
    between = sum(_given(convolution) for convolution in own[:-1])
    return Part(
        weights=tuple(weight for convolution in convolutions for weight in _convolved(convolution)),
        saved=_saved(whole=taken + results + between),
        products=_saved(whole=results),
        saved_once=sum(_statistics(convolution) for convolution in convolutions),
        input=VALUE_BYTES * taken,
        flops=sum(convolution.flops for convolution in convolutions),
    )


def _given(convolution: Convolution) -> int:
    """Values of one sample that it gives."""
    return convolution.outputs * convolution.px**2


def _convolved(convolution: Convolution) -> tuple[Weight, ...]:
    """Kernel, and BatchNorm's scale and shift."""
    kernel = Weight(rows=convolution.outputs, columns=convolution.inputs * convolution.kernel**2)
    return kernel, Weight(rows=convolution.outputs), Weight(rows=convolution.outputs)


def _statistics(convolution: Convolution) -> int:
    """Bytes of mean and 1 / deviation of each channel."""
    return VALUE_BYTES * 2 * convolution.outputs


def _mlp(shape: MLPShape) -> ModelParts:
    """A hidden layer keeps what ReLU gives, dropout's mask, and what the next layer takes."""
    inputs, *hidden, classes = shape.widths
    layers = (
        (Weight(rows=outputs, columns=taken), Weight(rows=outputs))
        for taken, outputs in pairwise(shape.widths)
    )
    kept = inputs + 3 * sum(hidden) + classes
    head = Part(
        weights=tuple(weight for layer in layers for weight in layer),
        saved=Saved(whole=VALUE_BYTES * kept + _INDEX_BYTES),
        saved_once=_SCALAR,
        input=VALUE_BYTES * inputs,
        flops=shape.forward_flops,
    )
    empty = Part(weights=(), saved=Saved())
    return ModelParts(stem=empty, blocks=(), head=head, logits=VALUE_BYTES * classes)
