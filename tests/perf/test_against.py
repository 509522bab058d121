"""Two ways of the same work against each other: steps of ours and of torch, our all-reduces and theirs.

Both sides work in the same rank processes, in blocks A B B A, on the same batches over the same backend. A
block lasts from a barrier to the last rank. The goals are in docs/evidence.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.stats import binom, t
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness.worker.exchange.group import open_exchange
from harness.worker.measure.clock import StepClock
from strategies import Trainer, TrainSettings
from strategies.collectives.catalog import build_route
from strategies.collectives.link import Link
from strategies.compression.none import Dense
from strategies.exchange.buckets import Bucket
from strategies.optimizers import build_optimizer
from workloads.build import build_workload
from workloads.catalog import MEMBERS, WORKLOADS
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt
from workloads.workload import Workload

Batches = Iterator[tuple[Tensor, Tensor]]
Quads = list[tuple[float, float]]
"""Seconds of two blocks of ours, and of two of the other side."""

CPU = torch.device("cpu")
BUCKET_NUMEL = 25 * 2**20 // 4
GPT_SHAPES = {
    # gpt-nano, and one of 12.7 million parameters.
    "nano": GPTShape(layers=4, width=128, heads=4, context=64, vocabulary=256, seq=64),
    "wide": GPTShape(layers=4, width=512, heads=8, context=64, vocabulary=256, seq=64),
}


def measured(
    ours: Callable[[], object], theirs: Callable[[], object], many: int, before: Callable[[], object]
) -> Quads:
    """On a rank: `many` quads of two blocks, after a quad that warms up; `before` each block is not timed."""

    def seconds(block: Callable[[], object]) -> float:
        before()
        dist.barrier()
        start = time.perf_counter()
        block()
        wall = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        return wall.item()

    quads = []
    for _ in range(1 + many):
        first, second, third, fourth = (seconds(block) for block in (ours, theirs, theirs, ours))
        quads.append((first + fourth, second + third))
    return quads[1:]


def block_of(
    step: Callable[[Batches], object], built: Workload, batch: int, steps: int
) -> Callable[[], None]:
    """Steps on four batches of this rank, from the first on."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    pool = [built.synthetic(generator, batch) for _ in range(4)]

    def block() -> None:
        batches = cycle(pool)
        for _ in range(steps):
            step(batches)

    return block


def trainer_of(built: Workload, strategy: str, optimizer: str) -> Trainer:
    settings = TrainSettings(strategy=strategy, optimizer=optimizer)
    group = open_exchange()
    return Trainer(built.module, built.loss, device=CPU, settings=settings, layout=built.layout, group=group)


def seeded(workload: str) -> Workload:
    torch.manual_seed(0)
    return build_workload(workload)


def bare_step(built: Workload, optimizer: str) -> Callable[[Batches], Tensor]:
    """A training step as a user would write it by hand."""
    model = DistributedDataParallel(built.module.train())
    updater = build_optimizer(optimizer, model.parameters())

    def step(batches: Batches) -> Tensor:
        inputs, targets = next(batches)
        loss = built.loss(model(inputs), targets)
        loss.backward()
        updater.step()
        updater.zero_grad()
        return loss.detach()

    return step


def clocked_against_bare(rank: int, workload: str, steps: int, many: int) -> Quads:
    """On a rank: steps of `ddp` inside the harness against a bare loop."""
    member = MEMBERS[WORKLOADS.parse(workload).name]
    inside, outside = seeded(workload), seeded(workload)
    trainer = trainer_of(inside, "ddp", member.optimizer)
    trainer.observer = clock = StepClock(CPU)
    return measured(
        block_of(trainer.step, inside, member.batch, steps),
        block_of(bare_step(outside, member.optimizer), outside, member.batch, steps),
        many,
        before=clock.drain,
    )


def scratch_ddp_against_ddp(rank: int, workload: str, batch: int, steps: int, many: int) -> Quads:
    optimizer = MEMBERS[WORKLOADS.parse(workload).name].optimizer
    blocks = []
    for strategy in ("scratch-ddp", "ddp"):
        built = seeded(workload)
        blocks.append(block_of(trainer_of(built, strategy, optimizer).step, built, batch, steps))
    return measured(*blocks, many, before=lambda: None)


def sharded_against_sharded(rank: int, model: str, strategies: list[str], steps: int, many: int) -> Quads:
    blocks = []
    for strategy in strategies:
        torch.manual_seed(0)
        built = build_gpt(GPT_SHAPES[model])
        blocks.append(block_of(trainer_of(built, strategy, "adamw").step, built, 4, steps))
    return measured(*blocks, many, before=lambda: None)


