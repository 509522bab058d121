"""What makes a configuration train differently, so that a higher throughput alone does not recommend it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from reports.analysis.figures import CellFigures
from results.cell import Precision
from results.record import Training, by_nodes_before, training_before

_BITS: dict[Precision, int] = {"fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16}


def training_of(figures: CellFigures) -> Training:
    """What the newest run recorded of its strategy."""
    return figures.newest.training or training_before(figures.cell.strategy)


def exchanges_by_nodes(figures: CellFigures) -> bool:
    """Whether its exchange goes inside of nodes and across them."""
    told = training_of(figures).exchanges_by_nodes
    return by_nodes_before(figures.cell.collective) if isinstance(told, msgspec.UnsetType) else told


def differences_in_training(figures: CellFigures, precisions: Iterable[Precision]) -> tuple[str, ...]:
    """As verbs: `averages every 4 steps`. `precisions` are those of what it is compared with."""
    cell = figures.cell
    clauses = [*training_of(figures).differences]
    if cell.compresses:
        clauses.append("compresses its gradients")
    if any(_BITS[other] > _BITS[cell.precision] for other in precisions):
        clauses.append(f"computes in {cell.precision}")
    return tuple(clauses)
