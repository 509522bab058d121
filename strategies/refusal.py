"""Which combinations make no sense, and why; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable

from results.cell import Cell
from results.errors import SpecError
from results.spec import Spec
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STANDS_ON, STRATEGIES, group_layout
from strategies.fsdp.block_choices import BlockChoice, read_runs

_DEFAULT_CHUNKS = STRATEGIES.entries["pipeline"].options["chunks"].default
LOSSLESS_ENOUGH = ("none", "fp16", "bf16")
"""Compressors that hand on an overflow of fp16's scaled gradients, and keep nothing of it."""


def refusal(cell: Cell) -> str | None:
    """Why a cell makes no sense, as a sentence for the report; None if it does."""
    strategy = STRATEGIES.parse(cell.strategy)
    compression, collective = COMPRESSIONS.parse(cell.compression), COLLECTIVES.parse(cell.collective)
    return (
        _strategy_alone(cell, strategy)
        or _machine(cell)
        or _compressed(cell, strategy, compression)
        or _collected(cell, strategy, collective, compression)
    )


def _strategy_alone(cell: Cell, strategy: Spec) -> str | None:
    rule = _RULES.get(strategy.name)
    if strategy.name != "single" and cell.gpus < 2:
        why = "on 1 there is nothing to exchange, and single is the same step"
        return f"{strategy.name} needs at least 2: {why}"
    reason = rule(cell, strategy) if rule is not None else None
    return reason or _grouping(cell)


def _grouping(cell: Cell) -> str | None:
    try:
        group_layout(cell.strategy, cell.gpus, cell.node_size)
    except SpecError as error:
        return str(error)
    return None


def _single(cell: Cell, strategy: Spec) -> str | None:
    if cell.gpus != 1:
        return "single runs on exactly 1"
    if (cell.compression, cell.collective) != ("none", "default"):
        return "single exchanges nothing that could be compressed or collected"
    return None


def _ddp(cell: Cell, strategy: Spec) -> str | None:
    if strategy.flag("static_graph") and cell.accumulation > 1:
        return "ddp:static_graph=true does not go with accumulation: torch wants the first backward in sync"
    if strategy.flag("find_unused") and (cell.compression, cell.collective) != ("none", "default"):
        return (
            "ddp:find_unused=true exchanges which parameters were used at any time, between the steps of an "
            "exchange that is not its own; scratch-ddp:find_unused=true waits for its turn"
        )
    return None


def _local_sgd(cell: Cell, strategy: Spec) -> str | None:
    if cell.precision == "fp16":
        return "local-sgd:... lets every rank scale its loss on its own; use bf16"
    if cell.compression.startswith("dgc"):
        return "dgc corrects the momentum of gradients, and local-sgd exchanges differences of parameters"
    return None


def _scratch_ddp(cell: Cell, strategy: Spec) -> str | None:
    if strategy.flag("find_unused") and COMPRESSIONS.parse(cell.compression).name not in LOSSLESS_ENOUGH:
        return (
            f"scratch-ddp:find_unused=true drops the sum of a parameter that no replica used, and with it "
            f"what {cell.compression} kept for it; use none, fp16 or bf16"
        )
    return None


def _zero1(cell: Cell, strategy: Spec) -> str | None:
    if (cell.compression, cell.collective) != ("none", "default"):
        return "zero1 is torch's own, all-reduce and broadcasts: no other collective, and no compressor"
    if cell.memory_format != "contiguous":
        return "zero1 lays parameters out row by row in its buffers, and channels_last is another order"
    return None


def _fsdp(cell: Cell, strategy: Spec) -> str | None:
    if cell.gpus == strategy.integer("tp"):
        return f"{strategy.text} leaves nothing to shard on {cell.gpus}: tp is the same"
    if cell.compile and strategy.integer("tp") > 1:
        return f"{strategy.text} talks in the middle of its layers, which the compiler does not see through"
    return _sharded(cell, strategy)


def _manual(cell: Cell, strategy: Spec) -> str | None:
    if cell.activation_checkpointing:
        return "manual says of each block whether it is checkpointed: write .checkpoint there"
    return _fsdp(cell, strategy) or _alike(strategy)


def _alike(strategy: Spec) -> str | None:
    """Which fsdp makes the same choice for all blocks."""
    choices = str(strategy.positional)
    same = {BlockChoice(reshard=True): "fsdp", BlockChoice(reshard=False): "fsdp:reshard=false"}
    [run, *others] = read_runs(choices)
    if others or run.choice not in same:
        return None
    options = strategy.text.removeprefix(f"manual:{choices}")
    plain = STRATEGIES.parse(same[run.choice] + options).text
    return f"{strategy.text} chooses alike for all blocks: {plain} is the same"


def _scratch_fsdp(cell: Cell, strategy: Spec) -> str | None:
    if cell.compile:
        return "scratch-fsdp puts parameters away between uses, which compiled code does not see; use fsdp"
    return _sharded(cell, strategy)


