"""Memory of a rank in closed form, strategy by strategy: what its training step holds when it holds most.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5, have the three stages of ZeRO; here is counted what the
code of this package does, buffers included. With P the bytes of all parameters, k the optimizer's values a
parameter (AdamW 2, SGD with momentum 1), A the activations of a micro-batch and p ranks:

- single: P + k P, and the larger of A (backward begins) and P of gradients (backward ends);
- ddp, scratch-ddp: P of buckets beside; scratch-ddp and `bucket_view` have their gradients in them;
- local-sgd: 2 P beside: the parameters of the last average, and the buckets;
- zero1: as ddp, with the optimizer's state of the parameters that the fullest rank was dealt;
- fsdp, scratch-fsdp, hsdp: shards of 1/p, and what is gathered and averaged at the moment, block by block;
- tp: split layers over p, the rest whole;
- pipeline: the stages of the fullest rank, and activations of the microbatches that are in flight on it.

Autograd's part is exact for fp32 on a CPU (`results.parts`). Under autocast everything is counted as if in
fp32, and the copies of the weights that autocast makes are added: an upper estimate. What is not counted:
the process, the backend's buffers, temporaries of one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from results.cell import Cell, Checkpointing
from results.parts import VALUE_BYTES, ModelParts, Part
from strategies.catalog import OPTIMIZERS, STRATEGIES, group_layout, microbatches
from strategies.cut import Stage, in_flight, stages_of
from strategies.manual import read_choices

Moment = Literal["model built", "backward begins", "backward ends", "update"]

_HALF_BYTES = 2
_UNDER_WAY = 2
"""Units that scratch-fsdp averages at a time."""
_GRADIENT_SHARE = 0.5
"""Gradients of activations at once, in a block's backward pass, over what the block keeps: a GPT's MLP has
8 T d of them while 16 T d are kept. An estimate for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of the fullest rank at the moment at which it has most; `total` is their sum."""

    moment: Moment
    parameters: int
    gradients: int = 0
    optimizer: int = 0
    """Its state, and what an update computes in between."""
    gathered: int = 0
    """Whole parameters of units that are sharded."""
    buckets: int = 0
    """Copies that are exchanged, or received."""
    activations: int = 0

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer
        return state + self.gathered + self.buckets + self.activations


def footprint(cell: Cell, parts: ModelParts) -> Footprint:
    """The fullest moment of the fullest rank of a cell whose model has these parts."""
    rule = _RULES[STRATEGIES.parse(cell.strategy).name]
    return max(rule(_Sizes(cell, parts)), key=lambda moment: moment.total)


def updated_bytes(cell: Cell, parts: ModelParts) -> int:
    """Bytes of the parameters that the busiest rank updates."""
    sizes = _Sizes(cell, parts)
    match sizes.spec.name:
        case "zero1":
            return sizes.dealt
        case "fsdp" | "hsdp" | "manual" | "scratch-fsdp":
            return _Units(sizes, padded=sizes.spec.name != "scratch-fsdp").shard
        case "pipeline":
            own = stages_of(cell, parts)
            return VALUE_BYTES * max(sum(stage_values(parts, stage) for stage in stages) for stages in own)
    return sizes.parameters


class _Sizes:
    """What the moments of all strategies are made of."""

    def __init__(self, cell: Cell, parts: ModelParts) -> None:
        self.cell, self.parts = cell, parts
        self.spec = STRATEGIES.parse(cell.strategy)
        self.groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
        self.accumulates = cell.accumulation > 1
        self.shared = VALUE_BYTES * parts.shared_values
        """Gradients of a shared parameter come from both of its uses, and are there twice for a moment."""

    @property
    def parameters(self) -> int:
        """P of a rank that has every layer, or its part of it."""
        tensor = self.groups.tensor
        return VALUE_BYTES * sum(part.values_over(tensor) for part in self.parts.parts)

    @property
    def dealt(self) -> int:
        """Bytes of the parameters of the fullest rank, as zero1 deals them."""
        values = [weight.values for part in self.parts.parts for weight in part.weights]
        return VALUE_BYTES * max(deal(values, self.cell.gpus))

    def state(self, parameters: int) -> int:
        """Bytes of the optimizer's state for these bytes of parameters."""
        spec = OPTIMIZERS.parse(self.cell.optimizer)
        if spec.name == "adamw":
            return 2 * parameters
        return parameters if spec.number("momentum") else 0

    def update(self, parameters: int) -> int:
        """What an update of so many bytes computes in between.

        On CPU torch's optimizers go from parameter to parameter; on CUDA they take all of them at once.
        """
        spec = OPTIMIZERS.parse(self.cell.optimizer)
        at_once = VALUE_BYTES * self.parts.largest_weight if self.cell.device == "cpu" else parameters
        if spec.name == "adamw":
            return min(parameters, at_once) * (2 if self.cell.device == "cpu" else 1)
        return min(parameters, at_once) if spec.number("weight_decay") else 0

    def activations(self) -> _Activations:
        """Of a rank that has the whole depth of the model."""
        return _Activations(
            self,
            Stage(blocks=range(len(self.parts.blocks)), stem=True, head=True),
            samples=self.cell.micro_batch,
        )

    def steps(self, base: Footprint, *, in_buckets: bool = False) -> Iterator[Footprint]:
        """The moments of a rank that has whole parameters, `base` being what it has in all of them.

        `in_buckets`: gradients are views of the buckets, where they go when the last micro-batch is done.
        """
        kept, whole = self.activations(), base.parameters
        yield Footprint(moment="model built", parameters=whole, buckets=base.buckets)
        before = whole if self.accumulates else 0
        yield replace(base, moment="backward begins", gradients=before, activations=kept.begin)
        after = (before if in_buckets else whole) + self.shared
        yield replace(base, moment="backward ends", gradients=after, activations=kept.end)
        extra = self.update(whole)
        yield replace(
            base, moment="update", gradients=0 if in_buckets else whole, optimizer=base.optimizer + extra
        )


