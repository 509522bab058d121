"""`tp` without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from results.cell import Cell
from results.groups import GroupLayout
from results.parts import ModelParts
from strategies.closed_form.moments import Footprint
from strategies.closed_form.terms import Term, term
from strategies.facts import AutoPoint, Proposal, StrategyFacts


class TensorParallel(StrategyFacts):
    """It needs the memory of `single`, with split layers divided by p. While layers are split one after
    another, the largest complete layer is added. A model that is built complete then has P, and a part of
    that layer."""

    name = "tp"
    help = "tensor parallelism: every rank computes a part of each layer"
    model = "strategies.tensor_parallel.model:TensorParallelModel"
    fixed_exchange = "it exchanges activations, not gradients"
    contiguous = "it sends activations row by row"
    norm_in_double = True
    by_unit = True
    eager = (
        "it exchanges activations inside of the model, which torch.compile cannot trace; leave --compile out"
    )

    @property
    def shards(self) -> bool:
        return True

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        return GroupLayout(tensor=ranks)

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        if not point.several_nodes:
            yield Proposal(strategy="tp", complexity=(5,))

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        built, *others = super().moments(cell, parts)
        if parts.by_unit:
            sizes = self.sizes(cell, parts)
            most = max(sizes.split_by_layer(), sizes.parameters)
            built = replace(built, parameters=most, estimated=most - sizes.parameters)
        yield from (built, *others)

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        yield activation_sums(cell, parts, self.groups(cell.gpus, cell.node_size))


def activation_sums(cell: Cell, parts: ModelParts, groups: GroupLayout) -> Term:
    """Return the sums of activations: each block needs two in forward, and two of gradients in backward
    (Shoeybi et al. 2019, arXiv:1909.08053, section 3); checkpointing repeats the forward pass up to the input
    of the last product, and so one of them."""
    sums = 5 if cell.activation_checkpointing else 4
    each = cell.batch_per_replica / groups.context
    return term(
        "activations",
        "all-reduce",
        ("tensor", groups.tensor),
        payload=each * sum(sums * block.input for block in parts.blocks),
        operations=cell.accumulation * sums * len(parts.blocks),
    )
