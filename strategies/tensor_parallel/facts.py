"""`tp` without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from results.cell import Cell
from results.groups import GroupLayout
from results.parts import VALUE_BYTES, ModelParts, Part
from results.spec import Option
from strategies.closed_form.moments import Footprint
from strategies.closed_form.terms import BUCKET_BYTES, Collective, Receivers, Term, term
from strategies.facts import AutoPoint, Proposal, StrategyFacts

OPTIONS = MappingProxyType(
    {
        "sequence": Option(
            kind="bool",
            default=False,
            help="with tp: each rank has a part of the tokens between the split layers",
        )
    }
)


class TensorParallel(StrategyFacts):
    """It needs the memory of `single`, with split layers divided by p. While layers are split one after
    another, the largest complete layer is added. A model that is built complete then has P, and a part of
    that layer."""

    name = "tp"
    options = OPTIONS
    checked = ("tp:sequence=true",)
    help = "tensor parallelism: every rank computes a part of each layer"
    model = "strategies.tensor_parallel.model:TensorParallelModel"
    fixed_exchange = "it exchanges activations, not gradients"
    unprojected = "on more ranks each rank computes a smaller part of each layer"
    contiguous = "it sends activations row by row"
    norm_in_double = True
    by_unit = True
    eager = (
        "it exchanges activations inside of the model, which torch.compile cannot trace; leave --compile out"
    )

    @property
    def splits_tokens(self) -> bool:
        return self.spec.flag("sequence")

    @property
    def shards(self) -> bool:
        return True

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        return GroupLayout(tensor=ranks)

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        if not point.several_nodes:
            yield Proposal(strategy="tp", complexity=(5,))
            if point.tokens is not None:
                yield Proposal(strategy="tp:sequence=true", complexity=(5, 1))

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        built, *others = super().moments(cell, parts)
        if parts.by_unit:
            sizes = self.sizes(cell, parts)
            most = max(sizes.split_by_layer(), sizes.parameters)
            built = replace(built, parameters=most, estimated=most - sizes.parameters)
        yield from (built, *others)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        groups = self.groups(cell.gpus, cell.node_size)
        yield from activation_messages(cell, parts, groups, self.checkpoints, sequence=self.splits_tokens)


def activation_messages(
    cell: Cell,
    parts: ModelParts,
    groups: GroupLayout,
    checkpoints: Callable[[int], bool],
    *,
    sequence: bool,
    pieces: int = 1,
) -> Iterator[Term]:
    """Yield the sums of activations: each block needs two in forward, and two of gradients in backward
    (Shoeybi et al. 2019, arXiv:1909.08053, section 3), one if only its attention is split; checkpointing
    repeats the forward pass up to the input of the last product, and so the sums before it. `checkpoints`
    returns whether the strategy itself recomputes a block, given by its index; `pieces` are the microbatches
    that a micro-batch is cut into.

    With `sequence` a rank receives the sums of its part of the tokens, and gathers tokens as often
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The output of the last block is gathered once
    more, and so is the gradient of the first one's input. Gradients of what a block does not split are summed
    once a step.
    """
    along: Receivers = ("tensor", groups.tensor)
    each, rounds = cell.batch_per_replica / groups.context, cell.accumulation * pieces

    def total(what: str, collective: Collective, repeats: bool, ends: Sequence[Part], ranks: int) -> Term:
        """Return two messages of a block's input for each of its sums in each micro-batch, one more of those
        that are recomputed (with `repeats` the last too), and one of each of `ends`; `ranks`: those over
        which a payload is divided."""
        times = []
        for at, block in enumerate(parts.blocks):
            sums, before = block.split_sums
            if not sums:
                # Parts that were counted do not say what is split.
                sums, before = 2, 1
            again = bool(cell.activation_checkpointing or checkpoints(at))
            times.append(2 * sums + (sums if repeats else before) * again)
        size = sum(many * block.input for many, block in zip(times, parts.blocks, strict=True))
        payload = each / ranks * (size + sum(part.input for part in ends))
        return term(what, collective, along, payload=payload, operations=rounds * (sum(times) + len(ends)))

    summed: Collective = "reduce-scatter" if sequence and cell.backend == "nccl" else "all-reduce"
    yield total("activations", summed, False, (), 1)
    if sequence:
        # Other stages of a pipeline have neither of these ends.
        gathered = parts.blocks[-1:] * bool(parts.head.input)
        gathered += parts.blocks[:1] * bool(parts.trained.stem.values)
        yield total("tokens", "all-gather", True, gathered, groups.tensor)
        yield from _sums_of_gradients(parts, groups)


def _sums_of_gradients(parts: ModelParts, groups: GroupLayout) -> Iterator[Term]:
    """Yield sums of gradients of what blocks do not split: small ones at once, large ones each by itself."""
    weights = (weight for block in parts.trained.blocks for weight in block.weights)
    # Dealt experts see the tokens of all ranks.
    whole = (each for each in weights if not each.split and not (each.experts and groups.expert > 1))
    sizes = [VALUE_BYTES * -(-weight.rows // groups.shard_ranks) * weight.columns for weight in whole]
    if sizes:
        alone = sum(size > BUCKET_BYTES for size in sizes)
        along: Receivers = ("tensor", groups.tensor)
        operations = alone + (alone < len(sizes))
        yield term("unsplit gradients", "all-reduce", along, payload=sum(sizes), operations=operations)
