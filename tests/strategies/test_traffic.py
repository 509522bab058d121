"""Messages in closed form: worked out by hand, and against what steps hand to the process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import recorded_world
import torch
from builders import a_cell
from hypothesis import given
from hypothesis import strategies as st

from harness.worker.cell.model_parts import parts_of
from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.parts import ModelParts, Part, Saved, Weight
from strategies import Trainer, TrainSettings
from strategies.closed_form.terms import Term
from strategies.predictions import traffic
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt
from workloads.llama import LlamaShape
from workloads.llama.model import build_llama
from workloads.moe import MoEShape
from workloads.moe.model import build_moe
from workloads.workload import Workload

BLOCK = Part(
    weights=(Weight(rows=10, columns=30, split="columns"), Weight(rows=20)), saved=Saved(), input=400, flops=9
)
SMALL = ModelParts(
    stem=Part(weights=(Weight(rows=50, columns=10),), saved=Saved(), input=40),
    blocks=(BLOCK,) * 4,
    head=Part(weights=(Weight(rows=10),), saved=Saved(), input=400),
    shared_values=500,
)
P = 4 * (500 + 4 * 320 + 10)
"""7160 bytes."""


def terms_of(strategy: str, gpus: int, parts: ModelParts = SMALL, **fields: Any) -> list[Term]:
    base = {"micro_batch": 2, "optimizer": "adamw"}
    cell = a_cell(workload="gpt-nano", strategy=strategy, gpus=gpus, **base | fields)
    return traffic(cell, parts)


def short(terms: list[Term]) -> list[tuple[str, str, int, float, float, float]]:
    return [
        (t.collective, t.dimension, t.ranks, t.payload_bytes, t.operations, pytest.approx(t.wire_bytes))
        for t in terms
    ]


def test_one_rank_sends_nothing() -> None:
    assert terms_of("single", 1) == []


def test_ddp_sends_two_parts_in_p() -> None:
    """2 (p - 1) / p P: 1, 1.5 and 1.75 times P on 2, 4 and 8."""
    for strategy in ("ddp", "scratch-ddp"):
        for gpus, times in ((2, 1.0), (4, 1.5), (8, 1.75), (256, 1.9921875)):
            assert short(terms_of(strategy, gpus)) == [("all-reduce", "replicate", gpus, P, 1, times * P)]


def test_buckets_close_with_the_gradient_that_fills_them() -> None:
    """Limits of 0.001 MiB = 1048 bytes. From the end: 10 + 20 + 300 values are 1320 bytes and so a bucket,
    320 are 1280, three times; 500 are the fifth."""
    [term] = terms_of("ddp:bucket_mb=0.001", 4)
    assert term.operations == 5
    # 0.003 MiB = 3145 bytes: 330 + 320 + 20 + 300 ... 970 values are 3880; 320 + 500 the rest.
    [term] = terms_of("ddp:bucket_mb=0.003", 4)
    assert term.operations == 2


@pytest.mark.parametrize(
    ("strategy", "buckets"),
    [
        # Three gradients of 1.2 MB, 3.6 MB = 3.43 MiB. 25 MiB: the first alone fills torch's 1 MiB.
        ("ddp", 2),
        ("zero1", 2),
        ("scratch-ddp", 2),
        # Another size is that of the first bucket too.
        ("ddp:bucket_mb=26", 1),
        ("ddp:bucket_mb=0.5", 3),
        ("ddp:bucket_mb=2", 2),
        ("scratch-ddp:bucket_mb=2", 2),
        ("scratch-ddp:first_bucket_mb=4", 1),
        ("scratch-ddp:bucket_mb=1", 3),
    ],
)
def test_the_first_bucket_is_a_small_one(strategy, buckets) -> None:
    head = Part(weights=(Weight(rows=300_000),) * 3, saved=Saved())
    parts = ModelParts(stem=Part(weights=(), saved=Saved()), blocks=(), head=head)
    assert terms_of(strategy, 4, parts)[0].operations == buckets


CUDA = {"device": "cuda", "backend": "nccl"}


@pytest.mark.parametrize(
    ("strategy", "fields", "beside"),
    [
        ("ddp", {}, ["last backward"]),
        ("zero1", {}, ["last backward", "none"]),
        ("local-sgd:8", {}, ["none"]),
        # What is gathered once a step is gathered in its first forward pass; stage 3 gathers in every pass.
        ("scratch-fsdp:stage=1", {}, ["first forward", "last backward"]),
        ("scratch-fsdp:stage=2", {}, ["first forward", "backward"]),
        ("scratch-fsdp", {}, ["compute", "backward"]),
        ("fsdp", {}, ["none", "none"]),
        ("fsdp:prefetch=1", {}, ["compute", "none"]),
        ("fsdp", CUDA, ["compute", "last backward"]),
        # Kept till backward: gathered in forward passes alone.
        ("fsdp:reshard=false", CUDA, ["forward", "last backward"]),
        ("manual:keep*4", CUDA, ["forward", "last backward"]),
        ("manual:reshard+keep*3", CUDA, ["compute", "last backward"]),
        ("hsdp", CUDA | {"node_size": 2}, ["compute", "last backward", "last backward"]),
        ("tp", {}, ["none"]),
        ("pipeline:1f1b", {"micro_batch": 8}, ["compute", "none", "none"]),
    ],
)
def test_the_overlap_of_messages_with_computation(strategy, fields, beside) -> None:
    assert [term.overlap for term in terms_of(strategy, 4, **fields)] == beside


@pytest.mark.parametrize("strategy", ["local-sgd:8", "local-sgd:8:outer=nesterov"])
def test_local_sgd_sends_its_parameters_once_a_period(strategy) -> None:
    """An outer step adds no message."""
    assert short(terms_of(strategy, 4)) == [("all-reduce", "replicate", 4, P / 8, 1 / 8, 1.5 * P / 8)]


def test_local_sgd_averages_runs_of_whole_parameters() -> None:
    """25 MiB are 6,553,600 values: 3 and 3 million, then 4, then 7, then 1 and 5.5."""
    sizes = (3_000_000, 3_000_000, 4_000_000, 7_000_000, 1_000_000, 5_500_000)
    head = Part(weights=tuple(Weight(rows=rows) for rows in sizes), saved=Saved())
    parts = ModelParts(stem=Part(weights=(), saved=Saved()), blocks=(), head=head)
    assert terms_of("local-sgd:2", 4, parts)[0].operations == 4 / 2


def test_fsdp_gathers_blocks_twice_and_averages_padded_gradients() -> None:
    """Over 4: what is around the blocks is 532 values, a block 380. Gloo averages by an all-reduce."""
    around, block = 4 * 532, 4 * 380
    whole = around + 4 * block
    gathered = (around + 8 * block) / 4
    assert short(terms_of("fsdp", 4)) == [
        ("all-gather", "shard", 4, gathered, 9, 3 * gathered),
        ("all-reduce", "shard", 4, whole, 5, 1.5 * whole),
    ]
    nccl = terms_of("fsdp", 4, device="cuda", backend="nccl")
    assert short(nccl)[1] == ("reduce-scatter", "shard", 4, whole, 5, 0.75 * whole)
    assert short(terms_of("fsdp:reshard=false", 4))[0] == (
        "all-gather",
        "shard",
        4,
        whole / 4,
        5,
        0.75 * whole,
    )
    # Twice the gatherings, and gradients once.
    twice = terms_of("fsdp", 4, accumulation=2)
    assert short(twice) == [
        ("all-gather", "shard", 4, 2 * gathered, 18, 6 * gathered),
        ("all-reduce", "shard", 4, whole, 5, 1.5 * whole),
    ]


WIRE = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    # What a rank hands in is gathered by all others.
    "all-gather": lambda ranks: ranks - 1,
    **dict.fromkeys(("broadcast", "reduce-scatter", "all-to-all"), lambda ranks: (ranks - 1) / ranks),
    "send": lambda ranks: 1,
}
"""Bytes on the wire of a rank for each byte of the payload, by collective."""


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ("zero1", {}),
        ("scratch-fsdp", {"accumulation": 2}),
        ("hsdp", CUDA | {"node_size": 2}),
        ("fsdp:tp=2", {}),
        ("pipeline:1f1b", {"micro_batch": 8}),
    ],
)
def test_the_wire_carries_what_each_collective_needs(strategy, fields) -> None:
    for term in terms_of(strategy, 4, **fields):
        assert term.wire_bytes == pytest.approx(WIRE[term.collective](term.ranks) * term.payload_bytes)


@given(st.sampled_from(["ddp", "zero1", "fsdp", "scratch-fsdp", "scratch-fsdp:stage=1"]), st.integers(1, 255))
def test_the_wire_is_never_more_than_a_multiple_of_the_model(strategy, less) -> None:
    """At most 2, 3, 4 (Gloo), 3 and 2 times the model, padding left out; it grows with the ranks."""
    gpus = 1 + less
    most = {"ddp": 2, "zero1": 3, "fsdp": 4, "scratch-fsdp": 3, "scratch-fsdp:stage=1": 2}[strategy]
    padding = 4 * gpus * (10 + 30 + 1) * 16
    assert sum(term.wire_bytes for term in terms_of(strategy, gpus)) <= most * (P + padding)


GPT = GPTShape(layers=4, width=16, heads=4, context=8, vocabulary=37, seq=8)
LLAMA = LlamaShape(
    layers=2, width=16, heads=4, kv_heads=4, hidden=24, context=8, vocabulary=37, seq=8, tied=True
)
MODELS: dict[str, Any] = {
    "gpt": (GPT, build_gpt),
    "llama": (LLAMA, build_llama),
    "untied": (replace(LLAMA, layers=4, tied=False), build_llama),
    "moe": (MoEShape(**vars(LLAMA), experts=4, chosen=2), build_moe),
    "balanced": (MoEShape(**vars(LLAMA), experts=4, chosen=2, routing="balanced"), build_moe),
}
COUNTED: list[Any] = [
    (2, "ddp", "gpt", {}),
    (2, "scratch-ddp", "gpt", {"accumulation": 2}),
    (2, "zero1", "llama", {}),
    (2, "fsdp", "llama", {"accumulation": 2}),
    (2, "manual:reshard+keep*3", "gpt", {}),
    (2, "scratch-fsdp", "gpt", {"accumulation": 2}),
    (2, "scratch-fsdp:stage=1", "gpt", {"accumulation": 2}),
    (2, "scratch-fsdp:stage=2", "llama", {"accumulation": 2}),
    (2, "tp", "llama", {"accumulation": 2}),
    (2, "tp:sequence=true", "llama", {"accumulation": 2}),
    pytest.param(4, "fsdp:tp=2:sequence=true", "llama", {"accumulation": 2}, marks=pytest.mark.slow),
    (4, "manual:keep*3+reshard.checkpoint:cp=2:tp=2:sequence=true", "gpt", {}),
    (2, "tp", "moe", {"activation_checkpointing": True}),
    pytest.param(2, "tp:sequence=true", "moe", {"activation_checkpointing": True}, marks=pytest.mark.slow),
    (2, "pipeline:1f1b", "gpt", {"accumulation": 2}),
    pytest.param(2, "pipeline:gpipe", "llama", {}, marks=pytest.mark.slow),
    (2, "pipeline:zero-bubble", "gpt", {"accumulation": 2}),
    (2, "pipeline:zbv", "gpt", {"accumulation": 2}),
    (2, "pipeline:dualpipev", "gpt", {}),
    (2, "pipeline:looped-bfs", "gpt", {}),
    pytest.param(2, "pipeline:zbv", "untied", {}, marks=pytest.mark.slow),
    (4, "pipeline:1f1b:pp=2:shard=2", "gpt", {"accumulation": 2}),
    (4, "pipeline:zbv:pp=2:shard=2", "untied", {}),
    (4, "pipeline:1f1b:pp=2:reshard=true:shard=2", "gpt", {"accumulation": 2}),
    (4, "pipeline:zbv:pp=2:tp=2", "untied", {"accumulation": 2}),
    (4, "pipeline:1f1b:pp=2:tp=2", "gpt", {"activation_checkpointing": True}),
    (4, "pipeline:1f1b:pp=2:sequence=true:tp=2", "gpt", {"accumulation": 2}),
    pytest.param(4, "pipeline:zbv:pp=2:sequence=true:tp=2", "untied", {}, marks=pytest.mark.slow),
    (4, "pipeline:zbv:cp=2:pp=2", "untied", {"accumulation": 2}),
    (4, "pipeline:1f1b:attention=gathered:cp=2:pp=2", "gpt", {}),
    pytest.param(8, "pipeline:1f1b:pp=2:shard=2:tp=2", "llama", {}, marks=pytest.mark.slow),
    pytest.param(8, "pipeline:1f1b:cp=2:pp=2:shard=2", "gpt", {}, marks=pytest.mark.slow),
    pytest.param(4, "fsdp:tp=2", "llama", {"accumulation": 2}, marks=pytest.mark.slow),
    (2, "fsdp:cp=2", "llama", {"accumulation": 2}),
    (2, "fsdp:attention=gathered:cp=2", "gpt", {"activation_checkpointing": True}),
    (2, "manual:keep*3+reshard.checkpoint:cp=2", "gpt", {}),
    pytest.param(4, "fsdp:cp=2:tp=2", "llama", {}, marks=pytest.mark.slow),
    (4, "hsdp", "llama", {"node_size": 2, "accumulation": 2}),
    (2, "fsdp:ep=2", "balanced", {"accumulation": 2}),
    (4, "fsdp:cp=2:ep=2", "balanced", {"activation_checkpointing": True}),
    (4, "hsdp:ep=2:reshard=false", "balanced", {"node_size": 2}),
    (4, "pipeline:1f1b:ep=2:pp=2", "balanced", {"accumulation": 2}),
    pytest.param(4, "pipeline:1f1b:dp=2", "gpt", {}, marks=pytest.mark.slow),
    # Of a tied model no rank sends both activations each way and the shared gradient.
    pytest.param(4, "pipeline:1f1b", "untied", {}, marks=pytest.mark.slow),
    (4, "scratch-fsdp", "llama", {}),
    *(
        (2, strategy, "adapted", {})
        for strategy in ("ddp", "scratch-ddp", "zero1", "fsdp", "pipeline:gpipe", "tp")
    ),
]


def build_adapted(shape: GPTShape) -> Workload:
    """Build a GPT whose blocks train only their biases."""
    workload = build_gpt(shape)
    for name, parameter in workload.module.named_parameters():
        parameter.requires_grad_(name.startswith("h.") and name.endswith("bias"))
    return workload


MODELS["adapted"] = (GPT, build_adapted)


def parts_for(model: str) -> ModelParts:
    """Return the parts that the shape states, or counted ones for the model with frozen parameters."""
    shape, build = MODELS[model]
    if model != "adapted":
        return shape.parts()
    with torch.device("meta"):
        return parts_of(build(shape))


def traffic_of_a_step(rank: int, strategy: str, model: str, settings: dict[str, Any]) -> tuple[int, int]:
    shape, build = MODELS[model]
    return third_step(rank, open_exchange(), build(shape), strategy, settings)


def third_step(
    rank: int,
    exchange: ExchangeGroup,
    workload: Workload,
    strategy: str,
    settings: dict[str, Any],
    *,
    before_it: Callable[[], object] = lambda: None,
) -> tuple[int, int]:
    """On a rank: bytes and operations of the third step, when all that is agreed on once has been."""
    trainer = Trainer(
        workload.module,
        workload.loss,
        device=torch.device("cpu"),
        settings=TrainSettings(strategy=strategy, optimizer="adamw", **settings),
        layout=workload.layout,
        group=exchange,
    )
    batches = iter([workload.synthetic(torch.Generator().manual_seed(rank), 4)] * 9)
    before = (0, 0)
    for _ in range(3):
        before = exchange.traffic.payload_bytes, exchange.traffic.operations
        before_it()
        trainer.step(batches)
    return exchange.traffic.payload_bytes - before[0], exchange.traffic.operations - before[1]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy", "model", "settings"), COUNTED)
def test_the_counted_flops_are_the_closed_form_of_the_family(ranks, size, strategy, model, settings) -> None:
    """The messages of the rank that sends most."""
    terms = terms_of(strategy, size, parts_for(model), **{"micro_batch": 4} | settings)
    expected = (sum(term.payload_bytes for term in terms), sum(term.operations for term in terms))
    assert max(ranks(size, traffic_of_a_step, strategy, model, settings)) == expected


WHOLE_NODES = [4, 6, 8, 256]
GATHERED = ("zero1", "fsdp", "fsdp:reshard=false", "tp")
BY_OPERATION = {"all_reduce": "sum", "reduce_scatter": "sum", "all-reduce": "sum", "reduce-scatter": "sum"}
"""Gloo averages shards by an all-reduce, which is the closed form's word for torch's reduce-scatter."""


# torch.distributed.optim compiles a function of its own when it is first imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("size", "strategy", "settings"),
    [
        *(
            pytest.param(size, strategy, {}, marks=pytest.mark.slow if size in (5, 6, 7) else ())
            for size in range(2, 9)
            for strategy in ("ddp", "local-sgd:1", *GATHERED)
        ),
        *((size, "local-sgd:1:outer=nesterov", {}) for size in (2, 4)),
        *((256, strategy, {}) for strategy in ("ddp", "local-sgd:1", *GATHERED)),
        *((size, "hsdp", {"node_size": 2}) for size in WHOLE_NODES),
        (256, "hsdp", {"node_size": 8}),
        *((size, "fsdp:tp=2", {}) for size in WHOLE_NODES),
        *((size, "hsdp:tp=2", {"node_size": 4}) for size in (8, 256)),
        (6, "fsdp:tp=2:sequence=true", {}),
        (8, "hsdp:tp=2:sequence=true", {"node_size": 4}),
        (256, "hsdp:tp=2", {"node_size": 8}),
        (4, "fsdp:reshard=false", {"accumulation": 2}),
        (4, "tp", {"accumulation": 2}),
        (4, "tp", {"activation_checkpointing": True}),
        (4, "tp", {"activation_checkpointing": "selective"}),
        *((size, "tp:sequence=true", {"accumulation": 2}) for size in (4, 8)),
        (2, "tp:sequence=true", {"activation_checkpointing": True}),
        (2, "tp:sequence=true", {"activation_checkpointing": "selective"}),
    ],
)
def test_the_closed_form_holds_at_every_size(size, strategy, settings) -> None:
    """The bytes by operation and ranks of the group: for the first rank and, of a large launch, of the last
    one, where groups note what they are handed and move nothing. The GPT has a head for each rank of `tp`,
    and more parameters than 256, so that `zero1` leaves no rank without.

    Beside these: `scratch-fsdp` in test_scratch_fsdp.py, pipelines in test_pipeline.py;
    `scratch-ddp` agrees on its buckets, which needs ranks that answer."""
    sizes = {"width": size, "heads": size} if "tp" in strategy else {"width": 16, "heads": 4}
    layers = 22 if strategy == "zero1" and size > 8 else 2
    shape = GPTShape(layers=layers, context=8, vocabulary=37, seq=8, **sizes)
    expected: Counter[tuple[str, int, str]] = Counter()
    order: dict[tuple[str, int], list[list[float]]] = {}
    for term in terms_of(strategy, size, shape.parts(), **{"micro_batch": 4} | settings):
        collective = BY_OPERATION.get(term.collective, term.collective.replace("-", "_"))
        expected[collective, term.ranks, "bytes"] += term.payload_bytes
        expected[collective, term.ranks, "operations"] += term.operations
        order.setdefault((collective, term.ranks), []).append([piece.payload_bytes for piece in term.pieces])
    for rank in {0, size - 1} if size > 8 else {0}:
        found: Counter[tuple[str, int, str]] = Counter()
        with recorded_world.opened(rank, size) as (group, calls):
            third_step(0, group, build_gpt(shape), strategy, settings, before_it=calls.clear)
            for call in calls:
                collective = BY_OPERATION.get(call.operation, call.operation)
                found[collective, call.ranks, "bytes"] += call.payload_bytes
                found[collective, call.ranks, "operations"] += 1
            group.reset()
        assert found == expected
        # The sizes of single operations, in their order, where the operations of two terms are not mixed.
        for (collective, members), [pieces, *others] in order.items():
            if pieces and not others:
                of_term = [
                    call.payload_bytes
                    for call in calls
                    if (BY_OPERATION.get(call.operation, call.operation), call.ranks) == (collective, members)
                ]
                assert of_term == pieces * (len(of_term) // len(pieces))
