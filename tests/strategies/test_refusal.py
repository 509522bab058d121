"""Impossible combinations are refused with a reason, and every entry of the catalogs can be reached."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from builders import a_cell, a_request
from torch import Tensor

from harness.plan.expand import expand
from harness.plan.points import misplaced, unsplittable
from harness.plan.study_file import StudyFile
from results.cell import Cell
from results.spec import Catalog, Entry
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from strategies.compression.catalog import build_compressor
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.refusal import refusal


def cell_of(text: str, **others: object) -> Cell:
    """A cell on two CPU ranks that passes every rule, with the fields of `text`: `gpus=4 compile=true`."""
    given = dict(field.split("=", 1) for field in text.split())
    fields = {
        name: True if value == "true" else int(value) if value.isdigit() else value
        for name, value in given.items()
    }
    return a_cell(**{"optimizer": "sgd:momentum=0.0"} | others | fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("strategy=single", "use ddp"),
        ("strategy=single gpus=1 compression=bf16", "not bf16 and default"),
        ("strategy=single gpus=1 collective=ring", "not none and ring"),
        ("strategy=ddp:static_graph=true accumulation=2", "--accumulation 1"),
        ("strategy=ddp:find_unused=true compression=bf16", "use scratch-ddp:find_unused=true"),
        ("strategy=ddp:find_unused=true collective=ring", "use scratch-ddp:find_unused=true"),
        ("strategy=local-sgd:4 precision=fp16", "use bf16"),
        ("strategy=local-sgd:4:outer_lr=0.5", "add outer=nesterov, or leave outer_lr out"),
        ("strategy=local-sgd:4:outer_momentum=0.5", "add outer=nesterov, or leave outer_momentum out"),
        ("strategy=local-sgd:4 compression=dgc:0.01", "differences of parameters"),
        ("precision=tf32", "--device cuda"),
        ("backend=nccl", "--device cuda"),
        ("strategy=scratch-ddp compression=torch-powersgd:4", "not scratch-ddp and default"),
        ("collective=ring compression=torch-powersgd:4", "not ddp and ring"),
        ("compression=dgc:0.01 optimizer=sgd", "sgd:momentum=0"),
        ("compression=dgc:0.01 optimizer=adamw", "sgd:momentum=0"),
        ("strategy=scratch-ddp:find_unused=true compression=topk:0.01", "none, fp16 or bf16"),
        ("collective=hierarchical compression=dgc:0.01", "use --collective default"),
        ("collective=ring device=cuda", "--device cpu"),
        ("collective=ring device=cuda backend=nccl", "--device cpu"),
        ("collective=tree device=cuda backend=nccl", "--device cpu"),
        ("collective=ring compression=int8", "int8 needs all-to-all, which ring does not"),
        ("collective=ring compression=signsgd", "signsgd needs all-to-all, which ring does not"),
        ("collective=tree compression=topk:0.01", "topk needs all-gather, which tree does not"),
        ("collective=tree compression=dgc:0.01", "dgc needs all-gather, which tree does not"),
        ("collective=tree compression=int8", "int8 needs all-to-all, which tree does not"),
        ("collective=tree compression=signsgd", "signsgd needs all-to-all, which tree does not"),
        ("collective=hierarchical compression=powersgd:4", "powersgd needs whole matrices"),
        ("collective=hierarchical gpus=5 node_size=2", "use hierarchical:via=leaders"),
        ("strategy=zero1 compression=bf16", "zero1 needs --compression none and --collective default"),
        ("strategy=zero1 collective=ring", "zero1 needs --compression none and --collective default"),
        ("strategy=fsdp:tp=2 gpus=4 compile=true", "leave --compile out"),
        ("strategy=hsdp:tp=2 gpus=8 node_size=4 compile=true", "torch.compile cannot trace"),
        ("strategy=scratch-fsdp compile=true", "torch.compile cannot trace; use fsdp"),
        ("strategy=fsdp compression=fp16", "not fp16 and default"),
        ("strategy=hsdp collective=tree", "not none and tree"),
        ("strategy=scratch-fsdp collective=ring", "averages gradients into shards by its own collective"),
        ("strategy=fsdp:params=bf16", "--precision bf16"),
        ("strategy=scratch-fsdp:params=bf16 precision=fp16", "--precision bf16"),
        ("strategy=fsdp memory_format=channels_last", "--memory-format contiguous"),
        ("strategy=manual:keep.offload+reshard activation_checkpointing=true", "write .checkpoint behind"),
        ("strategy=manual:reshard*4", "use fsdp,"),
        ("strategy=manual:keep", "use fsdp:reshard=false,"),
        ("strategy=manual:keep+keep*3:tp=2:prefetch=1 gpus=4", "use fsdp:prefetch=1:reshard=false:tp=2,"),
        ("strategy=hsdp gpus=5 node_size=2", "a multiple of 2 ranks, not 5"),
        ("strategy=fsdp:tp=2", "use tp,"),
        ("strategy=fsdp:tp=2 gpus=3", "a multiple of 2 ranks, not 3"),
        ("strategy=pipeline:gpipe:dp=3 gpus=8", "a multiple of 3 ranks, not 8"),
        ("strategy=pipeline:gpipe:pp=3 gpus=8", "a multiple of 3 ranks, not 8"),
        ("strategy=pipeline:gpipe:pp=2:dp=2 gpus=4", "leave dp out"),
        ("strategy=pipeline:gpipe:pp=2:shard=4 gpus=12", "a multiple of 8 ranks, not 12"),
        ("strategy=pipeline:gpipe:reshard=true", "add shard=2"),
        ("strategy=pipeline:gpipe:attention=gathered", "add cp=2"),
        ("strategy=pipeline:gpipe:sequence=true", "add tp=2"),
        ("strategy=pipeline:gpipe:cp=2:pp=2:tp=2 gpus=4", "a multiple of 8 ranks, not 4"),
        ("strategy=pipeline:zbv:shard=2:reshard=true gpus=4", "use pipeline:interleaved"),
        ("strategy=fsdp:ep=3 gpus=4", "use an ep that divides 4"),
        ("strategy=hsdp:ep=4 gpus=4 node_size=2", "use an ep that divides 2"),
        ("strategy=pipeline:1f1b:ep=4:pp=2:shard=2 gpus=4", "use an ep that divides 2"),
        ("strategy=fsdp:ep=2:tp=2 gpus=4", "add sequence=true"),
        ("strategy=pipeline:1f1b:ep=2:pp=2:tp=2 gpus=4", "add sequence=true"),
        ("strategy=pipeline:1f1b:ep=2:pp=2:sequence=true:tp=4 gpus=8", "use ep=4, or add shard=2"),
        ("strategy=fsdp:ep=2 compile=true", "leave --compile out"),
        *(
            (f"strategy={name} gpus=1", f"{name.partition(':')[0]} needs at least 2 ranks; on 1 use single")
            for name in (
                *("ddp", "scratch-ddp", "local-sgd:4", "pipeline:gpipe"),
                *("tp", "zero1", "fsdp", "manual:keep+reshard"),
            )
        ),
        ("strategy=zero1 memory_format=channels_last", "--memory-format contiguous"),
        ("strategy=manual:keep+reshard:tp=2", "use tp,"),
        ("strategy=pipeline:gpipe micro_batch=6", "microbatches that divide 6"),
        ("strategy=pipeline:gpipe:dp=2", "1 stage"),
        ("strategy=pipeline:interleaved:chunks=1", "use pipeline:1f1b"),
        ("strategy=pipeline:interleaved:microbatches=7 gpus=3 micro_batch=7", "use microbatches=9"),
        ("strategy=pipeline:zero-bubble:microbatches=7 gpus=3 micro_batch=7", "use microbatches=9"),
        ("strategy=pipeline:zbv activation_checkpointing=true", "use pipeline:interleaved"),
        ("strategy=pipeline:zero-bubble activation_checkpointing=true", "use pipeline:interleaved"),
        ("strategy=pipeline:dualpipev activation_checkpointing=true", "use pipeline:interleaved"),
        ("strategy=pipeline:dualpipev:shard=2:reshard=true gpus=4", "use pipeline:interleaved"),
        ("strategy=pipeline:dualpipev gpus=3 micro_batch=4", "use microbatches=6, or pipeline:zbv"),
        ("strategy=pipeline:looped-bfs:chunks=1", "use pipeline:gpipe"),
        *(
            (f"strategy={name} precision=float8 gpus=4", "a rank would scale its part of a row; use bf16")
            for name in ("tp", "fsdp:tp=2", "pipeline:1f1b:pp=2:tp=2")
        ),
        ("strategy=deepspeed precision=float8", "which was not tried; use bf16"),
        ("strategy=fsdp:params=bf16 precision=fp16", "needs --precision bf16 or float8, not fp16"),
        ("strategy=pipeline:zbv compile=true", "leave --compile out"),
        ("strategy=pipeline:dualpipev compile=true", "leave --compile out"),
        ("strategy=pipeline:gpipe:chunks=3", "one stage a rank; leave chunks out"),
        ("strategy=pipeline:zbv:chunks=3", "two stages a rank; leave chunks out"),
        ("strategy=pipeline:1f1b:microbatches=2 gpus=4", "use microbatches=4, or pipeline:gpipe"),
        ("strategy=pipeline:gpipe compression=bf16", "pipeline needs --compression none"),
        ("strategy=tp collective=ring", "tp needs --compression none"),
        ("strategy=pipeline:1f1b compile=true", "--compile"),
        ("strategy=tp compile=true", "leave --compile out"),
        ("strategy=fsdp:sequence=true", "splits no layers: add tp=2"),
        ("strategy=tp memory_format=channels_last", "activations row by row"),
        ("strategy=pipeline:gpipe memory_format=channels_last", "activations row by row"),
    ],
)
def test_an_impossible_combination_is_refused_with_its_reason(fields, reason) -> None:
    found = refusal(cell_of(fields))
    assert reason in found.text
    assert "\n" not in found.text
    strategy = cell_of(fields).strategy.partition(":")[0]
    assert found.predicate is None or found.text == f"{strategy} {found.predicate}"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("gpus=4 strategy=hsdp node_size=4", "give a smaller --node-size"),
        ("gpus=4 strategy=hsdp", "give a smaller --node-size"),
        ("gpus=4 strategy=hsdp:tp=2 node_size=2", "give a --node-size of more than 2"),
        ("strategy=manual:keep*2+reshard", "for each of the 4"),
        ("strategy=manual:keep*3+reshard", "None"),
        ("strategy=tp workload=resnet18-32px model_parallel=2", "no layers that tensor parallelism"),
        ("strategy=tp workload=llama-nano gpus=4 model_parallel=4", "2 attention heads of llama-nano do not"),
        ("gpus=2 strategy=fsdp:tp=2:sequence=true", "use tp:sequence=true, which is the same"),
        ("strategy=tp model_parallel=2 precision=fp16 activation_checkpointing=selective", "None"),
    ],
)
def test_a_layout_that_the_model_or_the_nodes_rule_out_is_refused(fields, reason) -> None:
    cell = cell_of(fields, workload="gpt-nano")
    assert reason in str(refusal(cell) or unsplittable(cell) or misplaced(cell, None))


@pytest.mark.parametrize(
    "fields",
    [
        "",
        "strategy=single gpus=1",
        "strategy=ddp:static_graph=true",
        "strategy=ddp:find_unused=true",
        "strategy=ddp:find_unused=true accumulation=2",
        "strategy=scratch-ddp:find_unused=true compression=bf16 collective=ring",
        "strategy=scratch-ddp accumulation=2",
        "strategy=local-sgd:4 precision=bf16",
        "strategy=local-sgd:4:outer=nesterov:outer_lr=0.5",
        "precision=tf32 device=cuda backend=nccl",
        "collective=hierarchical device=cuda backend=nccl",
        "compression=torch-powersgd:4",
        "compression=dgc:0.01",
        "compression=topk:0.01 optimizer=adamw",
        "precision=fp16",
        "precision=fp16 compression=fp16",
        "precision=fp16 compression=bf16",
        "precision=fp16 compression=topk:0.01",
        "precision=fp16 compression=torch-powersgd:4",
        "precision=bf16 compression=int8",
        "collective=hierarchical:via=leaders compression=powersgd:4",
        "collective=hierarchical:via=leaders gpus=5 node_size=2",
        "collective=hierarchical gpus=6 node_size=2",
        "collective=hierarchical gpus=3 node_size=4",
        "collective=ring gpus=5 node_size=2",
        "strategy=zero1 precision=fp16 compile=true",
        "strategy=fsdp compile=true",
        "strategy=fsdp:tp=2 gpus=4",
        "strategy=fsdp:params=bf16 precision=bf16",
        "strategy=fsdp:cp=2:params=bf16 precision=float8 compression=none",
        "strategy=pipeline:zbv precision=float8",
        "strategy=scratch-fsdp:stage=1",
        "strategy=hsdp gpus=4 node_size=2",
        "strategy=manual:keep*3+reshard",
        "strategy=manual:keep.checkpoint*4",
        "strategy=manual:reshard.offload*4",
        "strategy=hsdp:tp=2 gpus=8 node_size=4",
        "strategy=pipeline:gpipe:dp=2 gpus=4",
        "strategy=pipeline:gpipe:microbatches=2 gpus=4",
        "strategy=pipeline:1f1b gpus=4",
        "strategy=pipeline:1f1b:pp=2:reshard=true:shard=2 gpus=8",
        "strategy=pipeline:zbv:dp=2:shard=2 gpus=8",
        "strategy=pipeline:1f1b:cp=2:pp=2:reshard=true gpus=4",
        "strategy=pipeline:zbv:pp=2:sequence=true:shard=2:tp=2 gpus=8",
        "strategy=pipeline:1f1b gpus=4 device=cuda backend=nccl",
        "strategy=pipeline:interleaved:chunks=3",
        "strategy=pipeline:interleaved gpus=3",
        "strategy=pipeline:zero-bubble:chunks=1",
        "strategy=pipeline:zbv:microbatches=1 gpus=4",
        "strategy=pipeline:dualpipev",
        "strategy=pipeline:looped-bfs:microbatches=1 gpus=4 activation_checkpointing=true",
        "strategy=pipeline:interleaved:microbatches=8 gpus=4",
        "strategy=tp gpus=4 accumulation=2",
    ],
)
def test_a_combination_close_to_a_refused_one_is_accepted(fields) -> None:
    assert refusal(cell_of(fields)) is None


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
    """Return the entries except aliases and `auto`, which chooses another strategy."""
    return [entry for entry in catalog if entry.alias_of is None and entry.name != "auto"]


def _written(entry: Entry) -> str:
    """Write an entry as a user does, with a value if it requires one."""
    if entry.positional is None or entry.name in EXAMPLES:
        return EXAMPLES.get(entry.name, entry.name)
    return f"{entry.name}:{4 if entry.positional.kind == 'int' else 0.01}"


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
    plan = expand(a_request(options), study="s", created_at="t")
    cells = {
        (
            STRATEGIES.parse(cell.strategy).name,
            COMPRESSIONS.parse(cell.compression).name,
            COLLECTIVES.parse(cell.collective).name,
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
    engines = {known.name: known.engine for known in STRATEGIES.all_facts}
    lacking = {name for name, engine in engines.items() if engine is not None and engine.missing}
    # The others exchange something else than gradients, or as torch does it.
    alone = {(name, "none", "default", 4) for name in names if name not in ("single", *NOT_WITH, *lacking)}
    assert cells == expected | {("single", "none", "default", 1)} | alone
    every = product(names, COMPRESSIONS.entries, COLLECTIVES.entries, (1, 4))
    assert len(plan.cells) + len(plan.skips) == len(list(every))
    assert all(skip.reason for skip in plan.skips)
    # Nothing is in a catalog in vain.
    for place, catalog in enumerate((STRATEGIES, COMPRESSIONS, COLLECTIVES)):
        named = {entry.name for entry in _kinds(catalog)}
        assert {cell[place] for cell in cells} == named - lacking


class Calls:
    """A wire between two ranks with the same values, which keeps the names of the collectives called."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.called: set[str] = set()

    def largest(self, values: Tensor) -> None:
        """Every collective has one."""

    def all_reduce(self, values: Tensor) -> None:
        self.called.add("all-reduce")
        values *= 2

    def all_gather(self, values: Tensor) -> Tensor:
        self.called.add("all-gather")
        return values.repeat(2, 1)

    def all_to_all(self, values: Tensor) -> Tensor:
        self.called.add("all-to-all")
        return values.clone()


@pytest.mark.parametrize("entry", list(COMPRESSIONS), ids=lambda entry: entry.name)
def test_a_compressor_calls_the_collective_that_its_facts_state(entry) -> None:
    facts = COMPRESSIONS.facts(_written(entry))
    if facts.ddp_hook is not None:
        return
    compressor, wire = build_compressor(facts.spec.text, seed=0, rank=0), Calls()
    pieces = pieces_of(iter([("matrix", torch.Size((32, 16))), ("vector", torch.Size((8,)))]))
    for step in range(3):
        values = torch.randn(520, generator=torch.Generator().manual_seed(step))
        compressor.sum_shares(Bucket(index=0, values=values, pieces=pieces), torch.zeros(520), wire)
    also = {"all-gather"} if facts.need == "all-to-all" else set()
    assert wire.called == {facts.need} | also
