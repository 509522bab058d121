"""The bytes that a rank holds, by kind: parameters, units of shards, optimizer state, activations.

Each strategy's facts say which of them a training step holds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from results.cell import HALVES, Cell, Checkpointing
from results.groups import GroupLayout
from results.parts import VALUE_BYTES, ModelParts, Part
from strategies.optimizers import OPTIMIZERS

HALF_BYTES = 2
_GRADIENT_SHARE = 0.5
"""Gradients of activations that exist at once in a block's backward pass, over the activations that the block
saves: a GPT's MLP has 8 T d gradients while 16 T d are saved. An estimate for other models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The part of a model's depth that one rank has."""

    blocks: range
    stem: bool
    head: bool


class Sizes:
    """The sizes from which every strategy composes its moments."""

    def __init__(
        self,
        cell: Cell,
        parts: ModelParts,
        groups: GroupLayout,
        checkpointed: Callable[[int], bool],
        *,
        gathers_keys: bool = False,
        splits_tokens: bool = False,
    ) -> None:
        """`checkpointed` returns whether the strategy itself recomputes a block, given by its index;
        `gathers_keys`: attention keeps the keys and values of the ranks of a sequence; `splits_tokens`: each
        rank has a part of the tokens between split layers."""
        self.gathers_keys, self.splits_tokens = gathers_keys, splits_tokens
        self.cell, self.parts, self.groups = cell, parts, groups
        self._checkpointed = checkpointed
        self._optimizer = OPTIMIZERS.facts(cell.optimizer)
        self.accumulates = cell.accumulation > 1
        self.shared = VALUE_BYTES * parts.trained.shared_values
        """A shared parameter gets a gradient from both of its uses: two copies exist for a moment."""

    @property
    def parameters(self) -> int:
        """Bytes of the parameters of a rank that has every layer, or a part of each."""
        return VALUE_BYTES * self.parts.values_over(self.groups.tensor)

    @property
    def trained(self) -> int:
        """The bytes of `parameters` that are trained; gradients take as many."""
        return VALUE_BYTES * self.parts.trained.values_over(self.groups.tensor)

    @property
    def built(self) -> int:
        """Bytes of the complete model, which every device holds before it is split, and of the largest part
        that tensor parallelism copies from it: an upper bound, as each layer is freed once it is split."""
        tensor = self.groups.tensor
        split = (weight for part in self.parts.parts for weight in part.weights if weight.split)
        copied = max((weight.over(tensor).values for weight in split), default=0) if tensor > 1 else 0
        return VALUE_BYTES * (self.parts.values + copied)

    def split_by_layer(self, *, beside: int = 0) -> int:
        """Return the bytes when tensor parallelism has split a model without values, layer by layer: the
        parts of the split weights, and the larger of the largest complete weight and `beside` bytes."""
        split = [weight for part in self.parts.parts for weight in part.weights if weight.split]
        parts = sum(weight.over(self.groups.tensor).values for weight in split)
        largest = max((weight.values for weight in split), default=0)
        return VALUE_BYTES * parts + max(VALUE_BYTES * largest, beside)

    def state(self, parameters: int) -> int:
        """Bytes of the optimizer's state for these bytes of parameters."""
        return self._optimizer.state_values * parameters

    def update(self, parameters: int) -> int:
        """Bytes of the temporaries of an update of `parameters` bytes.

        On CPU torch's optimizers go from parameter to parameter; on CUDA they take all of them at once.
        """
        on_cpu = self.cell.device == "cpu"
        at_once = VALUE_BYTES * self.parts.trained.largest_weight if on_cpu else parameters
        return min(parameters, at_once) * self._optimizer.temporaries(self.cell)

    def checkpointing(self, block: int) -> Checkpointing:
        """Return how much of a block its backward pass computes again."""
        return self._checkpointed(block) or self.cell.activation_checkpointing

    def activations(self) -> Activations:
        """Return the activations of a rank that has all layers of the model."""
        return Activations(
            self,
            Stage(blocks=range(len(self.parts.blocks)), stem=True, head=True),
            samples=self.cell.micro_batch,
        )


