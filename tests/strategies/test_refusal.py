"""What makes no sense, and why; and that nothing of the catalogs is out of reach."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from harness.plan.expand import expand
from harness.plan.request import StudyFile, make_request
from results.cell import Cell
from results.spec import Catalog, Entry
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STANDS_ON, STRATEGIES
from strategies.compression.build import build_compressor
from strategies.refusal import refusal

ONE = "on 1 there is nothing to exchange, and single is the same step"
NEIGHBOUR = "and a ring goes to the neighbour alone"
SUM = "and a tree can only sum"
OVERFLOW = "which {} would keep; use bf16"


def cell_of(**fields: object) -> Cell:
    """A cell on two CPU ranks that every rule lets through."""
    base: dict[str, object] = {
        "workload": "mlp",
        "dataset": "synthetic",
        "strategy": "ddp",
        "gpus": 2,
        "micro_batch": 8,
        "device": "cpu",
        "backend": "gloo",
        "optimizer": "sgd:momentum=0.0",
    }
    return Cell(**(base | fields))  # type: ignore[arg-type]


CUDA = {"device": "cuda", "backend": "nccl"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"strategy": "single"}, "single runs on exactly 1"),
        (
            {"strategy": "single", "gpus": 1, "compression": "bf16"},
            "single exchanges nothing that could be compressed or collected",
        ),
        (
            {"strategy": "single", "gpus": 1, "collective": "ring"},
            "single exchanges nothing that could be compressed or collected",
        ),
        ({"gpus": 1}, f"ddp needs at least 2: {ONE}"),
        ({"strategy": "scratch-ddp", "gpus": 1}, f"scratch-ddp needs at least 2: {ONE}"),
        ({"strategy": "local-sgd:4", "gpus": 1}, f"local-sgd needs at least 2: {ONE}"),
        ({"strategy": "ddp:static_graph=true", "accumulation": 2}, "does not go with accumulation"),
        ({"strategy": "ddp:find_unused=true", "compression": "bf16"}, "scratch-ddp:find_unused=true waits"),
        ({"strategy": "ddp:find_unused=true", "collective": "ring"}, "scratch-ddp:find_unused=true waits"),
        ({"strategy": "local-sgd:4", "precision": "fp16"}, "lets every rank scale its loss on its own"),
        ({"strategy": "local-sgd:4", "compression": "dgc:0.01"}, "local-sgd exchanges differences"),
        ({"precision": "tf32"}, "tf32 exists on CUDA devices alone"),
        ({"backend": "nccl"}, "nccl moves data between CUDA devices alone; use gloo"),
        ({"strategy": "scratch-ddp", "compression": "torch-powersgd:4"}, "powersgd goes with all"),
        ({"collective": "ring", "compression": "torch-powersgd:4"}, "powersgd goes with all"),
        ({"compression": "dgc:0.01", "optimizer": "sgd"}, "use --optimizer sgd:momentum=0"),
        ({"compression": "dgc:0.01", "optimizer": "adamw"}, "use --optimizer sgd:momentum=0"),
        ({"precision": "fp16", "compression": "topk:0.01"}, OVERFLOW.format("topk")),
        ({"precision": "fp16", "compression": "randomk:0.01"}, OVERFLOW.format("randomk")),
        ({"precision": "fp16", "compression": "powersgd:4"}, OVERFLOW.format("powersgd")),
        ({"precision": "fp16", "compression": "torch-powersgd:4"}, OVERFLOW.format("torch-powersgd")),
        ({"precision": "fp16", "compression": "int8"}, OVERFLOW.format("int8")),
        ({"precision": "fp16", "compression": "signsgd"}, OVERFLOW.format("signsgd")),
        ({"precision": "fp16", "compression": "dgc:0.01"}, OVERFLOW.format("dgc")),
        (
            {"strategy": "scratch-ddp:find_unused=true", "compression": "topk:0.01"},
            "drops the sum of a parameter that no replica used, and with it what topk:0.01 kept for it",
        ),
        ({"collective": "hierarchical", "compression": "dgc:0.01"}, "one rank sends what all have"),
        ({"collective": "ring", "device": "cuda"}, "ring is built from sends between CPU ranks"),
        ({"collective": "ring", **CUDA}, "ring is built from sends between CPU ranks"),
        ({"collective": "tree", **CUDA}, "tree is built from sends between CPU ranks"),
        ({"collective": "ring", "compression": "int8"}, f"int8 stands on an all-to-all, {NEIGHBOUR}"),
        ({"collective": "ring", "compression": "signsgd"}, f"signsgd stands on an all-to-all, {NEIGHBOUR}"),
        ({"collective": "tree", "compression": "topk:0.01"}, f"topk stands on an all-gather, {SUM}"),
        ({"collective": "tree", "compression": "dgc:0.01"}, f"dgc stands on an all-gather, {SUM}"),
        ({"collective": "tree", "compression": "int8"}, f"int8 stands on an all-to-all, {SUM}"),
        ({"collective": "tree", "compression": "signsgd"}, f"signsgd stands on an all-to-all, {SUM}"),
        ({"collective": "hierarchical", "compression": "powersgd:4"}, "powersgd needs whole matrices"),
        (
            {"collective": "hierarchical", "gpus": 5, "node_size": 2},
            "5 ranks do not fill nodes of 2, and shards need equal nodes; hierarchical:via=leaders takes any",
        ),
        ({"strategy": "zero1", "compression": "bf16"}, "zero1 is torch's own, all-reduce and broadcasts"),
        ({"strategy": "zero1", "collective": "ring"}, "zero1 is torch's own, all-reduce and broadcasts"),
        (
            {"strategy": "fsdp:tp=2", "gpus": 4, "compile": True},
            "in the middle of its layers, which the compiler",
        ),
        (
            {"strategy": "hsdp:tp=2", "gpus": 8, "node_size": 4, "compile": True},
            "in the middle of its layers",
        ),
        ({"strategy": "scratch-fsdp", "compile": True}, "which compiled code does not see; use fsdp"),
        (
            {"strategy": "fsdp", "compression": "fp16"},
            "fsdp averages gradients into shards by one collective",
        ),
        ({"strategy": "hsdp", "collective": "tree"}, "hsdp averages gradients into shards by one collective"),
        ({"strategy": "scratch-fsdp", "collective": "ring"}, "scratch-fsdp averages gradients into shards"),
        (
            {"strategy": "fsdp:params=bf16"},
            "fsdp:params=bf16 computes in bf16: it goes with --precision bf16",
        ),
        ({"strategy": "scratch-fsdp:params=bf16", "precision": "fp16"}, "it goes with --precision bf16"),
        ({"strategy": "fsdp", "memory_format": "channels_last"}, "and channels_last is another order"),
        ({"strategy": "manual:keep.offload+reshard", "activation_checkpointing": True}, ".checkpoint there"),
        (
            {"strategy": "manual:reshard*4"},
            "manual:reshard*4 chooses alike for all blocks: fsdp is the same",
        ),
        (
            {"strategy": "manual:keep"},
            "manual:keep chooses alike for all blocks: fsdp:reshard=false is the same",
        ),
        (
            {"strategy": "manual:keep+keep*3:tp=2:prefetch=1", "gpus": 4},
            "for all blocks: fsdp:prefetch=1:reshard=false:tp=2 is the same",
        ),
        ({"strategy": "hsdp", "gpus": 5, "node_size": 2}, "a number of ranks that 2 divides, not 5"),
        ({"strategy": "fsdp:tp=2"}, "fsdp:tp=2 leaves nothing to shard on 2: tp is the same"),
        ({"strategy": "fsdp:tp=2", "gpus": 3}, "fsdp:tp=2 needs a number of ranks that 2 divides, not 3"),
        (
            {"strategy": "pipeline:gpipe:dp=3", "gpus": 8},
            "pipeline:gpipe:dp=3 needs a number of ranks that 3 divides, not 8",
        ),
        ({"strategy": "pipeline:gpipe", "gpus": 1}, f"pipeline needs at least 2: {ONE}"),
        ({"strategy": "tp", "gpus": 1}, f"tp needs at least 2: {ONE}"),
        (
            {"strategy": "pipeline:gpipe", "micro_batch": 6},
            "a micro-batch of 6 does not divide into 4 microbatches",
        ),
        ({"strategy": "pipeline:gpipe:dp=2"}, "pipeline:gpipe:dp=2 leaves 1 stage on 2: that is ddp"),
        ({"strategy": "pipeline:interleaved:chunks=1"}, "chunks of at least 2; with 1 it is 1f1b"),
        (
            {"strategy": "pipeline:interleaved", "gpus": 3},
            "pipeline:interleaved goes in rounds of 3 microbatches, and 4 are none",
        ),
        ({"strategy": "pipeline:gpipe:chunks=3"}, "gpipe has one stage a rank"),
        (
            {"strategy": "pipeline:1f1b", "device": "cuda", "backend": "nccl"},
            "pipeline:1f1b sends and receives at once",
        ),
        (
            {"strategy": "pipeline:interleaved:microbatches=2", "device": "cuda", "backend": "nccl"},
            "pipeline:gpipe does one after the other",
        ),
        (
            {"strategy": "pipeline:1f1b:microbatches=2", "gpus": 4},
            "pipeline:1f1b keeps 4 stages busy with at least as many microbatches, not 2",
        ),
        ({"strategy": "pipeline:gpipe", "compression": "bf16"}, "pipeline exchanges activations"),
        ({"strategy": "tp", "collective": "ring"}, "tp exchanges activations"),
        ({"strategy": "pipeline:1f1b", "compile": True}, "pipeline talks in the middle of the model"),
        ({"strategy": "tp", "compile": True}, "tp talks in the middle of the model"),
        ({"strategy": "tp", "memory_format": "channels_last"}, "tp sends activations row by row"),
        ({"strategy": "pipeline:gpipe", "memory_format": "channels_last"}, "pipeline sends activations row"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(fields: dict[str, object], reason: str) -> None:
    found = refusal(cell_of(**fields))
    assert found is not None
    assert reason in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strategy": "single", "gpus": 1},
        {"strategy": "ddp:static_graph=true"},
        {"strategy": "ddp:find_unused=true"},
        {"strategy": "ddp:find_unused=true", "accumulation": 2},
        {"strategy": "scratch-ddp:find_unused=true", "compression": "bf16", "collective": "ring"},
        {"strategy": "scratch-ddp", "accumulation": 2},
        {"strategy": "local-sgd:4", "precision": "bf16"},
        {"precision": "tf32", **CUDA},
        {"collective": "hierarchical", **CUDA},
        {"compression": "torch-powersgd:4"},
        {"compression": "dgc:0.01"},
        {"compression": "topk:0.01", "optimizer": "adamw"},
        {"precision": "fp16"},
        {"precision": "fp16", "compression": "fp16"},
        {"precision": "fp16", "compression": "bf16"},
        {"precision": "bf16", "compression": "int8"},
        {"collective": "hierarchical:via=leaders", "compression": "powersgd:4"},
        {"collective": "hierarchical:via=leaders", "gpus": 5, "node_size": 2},
        {"collective": "hierarchical", "gpus": 6, "node_size": 2},
        {"collective": "hierarchical", "gpus": 3, "node_size": 4},
        {"collective": "ring", "gpus": 5, "node_size": 2},
        {"strategy": "zero1", "precision": "fp16", "compile": True},
        {"strategy": "fsdp", "compile": True},
        {"strategy": "fsdp:tp=2", "gpus": 4},
        {"strategy": "fsdp:params=bf16", "precision": "bf16"},
        {"strategy": "scratch-fsdp:stage=1"},
        {"strategy": "hsdp", "gpus": 4, "node_size": 2},
        {"strategy": "manual:keep*3+reshard"},
        {"strategy": "manual:keep.checkpoint*4"},
        {"strategy": "manual:reshard.offload*4"},
        {"strategy": "hsdp:tp=2", "gpus": 8, "node_size": 4},
        {"strategy": "pipeline:gpipe:dp=2", "gpus": 4},
        {"strategy": "pipeline:gpipe:microbatches=2", "gpus": 4},
        {"strategy": "pipeline:1f1b", "gpus": 4},
        {"strategy": "pipeline:interleaved:chunks=3"},
        {"strategy": "pipeline:interleaved:microbatches=8", "gpus": 4},
        {"strategy": "tp", "gpus": 4, "accumulation": 2},
    ],
)
def test_what_is_just_beside_it_is_not(fields: dict[str, object]) -> None:
    assert refusal(cell_of(**fields)) is None


# What a compressor goes over: its sum (all-reduce) goes everywhere, an all-gather not up a tree, an
# all-to-all not around a ring either; matrices are not cut into shards; torch's hook has torch's all-reduce.
EVERYWHERE = {"default", "ring", "tree", "hierarchical"}
GOES_OVER = {
    "none": EVERYWHERE,
    "fp16": EVERYWHERE,
    "bf16": EVERYWHERE,
    "topk": EVERYWHERE - {"tree"},
    "randomk": EVERYWHERE,
    "powersgd": EVERYWHERE - {"hierarchical"},
    "torch-powersgd": {"default"},
    "int8": {"default", "hierarchical"},
    "signsgd": {"default", "hierarchical"},
    "dgc": EVERYWHERE - {"tree", "hierarchical"},
}
NOT_WITH = {
    "ddp": set[str](),
    "scratch-ddp": {"torch-powersgd"},
    "local-sgd": {"torch-powersgd", "dgc"},
}


EXAMPLES = {"pipeline": "pipeline:gpipe", "manual": "manual:reshard*2+keep*2"}


def _kinds(catalog: Catalog) -> list[Entry]:
    """Entries that are no name of another one, as `auto` is too, whatever it comes to."""
    return [entry for entry in catalog if entry.alias_of is None and entry.name != "auto"]


def _written(entry: Entry) -> str:
    """An entry as a user writes it: with a value where one must be given."""
    if entry.positional is None or entry.name in EXAMPLES:
        return EXAMPLES.get(entry.name, entry.name)
    return f"{entry.name}:{4 if entry.positional.kind == 'int' else 0.01}"


def _names(catalog: Catalog, text: str) -> str:
    return catalog.parse(text).name


def test_the_whole_product_is_cells_and_reasons() -> None:
    options = StudyFile(
        workload="gpt-nano",
        gpus="1,4",
        node_size=2,
        device="cpu",
        optimizer="sgd:momentum=0",
        strategy=[_written(entry) for entry in _kinds(STRATEGIES)],
        compression=[_written(entry) for entry in COMPRESSIONS],
        collective=[_written(entry) for entry in COLLECTIVES],
    )
    request = make_request(options, machine_has_cuda=False, source_folder=Path())
    plan = expand(request, study="s", created_at="t")
    cells = {
        (
            _names(STRATEGIES, cell.strategy),
            _names(COMPRESSIONS, cell.compression),
            _names(COLLECTIVES, cell.collective),
            cell.gpus,
        )
        for cell in plan.cells
    }
    expected = {
        (strategy, compression, collective, 4)
        for strategy, excepted in NOT_WITH.items()
        for compression, collectives in GOES_OVER.items()
        for collective in collectives
        if compression not in excepted
    }
    names = [entry.name for entry in _kinds(STRATEGIES)]
    # The others exchange something else than gradients, or as torch does it.
    alone = {(name, "none", "default", 4) for name in names if name not in ("single", *NOT_WITH)}
    assert cells == expected | {("single", "none", "default", 1)} | alone
    every = product(names, COMPRESSIONS.entries, COLLECTIVES.entries, (1, 4))
    assert len(plan.cells) + len(plan.skips) == len(list(every))
    assert all(skip.reason for skip in plan.skips)
    # Nothing is in a catalog in vain.
    for place, catalog in enumerate((STRATEGIES, COMPRESSIONS, COLLECTIVES)):
        named = {entry.name for entry in _kinds(catalog)}
        assert {cell[place] for cell in cells} == named


@pytest.mark.parametrize("entry", list(COMPRESSIONS), ids=lambda entry: entry.name)
def test_the_catalog_says_what_a_compressor_stands_on(entry: Entry) -> None:
    if entry.name == "torch-powersgd":
        assert entry.name not in STANDS_ON
        return
    need = build_compressor(_written(entry), seed=0, rank=0).need
    assert STANDS_ON.get(entry.name, "all-reduce") == need.replace("_", "-")
    assert set(STANDS_ON.values()) == {"all-gather", "all-to-all"}