def _sharded(cell: Cell, strategy: Spec) -> str | None:
    name = strategy.name
    if (cell.compression, cell.collective) != ("none", "default"):
        return f"{name} averages gradients into shards by one collective: none other, and no compressor"
    if strategy.word("params") == "bf16" and cell.precision != "bf16":
        return f"{name}:params=bf16 computes in bf16: it goes with --precision bf16"
    if cell.memory_format != "contiguous":
        return f"{name} lays shards out row by row, and channels_last is another order"
    return None


def _pipeline(cell: Cell, strategy: Spec) -> str | None:
    pieces, stages = strategy.integer("microbatches"), cell.gpus // strategy.integer("dp")
    if cell.backend == "nccl" and strategy.positional != "gpipe":
        # NCCL needs the two as one operation, which torch makes of them for its own groups alone.
        return (
            f"pipeline:{strategy.positional} sends and receives at once, which NCCL needs as one operation "
            f"and gets as two: it would wait for ever; pipeline:gpipe does one after the other"
        )
    if cell.micro_batch % pieces:
        return f"a micro-batch of {cell.micro_batch} does not divide into {pieces} microbatches"
    if stages < 2:
        return f"{strategy.text} leaves {stages} stage on {cell.gpus}: that is ddp"
    if strategy.positional == "interleaved":
        if strategy.integer("chunks") < 2:
            return "pipeline:interleaved needs chunks of at least 2; with 1 it is 1f1b"
        if pieces % stages:
            return f"pipeline:interleaved goes in rounds of {stages} microbatches, and {pieces} are none"
    elif strategy.integer("chunks") != _DEFAULT_CHUNKS:
        return f"chunks are of pipeline:interleaved; {strategy.positional} has one stage a rank"
    if strategy.positional == "1f1b" and pieces < stages:
        return f"pipeline:1f1b keeps {stages} stages busy with at least as many microbatches, not {pieces}"
    return _split_replica(cell, strategy)


def _tensor(cell: Cell, strategy: Spec) -> str | None:
    return _split_replica(cell, strategy)


def _split_replica(cell: Cell, strategy: Spec) -> str | None:
    if (cell.compression, cell.collective) != ("none", "default"):
        return f"{strategy.name} exchanges activations: no other collective, and no compressor"
    if cell.compile:
        return f"{strategy.name} talks in the middle of the model, which the compiler does not see through"
    if cell.memory_format != "contiguous":
        return f"{strategy.name} sends activations row by row, and channels_last is another order"
    return None


_RULES: dict[str, Callable[[Cell, Spec], str | None]] = {
    "single": _single,
    "ddp": _ddp,
    "scratch-ddp": _scratch_ddp,
    "local-sgd": _local_sgd,
    "fsdp": _fsdp,
    "hsdp": _fsdp,
    "manual": _manual,
    "zero1": _zero1,
    "scratch-fsdp": _scratch_fsdp,
    "pipeline": _pipeline,
    "tp": _tensor,
}


def _machine(cell: Cell) -> str | None:
    if cell.precision == "tf32" and cell.device == "cpu":
        return "tf32 exists on CUDA devices alone"
    if cell.backend == "nccl" and cell.device == "cpu":
        return "nccl moves data between CUDA devices alone; use gloo"
    return None


def _compressed(cell: Cell, strategy: Spec, compression: Spec) -> str | None:
    if compression.name == "torch-powersgd":
        if strategy.name != "ddp" or cell.collective != "default":
            return (
                "torch-powersgd is a hook of torch's ddp with the default collective; powersgd goes with all"
            )
    if compression.name == "dgc":
        optimizer = OPTIMIZERS.parse(cell.optimizer)
        if optimizer.name != "sgd" or optimizer.number("momentum") != 0:
            return "dgc does the momentum itself, before it compresses: use --optimizer sgd:momentum=0"
    if cell.precision == "fp16" and compression.name not in LOSSLESS_ENOUGH:
        return f"fp16 scales its loss until it overflows, which {compression.name} would keep; use bf16"
    return None


def _collected(cell: Cell, strategy: Spec, collective: Spec, compression: Spec) -> str | None:
    need = STANDS_ON.get(compression.name)
    if collective.name in ("ring", "tree") and cell.device == "cuda":
        own = "NCCL has its own: NCCL_ALGO=Ring or Tree"
        return f"{collective.name} is built from sends between CPU ranks; {own}"
    if collective.name == "ring" and need == "all-to-all":
        return f"{compression.name} stands on an all-to-all, and a ring goes to the neighbour alone"
    if collective.name == "tree" and need is not None:
        return f"{compression.name} stands on an {need}, and a tree can only sum"
    if collective.name == "hierarchical" and compression.name == "dgc":
        return "dgc forgets the momentum of what it sent, and for nodes one rank sends what all have"
    if collective.name == "hierarchical" and collective.word("via") == "shards":
        return _shards(cell, compression)
    return None


def _shards(cell: Cell, compression: Spec) -> str | None:
    if compression.name == "powersgd":
        return "powersgd needs whole matrices, and across nodes there are shards; hierarchical:via=leaders"
    if cell.node_size is not None and cell.gpus > cell.node_size and cell.gpus % cell.node_size:
        return (
            f"{cell.gpus} ranks do not fill nodes of {cell.node_size}, and shards need equal nodes; "
            f"hierarchical:via=leaders takes any"
        )
    return None
