"""Which cells a network link can be put under."""

from __future__ import annotations

from results.cell import Cell


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
