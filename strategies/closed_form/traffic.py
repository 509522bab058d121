"""What travels in one step, in closed form, strategy by strategy: bytes and operations of each collective.

The bytes on the wire are those of the standard algorithms (Thakur et al. 2005, IJHPCA 19(1), section 4), sent
by each of p ranks: all-reduce 2 (p - 1) / p n, reduce-scatter and all-gather (p - 1) / p n of the whole of n
bytes. Gloo runs torch's reduce-scatter as an all-reduce, and so twice that; ours moves it as an all-to-all,
(p - 1) / p n. Counted is a step of dense gradients; left out are buffers of BatchNorm, what ranks agree on in
a few bytes (overflows, a norm), and what only the first step sends. Activations are counted as fp32: under
autocast those of `tp`'s forward pass and of a pipeline's edges can be of half precision, and half of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from results.cell import Cell
from results.groups import Dimension
from results.parts import VALUE_BYTES, ModelParts, Part
from results.spec import Spec
from strategies.catalog import STRATEGIES, group_layout, microbatches
from strategies.closed_form.footprint import deal, updated_bytes
from strategies.fsdp.block_choices import read_choices
from strategies.pipeline.cut import Stage, stages_of

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"]
Overlap = Literal["first forward", "forward", "last backward", "backward", "compute", "none"]
"""Computation that a message can run beside: the forward or backward passes of one micro-batch or of all of
them, both, or none."""

MIB = 2**20
_LOSS_BYTES = 8
_BUCKET_BYTES = 25 * MIB
"""As in `strategies.exchange.buckets`: what `local-sgd` and a pipeline with copies average at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One kind of message of a step: of the rank that sends most of it."""

    what: str
    collective: Collective
    dimension: Dimension
    """The groups that it stays in."""
    ranks: int
    """Of such a group."""
    payload_bytes: float
    """Of the buffers that a rank hands over, over all operations; a mean where not every step has it."""
    operations: float
    wire_factor: float
    """Bytes that a rank sends over its payload."""
    overlap: Overlap

    @property
    def wire_bytes(self) -> float:
        return self.wire_factor * self.payload_bytes


def traffic(cell: Cell, parts: ModelParts) -> list[Term]:
    """All that the busiest rank of a cell sends in one step; nothing on one rank."""
    spec = STRATEGIES.parse(cell.strategy)
    if spec.name == "single":
        return []
    return [term for term in _RULES[spec.name](cell, parts, spec) if term.payload_bytes]


def _term(
    what: str,
    collective: Collective,
    group: tuple[Dimension, int],
    payload: float,
    operations: float,
    overlap: Overlap,
) -> Term:
    dimension, ranks = group
    return Term(
        what=what,
        collective=collective,
        dimension=dimension,
        ranks=ranks,
        payload_bytes=payload,
        operations=operations,
        wire_factor=_FACTORS[collective](ranks),
        overlap=overlap,
    )


_FACTORS: dict[Collective, Callable[[int], float]] = {
    "all-reduce": lambda p: 2 * (p - 1) / p,
    "reduce-scatter": lambda p: (p - 1) / p,
    "all-to-all": lambda p: (p - 1) / p,
    # A rank hands over its own shard, and hands on those of the others but one.
    "all-gather": lambda p: p - 1,
    # Each byte is one rank's own, and p - 1 ranks want it: a pipelined chain.
    "broadcast": lambda p: (p - 1) / p,
    "send": lambda p: 1.0,
}


def _ddp(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    weights = [weight.values for part in parts.parts for weight in part.weights]
    buckets = _buckets(weights, _first_bucket_mb(spec) * MIB, spec.number("bucket_mb") * MIB)
    group: tuple[Dimension, int] = ("replicate", cell.gpus)
    yield _term("gradients", "all-reduce", group, VALUE_BYTES * parts.values, buckets, "last backward")


def _first_bucket_mb(spec: Spec) -> float:
    """Of the bucket that is full first; torch's is a small one where its size is the default."""
    if spec.name == "scratch-ddp":
        return spec.number("first_bucket_mb")
    mib = spec.number("bucket_mb")
    return _TORCHS_FIRST_MB if mib == _TORCHS_BUCKET_MB else mib


_TORCHS_BUCKET_MB, _TORCHS_FIRST_MB = 25.0, 1.0


def _buckets(weights: list[int], first: float, others: float) -> int:
    """Buckets that gradients fill, in the reverse order of registration, each with the one that fills it."""
    count, held, limit = 0, 0, first
    for values in reversed(weights):
        held += VALUE_BYTES * values
        if held >= limit:
            count, held, limit = count + 1, 0, others
    return count + (held > 0)


