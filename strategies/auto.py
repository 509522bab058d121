"""`auto`: a placeholder for the strategy that the plan (`harness.plan.auto`) chooses."""

from __future__ import annotations

from collections.abc import Iterator

from results.cell import Cell
from results.errors import SpecError
from results.groups import GroupLayout
from results.parts import ModelParts
from strategies.closed_form.terms import Term
from strategies.facts import StrategyFacts


class Auto(StrategyFacts):
    """The placeholder in a request: no cell has it as its strategy."""

    name = "auto"
    help = "what fits into memory and is predicted to be fastest: chosen by the plan"

    def groups(self, ranks: int, node_size: int | None) -> GroupLayout:
        raise SpecError(
            "the plan chooses what auto is: name the strategy that `bench matrix --dry-run` shows"
        )

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        self.groups(cell.gpus, cell.node_size)
        return iter(())
