"""Memory of a rank in closed form, strategy by strategy: what its training step holds when it holds most.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5, have the three stages of ZeRO; here is counted what the
code of this package does, buffers included. With P the bytes of all parameters, k the optimizer's values a
parameter (AdamW 2, SGD with momentum 1), A the activations of a micro-batch and p ranks:

- single: P + k P, and the larger of A (backward begins) and P of gradients (backward ends);
- ddp, scratch-ddp: P of buckets beside; scratch-ddp and `bucket_view` have their gradients in them;
- local-sgd: 2 P beside: the parameters of the last average, and the buckets;
- zero1: as ddp, with the optimizer's state of the parameters that the fullest rank was dealt;
- fsdp, scratch-fsdp, hsdp: shards of 1/p, and what is gathered and averaged at the moment, block by block;
- tp: split layers over p, the rest whole; while it is split, P and a part of the largest split weight;
- pipeline: the stages of the fullest rank, and activations of the microbatches that are in flight on it.

Autograd's part is exact for fp32 on a CPU (`results.parts`). Under autocast everything is counted as if in
fp32, and the copies of the weights that autocast makes are added: an upper estimate. What is not counted:
the process, the backend's buffers, temporaries of one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from results.cell import Cell
from results.parts import VALUE_BYTES, ModelParts
from strategies.catalog import STRATEGIES, microbatches
from strategies.closed_form.sizes import Activations, Sizes, Units, stage_values
from strategies.pipeline.cut import Stage, in_flight, stages_of

Moment = Literal["model built", "backward begins", "backward ends", "update"]

_UNDER_WAY = 2
"""Units that scratch-fsdp averages at a time."""


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
    return max(rule(Sizes(cell, parts)), key=lambda moment: moment.total)


def updated_bytes(cell: Cell, parts: ModelParts) -> int:
    """Bytes of the parameters that the busiest rank updates."""
    sizes = Sizes(cell, parts)
    match sizes.spec.name:
        case "zero1":
            return _dealt(cell, parts)
        case "fsdp" | "hsdp" | "manual" | "scratch-fsdp":
            return Units(sizes).shard
        case "pipeline":
            own = stages_of(cell, parts)
            return VALUE_BYTES * max(sum(stage_values(parts, stage) for stage in stages) for stages in own)
    return sizes.parameters


def _steps(sizes: Sizes, base: Footprint, *, in_buckets: bool = False) -> Iterator[Footprint]:
    """The moments of a rank that has every layer, or its part of it; it has `base` in all of them.

    `in_buckets`: gradients are views of the buckets, where they go when the last micro-batch is done.
    """
    kept, whole = sizes.activations(), base.parameters
    yield Footprint(moment="model built", parameters=sizes.built, buckets=base.buckets)
    before = whole if sizes.accumulates else 0
    yield replace(base, moment="backward begins", gradients=before, activations=kept.begin)
    after = (before if in_buckets else whole) + sizes.shared
    yield replace(base, moment="backward ends", gradients=after, activations=kept.end)
    extra = sizes.update(whole)
    yield replace(
        base, moment="update", gradients=0 if in_buckets else whole, optimizer=base.optimizer + extra
    )


def _single(sizes: Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    return _steps(sizes, Footprint(moment="update", parameters=whole, optimizer=sizes.state(whole)))


def _ddp(sizes: Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    base = Footprint(moment="update", parameters=whole, optimizer=sizes.state(whole), buckets=whole)
    in_buckets = sizes.spec.name == "scratch-ddp" or sizes.spec.flag("bucket_view")
    return _steps(sizes, base, in_buckets=in_buckets)


def _local_sgd(sizes: Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    base = Footprint(moment="update", parameters=whole, optimizer=sizes.state(whole), buckets=2 * whole)
    return _steps(sizes, base)


def _zero1(sizes: Sizes) -> Iterator[Footprint]:
    whole = sizes.parameters
    state = sizes.state(_dealt(sizes.cell, sizes.parts))
    return _steps(sizes, Footprint(moment="update", parameters=whole, optimizer=state, buckets=whole))


def _dealt(cell: Cell, parts: ModelParts) -> int:
    """Bytes of the parameters of the fullest rank, as zero1 deals them."""
    values = [weight.values for part in parts.parts for weight in part.weights]
    return VALUE_BYTES * max(deal(values, cell.gpus))


def deal(values: Sequence[int], ranks: int) -> list[int]:
    """Values of each rank as torch's ZeroRedundancyOptimizer deals them: the largest parameter first, each
    to the rank that has least."""
    dealt = [0] * ranks
    for count in sorted(values, reverse=True):
        dealt[dealt.index(min(dealt))] += count
    return dealt


def _fsdp(sizes: Sizes) -> Iterator[Footprint]:
    """torch's FSDP2: a unit is gathered in one piece, which is then copied into its parameters; gradients are
    copied into one piece, which Gloo copies again to sum it. The piece of the last block is kept until the
    next forward pass."""
    units = Units(sizes)
    stays = units.around + sum(b for b, stay in zip(units.blocks, units.staying(), strict=True) if stay)
    ahead = 0 if all(units.staying()) else (1 + sizes.spec.integer("prefetch")) * units.block
    gathered = _Gathered(
        at_loss=stays + units.block, at_block=stays + units.block + ahead, at_end=units.around
    )
    yield from _sharded(sizes, units, gathered, averaged=2 * units.full_block, waiting=units.full_block)
    yield _updated_shards(sizes, units, 0)


def _scratch_fsdp(sizes: Sizes) -> Iterator[Footprint]:
    """Ours: gathered in place, averaged from one vector, which on CPU is received in a second one."""
    units = Units(sizes)
    averaged = _UNDER_WAY * (2 if sizes.cell.device == "cpu" else 1) * units.full_block
    always = units.around + sum(units.blocks) if sizes.spec.integer("stage") < 3 else 0
    ahead = min(1 + sizes.spec.integer("prefetch"), len(units.blocks)) * units.block
    part = always or units.around + ahead
    gathered = _Gathered(at_loss=part, at_block=part, at_end=always or units.around)
    yield from _sharded(sizes, units, gathered, averaged=averaged, waiting=averaged)
    yield _updated_shards(sizes, units, always)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """Bytes of whole parameters at three moments of the backward pass."""

    at_loss: int
    at_block: int
    at_end: int


def _sharded(
    sizes: Sizes, units: Units, gathered: _Gathered, *, averaged: int, waiting: int
) -> Iterator[Footprint]:
    """The moments of a rank that has shards, but for the update: `averaged` and `waiting` are the copies of
    gradients on their way while a block is averaged, and while what is around the blocks has its gradients
    computed."""
    kept, rest, held = sizes.activations(), _at_rest(sizes, units), units.held()
    yield Footprint(moment="model built", parameters=sizes.built)
    yield Footprint(moment="model built", parameters=sizes.parameters + units.shard)
    begins = replace(rest, moment="backward begins", gradients=held)
    yield replace(begins, gathered=gathered.at_loss, activations=kept.at_loss)
    yield replace(begins, gathered=gathered.at_block, activations=kept.at_block)
    ends = replace(rest, moment="backward ends", activations=kept.end)
    own = max(held, units.shard)
    still = max(gathered.at_end, min(gathered.at_block, units.around + units.block))
    yield replace(ends, gathered=still, gradients=own + units.full_block, buckets=averaged)
    last = own + units.full_around + sizes.shared
    yield replace(ends, gathered=gathered.at_end, gradients=last, buckets=waiting)


def _updated_shards(sizes: Sizes, units: Units, gathered: int) -> Footprint:
    """The update of the shards."""
    rest = _at_rest(sizes, units)
    extra = sizes.update(rest.parameters)
    return replace(rest, gathered=gathered, gradients=rest.parameters, optimizer=rest.optimizer + extra)


def _at_rest(sizes: Sizes, units: Units) -> Footprint:
    offloaded = sizes.spec.name != "manual" and sizes.spec.word("offload") == "cpu"
    shard = 0 if offloaded and sizes.cell.device == "cuda" else units.shard
    return Footprint(moment="update", parameters=shard, optimizer=sizes.state(shard))


def _pipeline(sizes: Sizes) -> Iterator[Footprint]:
    """The moments of the rank whose fullest one is fullest."""
    ranks = range(sizes.groups.pipeline)
    every = [list(_of_rank(sizes, rank)) for rank in ranks]
    return iter(max(every, key=lambda moments: max(moment.total for moment in moments)))


def _of_rank(sizes: Sizes, rank: int) -> Iterator[Footprint]:
    parts, cell = sizes.parts, sizes.cell
    pieces, own = microbatches(cell.strategy), stages_of(cell, parts)[rank]
    whole = VALUE_BYTES * sum(stage_values(parts, stage) for stage in own)
    samples, flights = cell.micro_batch // pieces, in_flight(cell, rank)
    largest = max(
        (Activations(sizes, stage, samples=samples, flights=-(-flights // len(own))) for stage in own),
        key=lambda kept: kept.begin,
    )
    received = samples * pieces * sum(_received(parts, stage) for stage in own)
    averaged = whole if sizes.groups.replicate > 1 else 0
    base = Footprint(
        moment="update", parameters=whole, optimizer=sizes.state(whole), buckets=received + averaged
    )
    yield Footprint(moment="model built", parameters=sizes.built)
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


def _received(parts: ModelParts, stage: Stage) -> int:
    """Bytes of one sample that a stage keeps in buffers of its own: its input, and the gradient of its
    output, which is the input of the block after its last."""
    inputs = 0 if stage.stem else parts.blocks[stage.blocks[0]].input
    return inputs + (0 if stage.head else parts.blocks[stage.blocks[-1] + 1].input)


_RULES: dict[str, Callable[[Sizes], Iterator[Footprint]]] = {
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
