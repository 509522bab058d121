"""Whether a model can be split as a strategy wants to: what neither strategies nor workloads know alone."""

from __future__ import annotations

from results.cell import Cell
from results.unknown import Unknown
from strategies.catalog import STRATEGIES, group_layout, microbatches
from strategies.fsdp.block_choices import blocks_of
from workloads.catalog import WORKLOADS, facts


def refusal(cell: Cell) -> str | None:
    """Why a cell's model does not go into so many parts, for the report; None if it does.

    What is unknown of a workload refuses nothing: see `unchecked`.
    """
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    known = facts(WORKLOADS.parse(cell.workload))
    if not isinstance(known.blocks, Unknown):
        if groups.pipeline > 1 and (reason := _cut(cell, groups.pipeline, known.blocks)) is not None:
            return reason
        if (reason := _chosen(cell, known.blocks)) is not None:
            return reason
    if known.batch_norm is True and cell.device == "cpu" and _gathers_bf16(cell):
        return f"on CPU torch has no BatchNorm for {cell.strategy}: leave params=bf16 out"
    least = known.minimum_batch
    if not isinstance(least, Unknown) and cell.micro_batch // microbatches(cell.strategy) < least:
        return f"BatchNorm of {cell.workload} needs at least {least} samples in a microbatch"
    if groups.tensor > 1 and not isinstance(known.heads, Unknown):
        return _divide(cell, groups.tensor, known.heads)
    return None


def unchecked(cell: Cell) -> str | None:
    """What planning cannot say of a cell's split, and why; None if there is nothing."""
    groups, known = (
        group_layout(cell.strategy, cell.gpus, cell.node_size),
        facts(WORKLOADS.parse(cell.workload)),
    )
    by_blocks = groups.pipeline > 1 or STRATEGIES.parse(cell.strategy).name == "manual"
    asked = known.blocks if by_blocks else known.heads
    if not isinstance(asked, Unknown) or not (by_blocks or groups.tensor > 1):
        return None
    return f"whether {cell.strategy} can split {cell.workload} is {asked}; its ranks find out"


def _cut(cell: Cell, ranks: int, blocks: int) -> str | None:
    spec = STRATEGIES.parse(cell.strategy)
    stages = ranks * (spec.integer("chunks") if spec.positional == "interleaved" else 1)
    if not blocks:
        return f"{cell.workload} has no blocks that a pipeline could be made of"
    if stages > blocks:
        return f"{cell.workload} has {blocks} blocks, too few for {stages} stages"
    return None


def _gathers_bf16(cell: Cell) -> bool:
    return STRATEGIES.parse(cell.strategy).options.get("params") == "bf16"


def _chosen(cell: Cell, blocks: int) -> str | None:
    spec = STRATEGIES.parse(cell.strategy)
    if spec.name != "manual":
        return None
    chosen = blocks_of(str(spec.positional))
    if chosen != blocks:
        return f"{cell.workload} has {blocks} blocks, and {spec.text} chooses for {chosen}"
    return None


def _divide(cell: Cell, parts: int, heads: tuple[int, ...]) -> str | None:
    if not heads:
        return f"{cell.workload} has no layers that tensor parallelism knows how to split"
    for count in heads:
        if count % parts:
            return f"{count} attention heads of {cell.workload} do not divide by {parts}"
    return None
