"""What makes a configuration train differently, so that a higher throughput alone does not recommend it."""

from __future__ import annotations

from collections.abc import Iterable

from reports.text import count
from results.cell import Cell, Precision
from results.spec import split

_BITS: dict[Precision, int] = {"fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16}


def averages(strategy: str) -> int | None:
    """Steps from one average of the parameters to the next; None for what exchanges gradients every step."""
    name, period, _ = split(strategy)
    return int(period) if name == "local-sgd" and period is not None else None


def differences_in_training(cell: Cell, precisions: Iterable[Precision]) -> tuple[str, ...]:
    """As verbs: `averages every 4 steps`. `precisions` are those of what it is compared with."""
    period = averages(cell.strategy)
    gathered = split(cell.strategy)[2].get("params", "fp32")
    reduced = any(_BITS[other] > _BITS[cell.precision] for other in precisions)
    clauses = (
        f"averages every {count(period, 'step')}" if period is not None else None,
        "compresses its gradients" if cell.compression != "none" else None,
        f"gathers parameters in {gathered}" if gathered != "fp32" else None,
        f"computes in {cell.precision}" if reduced else None,
    )
    return tuple(clause for clause in clauses if clause is not None)
