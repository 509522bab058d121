"""Whether a model can be split as a strategy wants to: what neither strategies nor workloads know alone."""

from __future__ import annotations

from results.cell import Cell
from results.unknown import Unknown
from strategies.catalog import STRATEGIES
from workloads.catalog import WORKLOADS, facts


def refusal(cell: Cell) -> str | None:
    """Why a cell's model does not go into so many parts, for the report; None if it does.

    What is unknown of a workload refuses nothing: see `unchecked`.
    """
    strategy = STRATEGIES.facts(cell.strategy)
    known = facts(WORKLOADS.parse(cell.workload))
    blocks, least = known.blocks, known.minimum_batch
    stages = strategy.groups(cell.gpus, cell.node_size).pipeline
    if stages > 1 and not isinstance(known.parts, Unknown) and not known.parts.chained:
        return (
            f"{cell.workload} is no chain of modules that a pipeline could be cut from; a strategy that "
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
    tensor = strategy.groups(cell.gpus, cell.node_size).tensor
    if tensor > 1 and not isinstance(known.heads, Unknown):
        return _divide(cell, tensor, known.heads)
    return None


def unchecked(cell: Cell) -> str | None:
    """What planning cannot say of a cell's split, and why; None if there is nothing."""
    strategy, known = STRATEGIES.facts(cell.strategy), facts(WORKLOADS.parse(cell.workload))
    tensor = strategy.groups(cell.gpus, cell.node_size).tensor
    asked = known.blocks if strategy.by_blocks else known.heads
    if not isinstance(asked, Unknown) or not (strategy.by_blocks or tensor > 1):
        return None
    return f"whether {cell.strategy} can split {cell.workload} is {asked}; its ranks find out"


def _divide(cell: Cell, parts: int, heads: tuple[int, ...]) -> str | None:
    if not heads:
        return f"{cell.workload} has no layers that tensor parallelism knows how to split"
    for count in heads:
        if count % parts:
            return f"{count} attention heads of {cell.workload} do not divide by {parts}"
    return None
