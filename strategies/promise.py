"""What a strategy promises of a step: whose values a replica averages, and when.

The proof (`harness/worker/proof.py`) holds every strategy to its promise, and knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

PartnersOf = Callable[[int, int], Sequence[int]]
"""(replica, replicas) to the replicas whose values it averages with equal weights, itself among them."""


def everyone(replica: int, replicas: int) -> Sequence[int]:
    """All replicas."""
    return range(replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A replica computes the gradients of its own samples, and averages them, or its parameters after the
    update, with its partners."""

    of: Literal["gradients", "parameters"] = "gradients"
    every: int = 1
    """Parameters are averaged after every so many steps; gradients in each step."""
    after: int = 0
    """Steps at the start that average gradients over all replicas instead."""
    partners: PartnersOf = everyone
    equal: bool = True
    """Whether replicas with the same partners hold the same bits after an average."""

    @property
    def all_equal(self) -> bool:
        """Whether all replicas hold the same bits after an average."""
        return self.partners is everyone and self.equal

    def averages_all_gradients(self, step: int) -> bool:
        """Whether all replicas average their gradients in a step, counted from 0."""
        return step < self.after or (self.of == "gradients" and self.partners is everyone)
