"""Why a cell makes no sense on its nodes, under its network link, or with its model split as its strategy
wants.

Neither strategies nor workloads know by themselves whether a model can be split.
"""

from __future__ import annotations

from results.cell import Cell
from results.errors import SpecError
from results.groups import GroupLayout
from results.parts import Unknown
from results.plan import placement_of
from strategies.catalog import COLLECTIVES, STRATEGIES
from workloads.catalog import WORKLOADS, facts
from workloads.shape import WorkloadFacts


def unsplittable(cell: Cell) -> str | None:
    """Why a cell's model cannot be split as its strategy wants, for the report; None if it can.

    Unknown facts of a workload refuse no cell: see `unchecked`.
    """
    strategy = STRATEGIES.facts(cell.strategy)
    known = facts(WORKLOADS.parse(cell.workload))
    blocks, least = known.blocks, known.minimum_batch
    stages = strategy.groups(cell.gpus, cell.node_size).pipeline
    if stages > 1 and not isinstance(known.parts, Unknown) and not known.parts.chained:
        return (
            f"{cell.workload} is not a chain of modules, which a pipeline needs; a strategy that "
            f"shards parameters takes any model"
        )
    if stages > 1 and known.uncut is not None:
        return known.uncut
    if not isinstance(blocks, Unknown) and (reason := strategy.unfit(cell, blocks)) is not None:
        return reason
    if known.batch_norm is True and cell.device == "cpu" and strategy.gathers_bf16:
        return f"on CPU torch has no BatchNorm for {cell.strategy}: leave params=bf16 out"
    if not isinstance(least, Unknown) and cell.micro_batch // strategy.microbatches < least:
        return f"BatchNorm of {cell.workload} needs at least {least} samples in a microbatch"
    groups = strategy.groups(cell.gpus, cell.node_size)
    if groups.context > 1 and (reason := _uneven_sequence(cell, known, strategy.attention, groups)):
        return reason
    if groups.tensor > 1 and not isinstance(known.heads, Unknown):
        if not known.heads:
            return f"{cell.workload} has no layers that tensor parallelism knows how to split"
        uneven = next((count for count in known.heads if count % groups.tensor), None)
        if uneven is not None:
            return f"{uneven} attention heads of {cell.workload} do not divide by {groups.tensor}"
    return None


def _uneven_sequence(
    cell: Cell, known: WorkloadFacts, attention: str | None, groups: GroupLayout
) -> str | None:
    """Why the tokens of a sample, or the heads that exchange them, do not divide among ranks."""
    if isinstance(known.unit, Unknown) or isinstance(known.units_per_sample, Unknown):
        return None
    if known.unit != "tokens":
        return f"{cell.workload} has no sequence of tokens, which {cell.strategy} splits"
    chunks = groups.context * (1 if attention == "ulysses" else 2)
    if known.units_per_sample % chunks:
        return f"{known.units_per_sample} tokens of {cell.workload} do not divide into {chunks} chunks"
    if attention == "ulysses" and not isinstance(known.heads, Unknown) and known.heads:
        ranks = groups.tensor * groups.context
        if known.heads[0] % ranks:
            return (
                f"{known.heads[0]} attention heads of {cell.workload} do not divide by {ranks} ranks: use "
                f"attention=gathered"
            )
    return None


def unchecked(cell: Cell) -> str | None:
    """Say which split of a cell planning cannot check, and why; None if it checks everything."""
    strategy, known = STRATEGIES.facts(cell.strategy), facts(WORKLOADS.parse(cell.workload))
    tensor = strategy.groups(cell.gpus, cell.node_size).tensor
    asked = known.blocks if strategy.by_blocks else known.heads
    if not isinstance(asked, Unknown) or not (strategy.by_blocks or tensor > 1):
        return None
    return f"whether {cell.strategy} can split {cell.workload} is {asked}; its ranks find out"


def misplaced(cell: Cell, gpus_per_node: int | None) -> str | None:
    """Why a cell makes no sense on its nodes, real or virtual; None if it does, or does not go by nodes.

    Raises UsageError if the workers do not fill whole nodes.
    """
    real = placement_of(cell, gpus_per_node).gpus_per_node
    size = min(cell.node_size or real, real)
    collective, strategy = COLLECTIVES.facts(cell.collective), STRATEGIES.facts(cell.strategy)
    if collective.by_nodes and not 1 < size < cell.gpus:
        here = "here every rank is a node" if size == 1 else f"{cell.gpus} ranks are one node"
        # Two nodes of two ranks are the fewest that have both.
        way_out = "give --node-size" if cell.gpus >= 4 else "use at least 4 ranks"
        return f"{collective.name} exchanges within nodes and across them, and {here}; {way_out}"
    try:
        return strategy.misplaced(strategy.groups(cell.gpus, size), size)
    except SpecError as error:
        return str(error)


def unlinkable(cell: Cell) -> str | None:
    """Why a cell's link makes no sense, as a sentence for the report; None if it does, or without a link."""
    if cell.link_mbit_per_s is None:
        return None
    if cell.device != "cpu":
        return "a link is emulated only for CPU ranks"
    if cell.gpus == 1:
        return f"{cell.strategy} has no network"
    if cell.node_size is not None and cell.gpus <= cell.node_size:
        return f"{cell.gpus} ranks are on one virtual node of {cell.node_size}: nothing goes over its link"
    return None
