"""Whether a model can be split as a strategy wants to: what neither strategies nor workloads know alone."""

from __future__ import annotations

from results.cell import Cell
from strategies.catalog import STRATEGIES, group_layout, microbatches
from strategies.fsdp.block_choices import blocks_of
from workloads.catalog import WORKLOADS, facts


def refusal(cell: Cell) -> str | None:
    """Why a cell's model does not go into so many parts, for the report; None if it does.

    Of a `py:` workload only the worker learns it.
    """
    groups = group_layout(cell.strategy, cell.gpus, cell.node_size)
    known = facts(WORKLOADS.parse(cell.workload))
    if groups.pipeline > 1 and known.blocks is not None:
        if (reason := _cut(cell, groups.pipeline, known.blocks)) is not None:
            return reason
    if (reason := _chosen(cell, known.blocks)) is not None:
        return reason
    if known.family == "resnet" and cell.device == "cpu" and _gathers_bf16(cell):
        return f"on CPU torch has no BatchNorm for {cell.strategy}: leave params=bf16 out"
    if cell.micro_batch // microbatches(cell.strategy) < known.minimum_batch:
        return f"BatchNorm of {cell.workload} needs at least {known.minimum_batch} samples in a microbatch"
    if groups.tensor > 1 and known.heads is not None:
        return _divide(cell, groups.tensor, known.heads)
    return None


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


def _chosen(cell: Cell, blocks: int | None) -> str | None:
    spec = STRATEGIES.parse(cell.strategy)
    if spec.name != "manual" or blocks is None:
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
