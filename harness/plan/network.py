"""Which cells make sense on their nodes, and under a network link."""

from __future__ import annotations

from results.cell import Cell
from results.errors import SpecError
from results.plan import placement_of
from strategies.catalog import COLLECTIVES, STRATEGIES


def misplaced(cell: Cell, gpus_per_node: int | None) -> str | None:
    """Why a cell makes no sense on its nodes, real or virtual; None if it does, or does not go by them.

    Raises UsageError if the workers do not fill whole nodes.
    """
    real = placement_of(cell, gpus_per_node).gpus_per_node
    size = min(cell.node_size or real, real)
    return _flat(cell, size) or _grouped(cell, size)


def _flat(cell: Cell, size: int) -> str | None:
    """Why nodes of `size` give an exchange by nodes nothing to do."""
    collective = COLLECTIVES.facts(cell.collective)
    if not collective.by_nodes or 1 < size < cell.gpus:
        return None
    here = "here every rank is a node" if size == 1 else f"{cell.gpus} ranks are one node"
    # Two nodes of two ranks are the least that have both.
    way_out = "give --node-size" if cell.gpus >= 4 else "use at least 4 ranks"
    return f"{collective.name} goes inside of nodes and across them, and {here}; {way_out}"


def _grouped(cell: Cell, size: int) -> str | None:
    """Why nodes of `size` give the strategy's groups nothing to do."""
    strategy = STRATEGIES.facts(cell.strategy)
    try:
        return strategy.misplaced(strategy.groups(cell.gpus, size), size)
    except SpecError as error:
        return str(error)


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
