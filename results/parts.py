"""A model in parts, for planning without building it: parameters, and the activations that autograd keeps.

A fact that is not stated is `Unknown` with its reason: never 0, empty or a guess."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, slots=True)
class Unknown:
    """Replaces a value that is unknown. Its `str` continues a sentence that begins with the value's name."""

    reason: str
    """A clause that follows "because"."""

    def __str__(self) -> str:
        return f"unknown, because {self.reason}"


VALUE_BYTES = 4
"""Bytes of a parameter, a gradient and an activation in full precision."""
ALIGNED_BYTES = 16
"""Parameters in a flat vector begin at multiples of this. At other addresses a library may choose another
kernel, which rounds differently (such as oneDNN's 1x1 convolution)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter, as `rows` of its first dimension: the one that torch's FSDP2 shards."""

    rows: int
    columns: int = 1
    """Values of a row."""
    split: Literal["rows", "columns"] | None = None
    """The dimension that tensor parallelism splits; None: every rank has all of it."""
    experts: int = 0
    """The number of experts whose matrices these rows are, one after another; 0: it is not of experts."""
    trained: bool = True
    """Whether it gets gradients, and so optimizer state; False: it is frozen."""

    @property
    def values(self) -> int:
        return self.rows * self.columns

    def over(self, tensor: int) -> Weight:
        """The part of one of `tensor` ranks."""
        if self.split == "rows":
            return Weight(rows=self.rows // tensor, columns=self.columns)
        return Weight(rows=self.rows, columns=self.columns // (tensor if self.split else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes of one sample: in layers that are not split, and in those that tensor parallelism splits."""

    whole: int = 0
    split: int = 0

    def over(self, tensor: int) -> int:
        """Bytes of one of `tensor` ranks."""
        return self.whole + -(-self.split // tensor)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One block, or the layers before or after the blocks.

    All byte counts assume fp32; bytes of activations are for one sample.
    """

    weights: tuple[Weight, ...]
    """Weights in the order of registration; a shared one is at its first registration."""
    saved: Saved
    """Storages that autograd keeps from the part's forward pass, each counted once, with the part's input."""
    products: Saved = Saved()
    """Results of matrix products and attention, which selective checkpointing keeps with the input."""
    saved_once: int = 0
    """Bytes kept once for any batch: statistics of BatchNorm, angles of rotary positions."""
    input: int = 0
    """Bytes that the part takes from the one before it."""
    dispatched: int = 0
    """Bytes of one sample's tokens for experts, each token as often as experts compute it."""
    flops: int = 0
    """FLOPs of one sample's forward pass, as `workloads.shape` counts them; if they are `uncounted`, 1 for
    each block, or for the head of a model without blocks."""

    @cached_property
    def values(self) -> int:
        """Parameters."""
        return sum(weight.values for weight in self.weights)

    @cached_property
    def split_sums(self) -> tuple[int, int]:
        """The number of layers whose results tensor parallelism sums, and how many of these are before the
        part's last matrix."""
        matrices = [weight.split for weight in self.weights if weight.columns > 1]
        return matrices.count("columns"), matrices[:-1].count("columns")

    @cached_property
    def experts(self) -> int:
        """The number of experts of a layer in this part; 0: the part has no such layer."""
        return max((weight.experts for weight in self.weights), default=0)

    @cached_property
    def divided(self) -> tuple[Part, Part]:
        """The part with only the weights that are not of experts, and with only those that are, which the
        ranks of expert parallelism split by rows."""
        others = tuple(weight for weight in self.weights if not weight.experts)
        own = tuple(replace(weight, split="rows") for weight in self.weights if weight.experts)
        return replace(self, weights=others), replace(self, weights=own)

    @cached_property
    def trained(self) -> Part:
        """The part with only its trained weights."""
        return replace(self, weights=tuple(weight for weight in self.weights if weight.trained))

    @cached_property
    def _kinds(self) -> tuple[tuple[Weight, int], ...]:
        """Each weight and how often it occurs, cached because a plan needs it for every cell."""
        return tuple(Counter(self.weights).items())

    def values_over(self, tensor: int) -> int:
        """Parameters of one of `tensor` ranks that split it."""
        return sum(weight.over(tensor).values for weight in self.weights)

    def padded_values(self, shards: int, tensor: int = 1) -> int:
        """Parameters of one of `tensor` ranks, with the first dimension of each padded to a multiple of
        `shards`."""
        own = self._kinds if tensor == 1 else [(weight.over(tensor), many) for weight, many in self._kinds]
        return sum(-(-weight.rows // shards) * shards * weight.columns * many for weight, many in own)

    def flat_values(self, shards: int, value_bytes: int = VALUE_BYTES) -> int:
        """Elements of one flat vector of all its parameters, of `value_bytes` each, padded to equal
        shards."""
        step, end = ALIGNED_BYTES // value_bytes, 0
        for weight in self.weights:
            end = -(-end // step) * step + weight.values
        return -(-end // shards) * shards


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model as `head(block_n(... block_1(stem(inputs))))`; without blocks all of it is the head."""

    stem: Part
    blocks: tuple[Part, ...]
    head: Part
    shared_values: int = 0
    """Parameters of the stem that the head uses too: a tied embedding."""
    logits: int = 0
    """Bytes of one sample's results, fp32."""
    chained: bool = True
    """Whether a pipeline can be cut between its blocks."""
    by_unit: bool = False
    """Whether it can be built on the meta device and given its initial values unit by unit: its builder then
    initializes parameters only in ways that `workloads.build` supports."""
    uncounted: str | None = None
    """Why the FLOPs are unknown; None: they are known."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.stem, *self.blocks, self.head)

    @cached_property
    def trained(self) -> ModelParts:
        """The model with only its trained weights; it is the same object if all are trained."""
        if all(weight.trained for part in self.parts for weight in part.weights):
            return self
        return replace(
            self,
            stem=self.stem.trained,
            blocks=tuple(block.trained for block in self.blocks),
            head=self.head.trained,
            # This is an upper bound: the facts do not say which weights of the stem are shared.
            shared_values=min(self.shared_values, self.stem.trained.values),
        )

    @cached_property
    def values(self) -> int:
        """Parameters, shared ones once."""
        return sum(part.values for part in self.parts)

    def values_over(self, tensor: int) -> int:
        """Parameters of one of `tensor` ranks that split the model."""
        # A plan needs this for a rank of every cell, and most cells do not split the model.
        return self.values if tensor == 1 else sum(part.values_over(tensor) for part in self.parts)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one sample's forward pass."""
        return sum(part.flops for part in self.parts)

    @cached_property
    def around(self) -> Part:
        """Stem and head as one part, which FSDP2 shards in addition to the blocks."""
        return Part(weights=self.stem.weights + self.head.weights, saved=Saved())

    @cached_property
    def experts(self) -> frozenset[int]:
        """The numbers of experts of the layers that have experts."""
        return frozenset(block.experts for block in self.blocks) - {0}

    @cached_property
    def weight_values(self) -> tuple[int, ...]:
        """Values of each parameter, the largest first."""
        return tuple(sorted((w.values for part in self.parts for w in part.weights), reverse=True))

    @property
    def largest_weight(self) -> int:
        """Values of the largest parameter; 0 for a model that has no parameters."""
        return max(self.weight_values, default=0)
