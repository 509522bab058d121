"""The layout of a model, for strategies that do not import its workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class LinearSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer that tensor parallelism splits (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

    name: str
    """The name of the module."""
    by: Literal["outputs", "inputs"]
    """Which features are split over the ranks: `outputs` gives split results, `inputs` takes split inputs."""
    parts: int = 1
    """The number of matrices stacked in the weight (query, key and value: 3), which are split separately."""


def splits_of(blocks: Sequence[str], splits: Sequence[LinearSplit]) -> tuple[LinearSplit, ...]:
    """The splits of one block, named as inside of it, for every block."""
    return tuple(
        msgspec.structs.replace(split, name=f"{block}.{split.name}") for block in blocks for split in splits
    )


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model, by the names of its modules.

    A model that can be cut into a pipeline's stages has two methods, and is
    `head(block_n(... block_1(stem(inputs))))`: `stem` and `head` here name the modules that each uses.
    """

    blocks: tuple[str, ...] = ()
    """The repeated blocks in the order of the forward pass: the unit of checkpointing, shards and stages."""
    stem: tuple[str, ...] = ()
    """Modules before the blocks."""
    head: tuple[str, ...] = ()
    """Modules after the blocks; one that is also in the stem is shared."""
    sample: tuple[int, ...] = ()
    """Shape of one sample's inputs, with which the cost of the blocks is counted."""
    sample_type: Literal["float32", "int64"] = "float32"
    splits: tuple[LinearSplit, ...] = ()
    """Layers that tensor parallelism splits; every rank has all of the others."""
    heads: tuple[str, ...] = ()
    """Attributes of modules (`h.0.attn.heads`) that count heads, and are divided when these are split."""
    experts: tuple[str, ...] = ()
    """Modules that hold all experts of a layer. Their parameters are the experts' matrices one after another
    along the first dimension, `count` is the number of experts E, and `deal(first, count)` is called when a
    rank keeps only `count` experts from `first` on. They are called with rows (tokens, width) of expert 0, of
    expert 1 and so on and with the number of rows of each, (E,) int64, and return as many rows."""

    chained: bool = False
    """Whether stem and head call these modules one after another; if not, the model has a method for each."""

    @property
    def can_be_cut(self) -> bool:
        """Whether the model has a stem and a head, and the shape of their inputs is known."""
        return bool(self.blocks and self.stem and self.head and self.sample)
