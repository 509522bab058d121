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
        """Each element's maximum over the ranks, in place; for a few numbers."""

    def all_gather(self, values: Tensor) -> Tensor:
        """(n,) of every rank as (size, n), in the order of ranks."""

    def all_to_all(self, values: Tensor) -> Tensor:
        """(size, n), row r for rank r, to (size, n), row r from rank r."""