class Units:
    """The units of a sharded model: its blocks, and one for the parameters around them."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        full: Callable[[Part], int],
        shard: Callable[[Part], int] | None = None,
        halved: bool,
        parts: ModelParts | None = None,
    ) -> None:
        """`full` returns the bytes of a unit in full precision, padded to equal shards, and `shard` the bytes
        of one shard (None: the same ranks have shards of all); `halved`: parameters are gathered in half
        precision. `parts` None: the parts of `sizes`."""
        parts = parts or sizes.parts
        around, blocks = full(parts.around), [full(block) for block in parts.blocks]
        self.full_around, self.full_block = around, max(blocks, default=0)
        """Bytes in full precision, in which gradients are averaged. `around`, `blocks` and `block` are bytes
        in the precision of gathered parameters."""
        self.around = around // 2 if halved else around
        self.blocks = [block // 2 if halved else block for block in blocks]
        self.block = max(self.blocks, default=0)
        self.whole = around + sum(blocks)
        """Bytes of all units in full precision."""
        self.shard = self.whole // sizes.groups.shard_ranks
        if shard is not None:
            self.shard = sum(map(shard, (parts.around, *parts.blocks)))
        trained = parts.trained
        self.trained = (
            self if trained is parts else Units(sizes, full=full, shard=shard, halved=halved, parts=trained)
        )
        """The units with only the trained parameters; gradients have these sizes."""


class Activations:
    """Bytes of activations of `flights` micro-batches of `samples` each."""

    def __init__(self, sizes: Sizes, stage: Stage, *, samples: int, flights: int = 1) -> None:
        self._samples, self._tensor = samples, sizes.groups.tensor
        self._context = sizes.groups.context
        self._of_tokens = self._tensor if sizes.splits_tokens else 1
        """Ranks over which the tokens between split layers are divided."""
        model = sizes.parts
        blocks = [model.blocks[index] for index in stage.blocks]
        modes = [sizes.checkpointing(index) for index in stage.blocks]
        others = self._context - 1 if sizes.gathers_keys else 0
        saved = self._block if sizes.splits_tokens else self._whole
        whole = [
            saved(block) + 2 * others * samples * block.input // self._context // self._tensor
            for block in blocks
        ]
        kept = [
            self._kept(block, mode) if mode else all_of_it
            for block, mode, all_of_it in zip(blocks, modes, whole, strict=True)
        ]
        stem = self._whole(model.stem) if stage.stem else 0
        head = self._whole(model.head) if stage.head else 0
        # The gradients of the logits, and of their logarithms, while the latter are still there.
        losing = head + 2 * model.logits * samples // self._context if stage.head else 0
        computing = max(
            (int(_GRADIENT_SHARE * w) + w - k for w, k in zip(whole, kept, strict=True)), default=0
        )
        casts = 0
        if sizes.cell.precision in HALVES:
            again = [
                block.values_over(self._tensor) for block, mode in zip(blocks, modes, strict=True) if mode
            ]
            # Each micro-batch in flight keeps its own, but of blocks that are computed again one at a time.
            kept_values = flights * (stage_values(model, stage, self._tensor) - sum(again))
            casts = HALF_BYTES * (kept_values + max(again, default=0))
        held = flights * (stem + sum(kept)) + (flights - 1) * head + casts
        self.at_loss, self.at_block = held + losing, held + computing
        """Bytes when the backward pass of the first micro-batch begins, and when it is in the last block."""
        self.begin = max(self.at_loss, self.at_block)
        first = whole[0] + int(_GRADIENT_SHARE * whole[0]) if whole else 0
        self.gradients = int(_GRADIENT_SHARE * sum(whole))
        """Bytes of the gradients of activations in all blocks: a divided backward pass keeps these until it
        computes the gradients of weights."""
        self.end = stem + first + casts
        """Bytes when the backward pass of the last micro-batch ends."""

    def _whole(self, part: Part) -> int:
        of_samples = self._samples * part.saved.over(self._tensor)
        return (of_samples + part.saved_once) // self._context

    def _block(self, block: Part) -> int:
        """Bytes that a block saves if tokens are split; the gathered inputs of split layers stay whole."""
        gathered = min(2 * block.input, block.saved.whole)
        divided = (block.saved.whole - gathered) // self._of_tokens
        split = block.saved.over(self._tensor) - block.saved.whole
        return (self._samples * (gathered + divided + split) + block.saved_once) // self._context

    def _kept(self, block: Part, mode: Checkpointing) -> int:
        """Bytes that a checkpointed block keeps until its backward pass begins."""
        products = block.products.over(self._tensor) if mode == "selective" else 0
        return self._samples * (block.input // self._of_tokens + products) // self._context


def stage_values(parts: ModelParts, stage: Stage, tensor: int = 1) -> int:
    """Count the parameters of a stage; the first and the last stage both have a shared parameter."""
    own = [parts.blocks[index] for index in stage.blocks]
    own += [parts.stem] * stage.stem + [parts.head] * stage.head
    shared = parts.shared_values if stage.head and not stage.stem else 0
    return sum(part.values_over(tensor) for part in own) + shared
