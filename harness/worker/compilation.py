"""A compiled cell is compiled: checked, and proven with the random numbers of its eager reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from results.cell import Cell


class NotCompiledError(Exception):
    """The compiler left the model as it is."""


@contextmanager
def reproducible_compilation(cell: Cell) -> Iterator[None]:
    """Compile anew with eager's random numbers, and forget that code afterwards.

    A compiled dropout draws numbers of its own, so that it could never be compared with an eager model;
    what is measured is compiled as a user would have it.
    """
    if not cell.compile:
        yield
        return
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def require_compiled() -> None:
    """Raises NotCompiledError if the steps so far have captured no graph."""
    if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        raise NotCompiledError(
            "torch.compile captured no graph of this model, so it would run uncompiled: leave --compile out"
        )
