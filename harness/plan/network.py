"""Which cells a network link can be put under."""

from __future__ import annotations

from results.cell import Cell
from results.plan import placement_of


def flat(cell: Cell, gpus_per_node: int | None) -> str | None:
    """Why a cell's nodes give a hierarchical exchange nothing to do; None if they do, or it is not one.

    Raises UsageError if the workers do not fill whole nodes.
    """
    if not cell.collective.startswith("hierarchical"):
        return None
    real = placement_of(cell, gpus_per_node).gpus_per_node
    size = min(cell.node_size or real, real)
    if 1 < size < cell.gpus:
        return None
    here = "here every rank is a node" if size == 1 else f"{cell.gpus} ranks are one node"
    return f"hierarchical goes inside of nodes and across them, and {here}; give --node-size"


def refusal(cell: Cell) -> str | None:
    """Why a cell's link makes no sense, as a sentence for the report; None if it does, or has none."""
    if cell.link_mbit_per_s is None:
        return None
    if cell.device != "cpu":
        return "a link is emulated for CPU ranks alone"
    if cell.gpus == 1:
        return f"{cell.strategy} has no network"
    if cell.node_size is not None and cell.gpus <= cell.node_size:
        return f"{cell.gpus} ranks are on one virtual node of {cell.node_size}: nothing goes over its link"
    return None