class _Activations:
    """Bytes of activations of `flights` micro-batches of `samples` each."""

    def __init__(self, sizes: _Sizes, stage: Stage, *, samples: int, flights: int = 1) -> None:
        self._samples, self._tensor = samples, sizes.groups.tensor
        model = sizes.parts
        blocks = [model.blocks[index] for index in stage.blocks]
        modes = [_checkpointing(sizes, index) for index in stage.blocks]
        kept = [self._kept(block, mode) for block, mode in zip(blocks, modes, strict=True)]
        whole = [self._whole(block) for block in blocks]
        stem = self._whole(model.stem) if stage.stem else 0
        head = self._whole(model.head) if stage.head else 0
        # The gradients of the logits, and of their logarithms, while the latter are still there.
        losing = head + 2 * model.logits * samples if stage.head else 0
        computing = max(
            (int(_GRADIENT_SHARE * w) + w - k for w, k in zip(whole, kept, strict=True)), default=0
        )
        casts = _HALF_BYTES * stage_values(model, stage, self._tensor) if _autocasts(sizes.cell) else 0
        held = flights * (stem + sum(kept)) + (flights - 1) * head + casts
        self.at_loss, self.at_block = held + losing, held + computing
        """When the backward pass of the first of them begins, and when it is in the last block."""
        self.begin = max(self.at_loss, self.at_block)
        first = whole[0] + int(_GRADIENT_SHARE * whole[0]) if whole else 0
        self.end = stem + first + casts
        """When that of the last one ends."""

    def _whole(self, part: Part) -> int:
        return self._samples * part.saved.over(self._tensor) + part.saved_once

    def _kept(self, block: Part, mode: Checkpointing) -> int:
        """Until its backward pass begins."""
        if not mode:
            return self._whole(block)
        products = block.products.over(self._tensor) if mode == "selective" else 0
        return self._samples * (block.input + products)


def _checkpointing(sizes: _Sizes, block: int) -> Checkpointing:
    if sizes.spec.name == "manual" and read_choices(str(sizes.spec.positional))[block].checkpoint:
        return True
    return sizes.cell.activation_checkpointing


def _autocasts(cell: Cell) -> bool:
    return cell.precision in ("bf16", "fp16")


def stage_values(parts: ModelParts, stage: Stage, tensor: int = 1) -> int:
    """Parameters of a stage; a shared one is in the first and in the last."""
    own = [parts.blocks[index] for index in stage.blocks]
    own += [parts.stem] * stage.stem + [parts.head] * stage.head
    shared = parts.shared_values if stage.head and not stage.stem else 0
    return sum(part.values_over(tensor) for part in own) + shared


