"""`zero1` without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from types import MappingProxyType

from results.cell import Cell
from results.parts import VALUE_BYTES, ModelParts
from strategies.closed_form.moments import Footprint, step_moments
from strategies.closed_form.terms import Term, term
from strategies.ddp.facts import BUCKET_MB, BucketedFacts
from strategies.facts import AutoPoint, Proposal


class Zero1(BucketedFacts):
    """The memory of `ddp`, with the optimizer's state only for the parameters that the fullest rank was
    dealt."""

    name = "zero1"
    help = "torch's ZeroRedundancyOptimizer: ddp, where each rank updates a part of the parameters"
    options = MappingProxyType({"bucket_mb": BUCKET_MB})
    model = "strategies.zero1.model:Zero1Model"
    fixed_exchange = "torch's ZeroRedundancyOptimizer exchanges by all-reduce and broadcast"
    contiguous = "torch's ZeroRedundancyOptimizer keeps parameters in flat buffers"

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        yield Proposal(strategy="zero1", complexity=(2, 1))

    def moments(self, cell: Cell, parts: ModelParts) -> Iterator[Footprint]:
        sizes, base = self.whole_model(cell, parts)
        return step_moments(sizes, replace(base, optimizer=sizes.state(self.updated_bytes(cell, parts))))

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        yield from super().terms(cell, parts)
        yield term(
            "updated parameters",
            "broadcast",
            ("replicate", cell.gpus),
            payload=VALUE_BYTES * parts.trained.values,
            operations=sum(1 for values in deal(parts.trained.weight_values, cell.gpus) if values),
        )

    def updated_bytes(self, cell: Cell, parts: ModelParts) -> int:
        return VALUE_BYTES * max(deal(parts.trained.weight_values, cell.gpus))


def deal(values: Sequence[int], ranks: int) -> list[int]:
    """Return how many values each rank gets, in no order, as torch's ZeroRedundancyOptimizer deals
    parameters: each to the rank with the fewest values. `values` are the sizes of the parameters, the largest
    first."""
    # The first parameters go to one rank each.
    dealt = [*values[:ranks], *[0] * (ranks - len(values))]
    heapify(dealt)
    for count in values[ranks:]:
        heapreplace(dealt, dealt[0] + count)
    return dealt
