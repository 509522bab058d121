"""The interface of a collective to compressors."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """Moves vectors among the ranks; each call returns when its result may be used.

    A `Link` is one: the backend's own collectives.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, values: Tensor) -> None:
        """Sum (n,) over the ranks, in place; the same bits on all of them."""

    def largest(self, values: Tensor) -> None:
        """Replace each element by its maximum over the ranks, in place; meant for a few numbers."""

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather the (n,) values of every rank into (size, n) values, one row per rank, in rank order."""

    def all_to_all(self, values: Tensor) -> Tensor:
        """Send row r of the (size, n) values to rank r; row r of the result is what rank r sent here."""