def _single(sizes: _Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    return sizes.steps(Footprint(moment="update", parameters=whole, optimizer=sizes.state(whole)))


def _ddp(sizes: _Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    base = Footprint(moment="update", parameters=whole, optimizer=sizes.state(whole), buckets=whole)
    in_buckets = sizes.spec.name == "scratch-ddp" or sizes.spec.flag("bucket_view")
    return sizes.steps(base, in_buckets=in_buckets)


def _local_sgd(sizes: _Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    return sizes.steps(
        Footprint(moment="update", parameters=whole, optimizer=sizes.state(whole), buckets=2 * whole)
    )


def _zero1(sizes: _Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    return sizes.steps(
        Footprint(moment="update", parameters=whole, optimizer=sizes.state(sizes.dealt), buckets=whole)
    )


def deal(values: Sequence[int], ranks: int) -> list[int]:
    """Values of each rank as torch's ZeroRedundancyOptimizer deals them: the largest parameter first, each
    to the rank that has least."""
    dealt = [0] * ranks
    for count in sorted(values, reverse=True):
        dealt[dealt.index(min(dealt))] += count
    return dealt


def _fsdp(sizes: _Sizes) -> Iterator[Footprint]:
    """torch's FSDP2: a unit is gathered in one piece, which is then copied into its parameters; gradients are
    copied into one piece, which Gloo copies again to sum it. The piece of the last block is kept until the
    next forward pass."""
    units = _Units(sizes, padded=True)
    stays = units.around + sum(b for b, stay in zip(units.blocks, units.staying(), strict=True) if stay)
    ahead = 0 if all(units.staying()) else (1 + sizes.spec.integer("prefetch")) * units.block
    gathered = _Gathered(
        at_loss=stays + units.block, at_block=stays + units.block + ahead, at_end=units.around
    )
    yield from units.steps(gathered, averaged=2 * units.full_block, waiting=units.full_block)
    yield units.update(0)


def _scratch_fsdp(sizes: _Sizes) -> Iterator[Footprint]:
    """Ours: gathered in place, averaged from one vector, which on CPU is received in a second one."""
    units = _Units(sizes, padded=False)
    averaged = _UNDER_WAY * (2 if sizes.cell.device == "cpu" else 1) * units.full_block
    always = units.around + sum(units.blocks) if sizes.spec.integer("stage") < 3 else 0
    ahead = min(1 + sizes.spec.integer("prefetch"), len(units.blocks)) * units.block
    part = always or units.around + ahead
    gathered = _Gathered(at_loss=part, at_block=part, at_end=always or units.around)
    yield from units.steps(gathered, averaged=averaged, waiting=averaged)
    yield units.update(always)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """Bytes of whole parameters at three moments of the backward pass."""

    at_loss: int
    at_block: int
    at_end: int


class _Units:
    """The units of a sharded model: its blocks, and what is around them."""

    def __init__(self, sizes: _Sizes, *, padded: bool) -> None:
        self._sizes = sizes
        shards, tensor = sizes.groups.shard, sizes.groups.tensor
        half = sizes.spec.word("params") == "bf16"

        def full(part: Part) -> int:
            """Bytes of a unit in full precision, filled up to equal shards."""
            if padded:
                return VALUE_BYTES * part.padded_values(shards, tensor)
            return VALUE_BYTES * -(-part.values // shards) * shards

        parts = sizes.parts
        around, blocks = full(parts.around), [full(block) for block in parts.blocks]
        self.full_around, self.full_block = around, max(blocks, default=0)
        self.around = around // 2 if half else around
        self.blocks = [block // 2 if half else block for block in blocks]
        self.block = max(self.blocks, default=0)
        self.whole = around + sum(blocks)
        self.shard = self.whole // shards
        """Of parameters, and as much of gradients."""

    def staying(self) -> list[bool]:
        """Of each block, whether it stays whole until its backward pass."""
        spec = self._sizes.spec
        if spec.name == "manual":
            return [not choice.reshard for choice in read_choices(str(spec.positional))]
        return [not spec.flag("reshard")] * len(self.blocks)

    def steps(self, gathered: _Gathered, *, averaged: int, waiting: int) -> Iterator[Footprint]:
        """All but the update: `averaged` and `waiting` are the copies of gradients on their way while a
        block is averaged, and while what is around the blocks has its gradients computed."""
        sizes, kept, rest, held = self._sizes, self._sizes.activations(), self._at_rest(), self._held()
        yield Footprint(moment="model built", parameters=VALUE_BYTES * sizes.parts.values + self.shard)
        begins = replace(rest, moment="backward begins", gradients=held)
        yield replace(begins, gathered=gathered.at_loss, activations=kept.at_loss)
        yield replace(begins, gathered=gathered.at_block, activations=kept.at_block)
        ends = replace(rest, moment="backward ends", activations=kept.end)
        own = max(held, self.shard)
        still = max(gathered.at_end, min(gathered.at_block, self.around + self.block))
        yield replace(ends, gathered=still, gradients=own + self.full_block, buckets=averaged)
        last = own + self.full_around + sizes.shared
        yield replace(ends, gathered=gathered.at_end, gradients=last, buckets=waiting)

    def update(self, gathered: int) -> Footprint:
        """The update of the shards."""
        rest = self._at_rest()
        extra = self._sizes.update(rest.parameters)
        return replace(rest, gathered=gathered, gradients=rest.parameters, optimizer=rest.optimizer + extra)

    def _at_rest(self) -> Footprint:
        offloaded = self._sizes.spec.name != "manual" and self._sizes.spec.word("offload") == "cpu"
        shard = 0 if offloaded and self._sizes.cell.device == "cuda" else self.shard
        return Footprint(moment="update", parameters=shard, optimizer=self._sizes.state(shard))

    def _held(self) -> int:
        """Gradients of earlier micro-batches: whole, unless each is averaged by itself."""
        if not self._sizes.accumulates:
            return 0
        spec = self._sizes.spec
        return self.shard if spec.name == "scratch-fsdp" and spec.integer("stage") > 1 else self.whole


def _pipeline(sizes: _Sizes) -> Iterator[Footprint]:
    """The moments of the rank whose fullest one is fullest."""
    ranks = range(sizes.groups.pipeline)
    every = [list(_of_rank(sizes, rank)) for rank in ranks]
    return iter(max(every, key=lambda moments: max(moment.total for moment in moments)))


def _of_rank(sizes: _Sizes, rank: int) -> Iterator[Footprint]:
    parts, cell = sizes.parts, sizes.cell
    pieces, own = microbatches(cell.strategy), stages_of(cell, parts)[rank]
    whole = VALUE_BYTES * sum(stage_values(parts, stage) for stage in own)
    samples, flights = cell.micro_batch // pieces, in_flight(cell, rank)
    largest = max(
        (_Activations(sizes, stage, samples=samples, flights=-(-flights // len(own))) for stage in own),
        key=lambda kept: kept.begin,
    )
    # A stage keeps what it receives of each microbatch in buffers of its own: inputs, and gradients back.
    received = sum(
        samples * pieces * (not stage.stem) * parts.blocks[stage.blocks[0]].input
        + samples * pieces * (not stage.head) * parts.blocks[stage.blocks[-1]].input
        for stage in own
    )
    averaged = whole if sizes.groups.replicate > 1 else 0
    base = Footprint(
        moment="update", parameters=whole, optimizer=sizes.state(whole), buckets=received + averaged
    )
    yield Footprint(moment="model built", parameters=VALUE_BYTES * parts.values)
    begins = replace(base, moment="backward begins")
    begin = largest.begin * len(own) if len(own) > 1 else largest.begin
    before = whole if sizes.accumulates or pieces * len(own) > flights else 0
    yield replace(begins, gradients=before, activations=begin)
    # The second one begins with gradients, and without the activations of the first.
    yield replace(begins, gradients=whole, activations=begin - begin // flights)
    both_ends = any(stage.stem for stage in own) and any(stage.head for stage in own)
    yield replace(
        base,
        moment="backward ends",
        gradients=whole + sizes.shared * both_ends,
        activations=largest.end,
    )
    yield replace(base, moment="update", gradients=whole, optimizer=base.optimizer + sizes.update(whole))


_RULES: dict[str, Callable[[_Sizes], Iterator[Footprint]]] = {
    "single": _single,
    "ddp": _ddp,
    "scratch-ddp": _ddp,
    "local-sgd": _local_sgd,
    "zero1": _zero1,
    "fsdp": _fsdp,
    "hsdp": _fsdp,
    "manual": _fsdp,
    "scratch-fsdp": _scratch_fsdp,
    "tp": _single,
    "pipeline": _pipeline,
}
