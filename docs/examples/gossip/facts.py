"""`gossip` without torch: what planning, predictions and the proof ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from results.cell import Cell
from results.parts import VALUE_BYTES, ModelParts
from strategies.closed_form.terms import Term, runs, term
from strategies.facts import StrategyFacts
from strategies.promise import Promise


def neighbours(rank: int, ranks: int) -> Sequence[int]:
    """A rank and those on both sides of it on the ring; on 2 ranks the one other rank."""
    return sorted({(rank - 1) % ranks, rank, (rank + 1) % ranks})


class Gossip(StrategyFacts):
    """Beside `single`: all parameters in buckets, and those of two neighbours."""

    name = "gossip"
    help = "every rank trains alone, and averages its parameters with its neighbours' after each step"
    model = "gossip.model:GossipModel"
    bucket_copies = 3
    fixed_exchange = "it sends parameters to its neighbours alone"
    differences = ("averages with its neighbours alone",)
    promise = Promise(of="parameters", partners=neighbours, equal=False)

    def refusal(self, cell: Cell) -> str | None:
        if cell.backend == "nccl":
            return "gossip sends and receives at once, which NCCL takes as one operation alone: use gloo"
        return None

    def terms(self, cell: Cell, parts: ModelParts) -> Iterator[Term]:
        others = len(neighbours(0, cell.gpus)) - 1
        weights = [weight.values for part in parts.parts for weight in part.weights]
        yield term(
            "parameters",
            "send",
            ("replicate", cell.gpus),
            payload=others * VALUE_BYTES * parts.values,
            operations=others * runs(weights),
        )
