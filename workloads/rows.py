"""The rows that each expert of a module computes, counted on the device for whoever measures the module."""

from __future__ import annotations

import torch
from torch import Tensor


class RowCount:
    """Counts the rows that each expert of one module computes, from the call of `begin` on. The module keeps
    it in an attribute of any name, and calls `add` in its forward pass."""

    def __init__(self, experts: int, *, first: int = 0, flops: int = 0) -> None:
        """`experts` of the layer compute on this rank, from the number `first` on. The forward pass of a row
        costs `flops`, which a module that drops rows gives."""
        self.experts = experts
        self.first = first
        self.flops = flops
        self._total: Tensor | None = None

    def begin(self, device: torch.device) -> None:
        """Count from 0 on, on the device of the module."""
        self._total = torch.zeros(self.experts, dtype=torch.int64, device=device)
        self._dropped = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, counts: Tensor) -> None:
        """Add the rows (experts,) that a forward pass is about to compute, without waiting for the device."""
        if self._total is not None:
            add_once(self._total, counts)

    def drop(self, number: Tensor) -> None:
        """Add the rows, a scalar, that no expert of a forward pass has a place for, as `add` does."""
        if self._total is not None:
            add_once(self._dropped, number)

    def dropped(self) -> int:
        """Return the rows that were dropped since `begin`, as `read` does."""
        return int(self._dropped.item())

    def read(self) -> list[int]:
        """Return the rows of each expert since `begin`, once the device has computed them."""
        assert self._total is not None
        counted: list[int] = self._total.tolist()
        return counted


def add_once(total: Tensor, counts: Tensor) -> None:
    """Add counts of a forward pass to `total`, in place, and not when backward computes it again."""
    (_compiled_add if torch.compiler.is_compiling() else _add)(total, counts)


def _add(total: Tensor, counts: Tensor) -> None:
    # Checkpointed blocks compute their rows again in backward.
    if torch._C._current_graph_task_id() == -1:
        total.add_(counts)


_compiled_add = torch.library.custom_op(
    "bench::add_rows", _add, mutates_args=("total",), schema="(Tensor(a!) total, Tensor counts) -> ()"
)
"""The same as an operator, which compiled code calls as it is, and which is slower to call."""
_compiled_add.register_fake(lambda total, counts: None)
