"""Which cells make sense on their nodes, and under a network link."""

from __future__ import annotations

from results.cell import Cell
from results.errors import SpecError
from results.plan import placement_of
from strategies.catalog import STRATEGIES, group_layout


def misplaced(cell: Cell, gpus_per_node: int | None) -> str | None:
    """Why a cell makes no sense on its nodes, real or virtual; None if it does, or does not go by them.

    Raises UsageError if the workers do not fill whole nodes.
    """
    real = placement_of(cell, gpus_per_node).gpus_per_node
    size = min(cell.node_size or real, real)
    return _flat(cell, size) or _hybrid(cell, size)


def _flat(cell: Cell, size: int) -> str | None:
    """Why nodes of `size` give a hierarchical exchange nothing to do."""
    if not cell.collective.startswith("hierarchical") or 1 < size < cell.gpus:
        return None
    here = "here every rank is a node" if size == 1 else f"{cell.gpus} ranks are one node"
    return f"hierarchical goes inside of nodes and across them, and {here}; give --node-size"


def _hybrid(cell: Cell, size: int) -> str | None:
    """Why nodes of `size` leave hsdp without replicas, or without shards."""
    strategy = STRATEGIES.parse(cell.strategy)
    if strategy.name != "hsdp":
        return None
    try:
        groups = group_layout(cell.strategy, cell.gpus, size)
    except SpecError as error:
        return str(error)
    instead = f"or use {strategy.text.replace('hsdp', 'fsdp', 1)}"
    if groups.replicate == 1:
        return (
            f"hsdp shards inside of nodes and replicates across them, and here is one node of {size}: give a "
            f"smaller --node-size or --gpus-per-node, {instead}"
        )
    if groups.shard == 1:
        few = f"{strategy.text} has nothing left to shard on nodes of {size}"
        return f"{few}: give a --node-size of more than {size}, {instead}"
    return None


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
