"""The measures of a model, and what follows from them by arithmetic: parameters and forward FLOPs.

One shape is the source both of the module that is built and of the closed forms that it is checked
against. FLOPs are those of one sample's forward pass, 1 multiply-add = 2 FLOP, and count convolutions,
matrix products and the two products of attention (in full: the causal half is not taken off). Biases,
normalisation, activations, pooling, softmax, embedding look-ups and the loss are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Convolution(NamedTuple):
    """A square convolution without bias, followed by BatchNorm."""

    kernel: int
    inputs: int
    outputs: int
    px: int
    """Side of its output."""

    @property
    def parameters(self) -> int:
        """Kernel, and BatchNorm's scale and shift."""
        return self.kernel**2 * self.inputs * self.outputs + 2 * self.outputs

    @property
    def flops(self) -> int:
        return 2 * self.kernel**2 * self.inputs * self.outputs * self.px**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetShape:
    """A residual network: He et al. 2015, arXiv:1512.03385, table 1, with version 1.5's strides."""

    blocks: tuple[int, int, int, int]
    """Residual blocks of the four stages."""
    bottleneck: bool
    px: int = 224
    classes: int = 1000

    @property
    def expansion(self) -> int:
        """Channels that leave a block, in multiples of its width."""
        return 4 if self.bottleneck else 1

    @property
    def features(self) -> int:
        """Channels that the classifier sees."""
        return 512 * self.expansion

    @property
    def parameters(self) -> int:
        return sum(c.parameters for c in self.convolutions()) + (self.features + 1) * self.classes

    @property
    def forward_flops(self) -> int:
        return sum(c.flops for c in self.convolutions()) + 2 * self.features * self.classes

    @property
    def minimum_batch(self) -> int:
        """BatchNorm in training needs two values a channel: two samples where one position is left."""
        *_, last = self.convolutions()
        return 2 if last.px == 1 else 1

    def convolutions(self) -> Iterator[Convolution]:
        """Every convolution in the order of the forward pass."""
        px = _halved(self.px)
        yield Convolution(7, 3, 64, px)
        px, channels = _halved(px), 64
        for stage, count in enumerate(self.blocks):
            width = 64 << stage
            for block in range(count):
                px_in, px = px, _halved(px) if stage > 0 and block == 0 else px
                yield from self._block(channels, width, px_in, px)
                channels = width * self.expansion

    def _block(self, channels: int, width: int, px_in: int, px: int) -> Iterator[Convolution]:
        outputs = width * self.expansion
        if self.bottleneck:
            yield Convolution(1, channels, width, px_in)
            yield Convolution(3, width, width, px)
            yield Convolution(1, width, outputs, px)
        else:
            yield Convolution(3, channels, width, px)
            yield Convolution(3, width, outputs, px)
        if channels != outputs:
            yield Convolution(1, channels, outputs, px)


def _halved(px: int) -> int:
    """Side after a stride of 2 with padding (kernel - 1) / 2, which is what all of a ResNet's have."""
    return (px + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """A GPT-2: Radford et al. 2019, table 2."""

    layers: int
    width: int
    heads: int
    context: int
    """Positions that have an embedding."""
    vocabulary: int
    seq: int
    """Tokens of one sample, at most `context`."""

    @property
    def parameters(self) -> int:
        """V d + C d + L (12 d^2 + 13 d) + 2 d: the head is the token embedding and adds nothing.

        A block is qkv 3 d^2 + 3 d, projection d^2 + d, MLP 8 d^2 + 5 d and two norms of 2 d.
        """
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocabulary + self.context) * self.width
        return embeddings + self.layers * block + 2 * self.width

    @property
    def forward_flops(self) -> int:
        """L (24 T d^2 + 4 T^2 d) + 2 T d V: matrix products, attention's two products, the head."""
        block = 24 * self.seq * self.width**2 + 4 * self.seq**2 * self.width
        return self.layers * block + 2 * self.seq * self.width * self.vocabulary

    @property
    def minimum_batch(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """A Llama: Touvron et al. 2023, arXiv:2302.13971; grouped queries as in arXiv:2307.09288."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values, each shared by `heads / kv_heads` heads of queries."""
    hidden: int
    """Width between the matrices of the gated MLP."""
    context: int
    """Tokens that it was made for."""
    vocabulary: int
    seq: int
    """Tokens of one sample, at most `context`."""
    tied: bool
    """Whether the head is the token embedding."""
    theta: float = 10_000.0
    """Base of the rotary positions' wavelengths."""

    @property
    def kv_width(self) -> int:
        """Width of keys and values."""
        return self.width // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        """V d (twice if the head is its own) + L (2 d^2 + 2 d k + 3 d h + 2 d) + d; there are no biases.

        A block is query and output 2 d^2, key and value 2 d k, MLP 3 d h and two norms of d.
        """
        d, k = self.width, self.kv_width
        block = 2 * d**2 + 2 * d * k + 3 * d * self.hidden + 2 * d
        return (1 if self.tied else 2) * self.vocabulary * d + self.layers * block + d

    @property
    def forward_flops(self) -> int:
        """L (2 T (2 d^2 + 2 d k + 3 d h) + 4 T^2 d) + 2 T d V: matrix products, attention, the head."""
        d, k = self.width, self.kv_width
        products = 2 * d**2 + 2 * d * k + 3 * d * self.hidden
        block = 2 * self.seq * products + 4 * self.seq**2 * d
        return self.layers * block + 2 * self.seq * d * self.vocabulary

    @property
    def minimum_batch(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Fully connected layers with ReLU and dropout between them."""

    widths: tuple[int, ...]
    """Inputs, hidden widths, classes."""
    dropout: float

    @property
    def parameters(self) -> int:
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.widths))

    @property
    def forward_flops(self) -> int:
        return sum(2 * inputs * outputs for inputs, outputs in pairwise(self.widths))

    @property
    def minimum_batch(self) -> int:
        return 1


TextShape = GPTShape | LlamaShape
"""Models over tokens."""
Shape = ResNetShape | TextShape | MLPShape
