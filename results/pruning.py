"""What need not be run, because a smaller batch of the same cell ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from results.cell import Cell


def inferred_out_of_memory(cells: Iterable[Cell], failed: Set[str]) -> dict[str, str]:
    """By the id of each cell with a larger micro-batch than a cell in `failed`: the id of that one.

    The two are the same in everything else. Of several, the smallest that failed is named.
    """
    ordered = sorted(cells, key=lambda cell: cell.micro_batch)
    smallest: dict[str, str] = {}
    inferred: dict[str, str] = {}
    for cell in ordered:
        rest = msgspec.structs.replace(cell, micro_batch=1).id
        if cell.id in failed:
            smallest.setdefault(rest, cell.id)
        elif rest in smallest:
            inferred[cell.id] = smallest[rest]
    return inferred


def pruning_reason(cause: str) -> str:
    """Why a cell is not run, in words."""
    return f"inferred out of memory: {cause} has a smaller batch and ran out of it"