def _zero1(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    yield from _ddp(cell, parts, spec)
    group: tuple[Dimension, int] = ("replicate", cell.gpus)
    updating = sum(
        1 for values in deal([w.values for p in parts.parts for w in p.weights], cell.gpus) if values
    )
    yield _term("updated parameters", "broadcast", group, VALUE_BYTES * parts.values, updating, "none")


def _local_sgd(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    group: tuple[Dimension, int] = ("replicate", cell.gpus)
    buckets = _runs([weight.values for part in parts.parts for weight in part.weights])
    per_step = VALUE_BYTES * parts.values / spec.count
    yield _term("parameters", "all-reduce", group, per_step, buckets / spec.count, "none")


def _runs(weights: list[int]) -> int:
    """Runs of whole parameters of up to a bucket each, or of one that is larger."""
    count, held = 0, 0
    for values in weights:
        size = VALUE_BYTES * values
        if count == 0 or held + size > _BUCKET_BYTES:
            count, held = count + 1, 0
        held += size
    return count


def _fsdp(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    shards, tensor = groups.shard, groups.tensor
    around = VALUE_BYTES * parts.around.padded_values(shards, tensor)
    blocks = [VALUE_BYTES * block.padded_values(shards, tensor) for block in parts.blocks]
    times = _gatherings(spec, len(blocks))
    ahead: Overlap = "compute" if any(count > 1 for count in times) else "forward"
    if cell.device == "cpu" and not spec.integer("prefetch"):
        ahead = "none"
    gathered = around + sum(count * block for count, block in zip(times, blocks, strict=True))
    group: tuple[Dimension, int] = ("shard", shards)
    if shards > 1:
        payload = cell.accumulation * gathered / shards / (2 if spec.word("params") == "bf16" else 1)
        yield _term("parameters", "all-gather", group, payload, cell.accumulation * (1 + sum(times)), ahead)
        averaged = _term(
            "gradients",
            "reduce-scatter" if cell.backend == "nccl" else "all-reduce",
            group,
            around + sum(blocks),
            1 + len(blocks),
            "last backward" if cell.device == "cuda" else "none",
        )
        yield averaged
    if groups.replicate > 1:
        payload = (around + sum(blocks)) / shards
        after: Overlap = "last backward" if cell.device == "cuda" else "none"
        across: tuple[Dimension, int] = ("replicate", groups.replicate)
        yield _term("shards of gradients", "all-reduce", across, payload, 1 + len(blocks), after)
    if tensor > 1:
        yield from _tensor(cell, parts, spec)


def _gatherings(spec: Spec, blocks: int) -> list[int]:
    """Of each block in one micro-batch: again for backward where it was given up in between."""
    if spec.name == "manual":
        return [1 + choice.reshard for choice in read_choices(str(spec.positional))]
    return [1 + spec.flag("reshard")] * blocks


def _scratch_fsdp(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    ranks, stage = cell.gpus, spec.integer("stage")

    half = 2 if spec.word("params") == "bf16" else 1

    def whole(part: Part) -> int:
        return VALUE_BYTES * part.flat_values(ranks, VALUE_BYTES // half)

    around, blocks = whole(parts.around), sum(whole(block) for block in parts.blocks)
    units, count = around + blocks, 1 + len(parts.blocks)
    rounds = cell.accumulation
    gathered, gatherings = (
        (rounds * (units + blocks), rounds * (2 * count - 1)) if stage == 3 else (units, count)
    )
    group: tuple[Dimension, int] = ("shard", ranks)
    ahead: Overlap = "compute" if stage == 3 else "first forward"
    yield _term("parameters", "all-gather", group, gathered / ranks / half, gatherings, ahead)
    averages = rounds if stage > 1 else 1
    beside: Overlap = "backward" if stage > 1 else "last backward"
    by: Collective = "all-to-all" if cell.device == "cpu" else "reduce-scatter"
    yield _term("gradients", by, group, averages * units, averages * count, beside)


def _tensor(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    """Of each block, two sums of activations forward and two of gradients backward (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3); checkpointing repeats the forward pass up to the last product's input, and
    so one of them."""
    tensor = group_layout(cell.strategy, cell.gpus, cell.node_size).tensor
    sums = 5 if cell.activation_checkpointing else 4
    each = cell.batch_per_replica
    payload = each * sum(sums * block.input for block in parts.blocks)
    operations = cell.accumulation * sums * len(parts.blocks)
    yield _term("activations", "all-reduce", ("tensor", tensor), payload, operations, "none")


def _pipeline(cell: Cell, parts: ModelParts, spec: Spec) -> Iterator[Term]:
    """Of the rank that sends most activations; both ends share the gradient of what both have."""
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    ranks = groups.pipeline
    own = max(stages_of(cell, parts), key=lambda stages: _sent(parts, stages)[0])
    payload, edges = _sent(parts, own)
    pieces = microbatches(cell.strategy)
    along: tuple[Dimension, int] = ("pipeline", ranks)
    rounds = cell.accumulation
    yield _term(
        "activations", "send", along, rounds * cell.micro_batch * payload, rounds * pieces * edges, "compute"
    )
    if groups.replicate > 1:
        across: tuple[Dimension, int] = ("replicate", groups.replicate)
        largest = updated_bytes(cell, parts)
        yield _term("gradients", "all-reduce", across, largest, -(-largest // _BUCKET_BYTES), "none")
    if parts.shared_values and ranks > 1:
        ends: tuple[Dimension, int] = ("pipeline", 2)
        yield _term("shared gradients", "all-reduce", ends, VALUE_BYTES * parts.shared_values, 1, "none")
    yield _term("loss", "broadcast", along, _LOSS_BYTES, 1, "none")


def _sent(parts: ModelParts, stages: list[Stage]) -> tuple[int, int]:
    """Bytes of one sample that stages send on and back, and how often."""
    payload, edges = 0, 0
    for stage in stages:
        if not stage.stem:
            payload, edges = payload + parts.blocks[stage.blocks[0]].input, edges + 1
        if not stage.head:
            payload, edges = payload + parts.blocks[stage.blocks[-1] + 1].input, edges + 1
    return payload, edges


_RULES: dict[str, Callable[[Cell, ModelParts, Spec], Iterator[Term]]] = {
    "ddp": _ddp,
    "scratch-ddp": _ddp,
    "local-sgd": _local_sgd,
    "zero1": _zero1,
    "fsdp": _fsdp,
    "hsdp": _fsdp,
    "manual": _fsdp,
    "scratch-fsdp": _scratch_fsdp,
    "tp": _tensor,
    "pipeline": _pipeline,
}
