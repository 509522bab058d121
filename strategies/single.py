"""`single`: one device."""

from __future__ import annotations

from collections.abc import Iterator

from results.cell import Cell
from results.parts import ModelParts
from strategies.closed_form.terms import Term
from strategies.facts import AutoPoint, Proposal, StrategyFacts


class Single(StrategyFacts):
    """The memory is P + k P, and the larger of A (backward begins) and P of gradients (backward ends);
    `strategies.predictions` defines P, k and A."""

    name = "single"
    help = "one device, no exchange: the baseline of every curve"
    model = "strategies.training.parallel:ParallelModel"
    distributed = False
    projected = True
    fixed_exchange = "one device exchanges nothing"

    @classmethod
    def proposals(cls, point: AutoPoint) -> Iterator[Proposal]:
        yield Proposal(strategy="single", complexity=(0,))

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        return iter(())
