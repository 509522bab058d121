"""Which combinations make no sense, and why; nothing here imports torch.

What one strategy alone refuses is in its facts; here is what holds for all.
"""

from __future__ import annotations

from results.cell import Cell
from results.errors import SpecError
from results.spec import Spec
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from strategies.compression.catalog import LOSSLESS_ENOUGH, STANDS_ON
from strategies.facts import StrategyFacts


def refusal(cell: Cell) -> str | None:
    """Why a cell makes no sense, as a sentence for the report; None if it does."""
    strategy = STRATEGIES.facts(cell.strategy)
    compression, collective = COMPRESSIONS.parse(cell.compression), COLLECTIVES.parse(cell.collective)
    return (
        _ranks(cell, strategy)
        or strategy.refusal(cell)
        or _fixed(cell, strategy)
        or _grouping(cell, strategy)
        or _averaged(cell, strategy)
        or _machine(cell)
        or _compressed(cell, strategy.spec, compression)
        or _collected(cell, strategy.spec, collective, compression)
    )


def _ranks(cell: Cell, strategy: StrategyFacts) -> str | None:
    if strategy.distributed and cell.gpus < 2:
        return f"{strategy.name} needs at least 2 ranks; on 1 use single"
    if not strategy.distributed and cell.gpus != 1:
        return f"{strategy.name} runs on 1 rank alone; on more use ddp"
    return None


def _fixed(cell: Cell, strategy: StrategyFacts) -> str | None:
    """What a strategy says that it does not go with, as it does that itself or otherwise."""
    name = strategy.name
    if strategy.fixed_exchange and (cell.compression, cell.collective) != ("none", "default"):
        return (
            f"{name} goes with --compression none and --collective default alone, not {cell.compression} and "
            f"{cell.collective}: {strategy.fixed_exchange}"
        )
    if strategy.contiguous and cell.memory_format != "contiguous":
        return f"{name} goes with --memory-format contiguous alone: {strategy.contiguous}"
    if strategy.eager and cell.compile:
        return f"{name} does not go with --compile: {strategy.eager}"
    return None


def _grouping(cell: Cell, strategy: StrategyFacts) -> str | None:
    try:
        strategy.groups(cell.gpus, cell.node_size)
    except SpecError as error:
        return str(error)
    return None


def _averaged(cell: Cell, strategy: StrategyFacts) -> str | None:
    """What does not go with the averages that a strategy promises."""
    promise = strategy.promise
    if promise.of == "parameters" and cell.precision == "fp16":
        return (
            f"{strategy.name} does not go with --precision fp16: each rank would scale its own loss; use bf16"
        )
    if not promise.equal and cell.compression != "none":
        return (
            f"{strategy.name} goes with --compression none alone, not {cell.compression}: without equal "
            f"replicas no proof can tell what was lost"
        )
    return None


def _machine(cell: Cell) -> str | None:
    if cell.precision == "tf32" and cell.device == "cpu":
        return "--precision tf32 goes with --device cuda alone"
    if cell.backend == "nccl" and cell.device == "cpu":
        return "--backend nccl goes with --device cuda alone; use gloo"
    return None


def _compressed(cell: Cell, strategy: Spec, compression: Spec) -> str | None:
    if compression.name == "torch-powersgd":
        if strategy.name != "ddp" or cell.collective != "default":
            return (
                f"torch-powersgd goes with ddp and --collective default alone, not {strategy.text} and "
                f"{cell.collective}: it is a hook of torch's ddp; use powersgd"
            )
    if compression.name == "dgc":
        optimizer = OPTIMIZERS.parse(cell.optimizer)
        if optimizer.name != "sgd" or optimizer.number("momentum") != 0:
            return (
                f"dgc goes with --optimizer sgd:momentum=0 alone, not {cell.optimizer}: it applies momentum "
                f"itself, before it compresses"
            )
    if cell.precision == "fp16" and compression.name not in LOSSLESS_ENOUGH:
        return (
            f"--precision fp16 does not go with {compression.name}, whose residual would keep an overflow of "
            f"the scaled loss; use --precision bf16"
        )
    return None


def _collected(cell: Cell, strategy: Spec, collective: Spec, compression: Spec) -> str | None:
    need = STANDS_ON.get(compression.name)
    if collective.name in ("ring", "tree") and cell.device == "cuda":
        return (
            f"{collective.name} goes with --device cpu alone, being built from sends between CPU ranks; on "
            f"CUDA use --collective default and set NCCL_ALGO=Ring or Tree"
        )
    if need is not None and (
        collective.name == "tree" or (collective.name == "ring" and need == "all-to-all")
    ):
        return f"{compression.name} needs {need}, which {collective.name} does not implement"
    if collective.name == "hierarchical" and compression.name == "dgc":
        return (
            "dgc does not go with hierarchical: it forgets the momentum of what a rank has sent, and across "
            "nodes one rank sends for all of its node"
        )
    if collective.name == "hierarchical" and collective.word("via") == "shards":
        return _shards(cell, compression)
    return None


def _shards(cell: Cell, compression: Spec) -> str | None:
    if compression.name == "powersgd":
        return (
            "powersgd needs whole matrices, hierarchical:via=shards cuts them: use hierarchical:via=leaders"
        )
    if cell.node_size is not None and cell.gpus > cell.node_size and cell.gpus % cell.node_size:
        return (
            f"for hierarchical:via=shards ranks ({cell.gpus}) must be a multiple of --node-size "
            f"({cell.node_size}); use hierarchical:via=leaders"
        )
    return None