def all_reduces(rank: int, collective: str, node_size: int, many: int) -> Quads:
    """On a rank: two all-reduces of 25 MiB a block, by `collective` and by the backend."""
    link, bucket = Link(), Bucket(index=0, values=torch.zeros(BUCKET_NUMEL), pieces=())
    ours, backend = (build_route(text, link, node_size=node_size) for text in (collective, "default"))

    def twice(route: Any) -> Callable[[], None]:
        def block() -> None:
            for _ in range(2):
                route.sum_shares(bucket, None, Dense())

        return block

    return measured(twice(ours), twice(backend), many, before=lambda: bucket.values.fill_(1.0))


@pytest.fixture
def compare(benchmark, ranks, amount) -> Callable[..., Quads]:
    """`compare(100, 2, function, *arguments)` gives rank 0's 100 quads of `function` on 2 ranks."""

    def run(all_quads: int, size: int, function: Callable[..., Quads], *arguments: object) -> Quads:
        many = amount(all_quads, brief=2)
        given = (size, function, *arguments, many)
        found: Quads = benchmark.pedantic(ranks, given, rounds=1)[0]
        assert len(found) == many
        return found

    return run


@pytest.fixture
def tell(benchmark) -> Callable[..., None]:
    def note(what: str, **found: object) -> None:
        benchmark.extra_info.update(found)
        print(f"\n{what}: {found}")

    return note


def ratios_of(found: Quads) -> list[float]:
    return [ours / theirs for ours, theirs in found]


def about_the_median(ratios: list[float]) -> dict[str, float]:
    """With the distribution-free 95 % interval of the median: order statistics by the binomial.

    Le Boudec, Performance Evaluation of Computer and Communication Systems, theorem 2.1.
    """
    ordered, beyond = sorted(ratios), int(binom.ppf(0.025, len(ratios), 0.5))
    low, high = ordered[max(beyond - 1, 0)], ordered[min(len(ratios) - beyond, len(ratios) - 1)]
    return {"median_ratio": float(np.median(ratios)), "low_95": low, "high_95": high, "quads": len(ratios)}


def about_the_mean(ratios: list[float]) -> dict[str, float]:
    """With the 95 % interval of the mean by Student's t distribution, for independent values."""
    wide = float(t.ppf(0.975, len(ratios) - 1) * np.std(ratios, ddof=1) / np.sqrt(len(ratios)))
    mean = float(np.mean(ratios))
    return {"mean_ratio": mean, "low_95": mean - wide, "high_95": mean + wide, "quads": len(ratios)}


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["gpt-nano", "mlp"])
def test_a_step_inside_the_harness_against_a_bare_loop(compare, tell, workload) -> None:
    found = compare(100, 2, clocked_against_bare, workload, 3)
    tell(workload, **about_the_median(ratios_of(found)))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("workload", "batch"), [("resnet18-32px", 8), ("gpt-nano", 4)])
def test_scratch_ddp_against_torchs_ddp(compare, tell, workload, batch) -> None:
    found = compare(60, 2, scratch_ddp_against_ddp, workload, batch, 2)
    tell(workload, **about_the_median(ratios_of(found)))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ours", "theirs", "steps"),
    [
        ("nano", "scratch-fsdp", "fsdp", 4),
        ("nano", "scratch-fsdp", "fsdp:prefetch=1", 4),
        ("nano", "scratch-fsdp:prefetch=0", "fsdp", 4),
        ("nano", "scratch-fsdp:stage=2", "zero2", 4),
        ("wide", "scratch-fsdp", "fsdp", 1),
    ],
)
def test_scratch_fsdp_against_torchs_fsdp(compare, tell, model, ours, theirs, steps) -> None:
    found = compare(40, 2, sharded_against_sharded, model, [ours, theirs], steps)
    step_ms = [float(np.median(side)) * 500 / steps for side in zip(*found, strict=True)]
    tell(f"{model}, {ours} against {theirs}", **about_the_mean(ratios_of(found)), step_ms=step_ms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "size", "node_size"),
    [
        ("ring", 2, 2),
        ("tree", 2, 2),
        ("ring", 4, 4),
        ("tree", 4, 4),
        ("hierarchical", 4, 2),
        ("hierarchical:via=leaders", 4, 2),
    ],
)
def test_all_reduces_of_25_mib_against_the_backend(compare, tell, collective, size, node_size) -> None:
    # More ranks than cores are for information.
    ratios = ratios_of(compare(100, size, all_reduces, collective, node_size))
    names = ("lower_quartile", "median_ratio", "upper_quartile")
    quartiles = np.percentile(ratios, [25, 50, 75]).round(3).tolist()
    tell(f"{collective} on {size} ranks", **dict(zip(names, quartiles, strict=True)), quads=len(ratios))
