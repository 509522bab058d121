"""A run that is resumed continues as one that was not interrupted, bit for bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import resuming
import torch
from rank_builders import a_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import open_exchange
from strategies import Trainer

Case = tuple[str, dict[str, Any]]
SMALL = "bucket_mb=0.001"
DDP = f"ddp:{SMALL}"
SCRATCH = f"scratch-ddp:{SMALL}:first_bucket_mb=0.001"
PIPELINE = "pipeline:1f1b:microbatches=2"
SPLIT = (
    "fsdp",
    "fsdp:reshard=false",
    "zero2",
    "fsdp:tp=2",
    "tp",
    PIPELINE,
    "pipeline:interleaved:microbatches=2",
    "pipeline:zbv:microbatches=2",
)
SHARDED = ("scratch-fsdp:stage=1", "scratch-fsdp:stage=2", "scratch-fsdp")
DILOCO = "local-sgd:2:outer=nesterov"
LOCAL = ("local-sgd:2", "local-sgd:4:warmup=1", DILOCO)
STRATEGIES = (DDP, SCRATCH, f"zero1:{SMALL}", *LOCAL, *SPLIT, *SHARDED)
COMPRESSIONS = (
    *("bf16", "fp16", "topk:0.1", "topk:0.1:select=sampled", "randomk:0.1", "randomk:0.1:feedback=false"),
    *("powersgd:1", "powersgd:1:warmup=4", "int8", "int8:feedback=true", "signsgd"),
)
PLAIN = "sgd:lr=0.05:momentum=0"
SCHEDULES = (
    *("LambdaLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR"),
    *("CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "SequentialLR", "ChainedScheduler"),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"accumulation": 2},
    {"precision": "fp16"},
    {"precision": "bf16"},
    {"clip_norm": 0.1},
    {"memory_format": "channels_last"},
    {"optimizer": "adamw:lr=0.01"},
    {"collective": "ring"},
    {"collective": "tree"},
    {"collective": "hierarchical", "node_size": 1},
)
SCALED = {"optimizer": "adamw:lr=0.01", "precision": "fp16", "schedule": "CosineAnnealingLR"}
CASES: tuple[Case, ...] = (
    *((strategy, {}) for strategy in STRATEGIES),
    *((strategy, SCALED) for strategy in STRATEGIES[2:] if not strategy.startswith("local-sgd")),
    *((SCRATCH, {"compression": compression}) for compression in COMPRESSIONS),
    *((DDP, {"compression": compression}) for compression in COMPRESSIONS),
    (SCRATCH, {"compression": "dgc:0.1:warmup=4", "optimizer": PLAIN}),
    (DDP, {"compression": "dgc:0.1:warmup=4", "optimizer": PLAIN}),
    (DDP, {"compression": "torch-powersgd:1"}),
    *((SCRATCH, settings) for settings in SETTINGS),
    *((DDP, {"schedule": schedule}) for schedule in SCHEDULES),
    ("fsdp", {"activation_checkpointing": True}),
)


def pairs() -> list[Case]:
    """Settings of which any two meet in some case: an orthogonal array of strength 2 with 4 levels."""
    axes: tuple[tuple[Any, ...], ...] = (
        (DDP, SCRATCH, "local-sgd:2", "local-sgd:2:warmup=1"),
        ("topk:0.1", "powersgd:1", "int8:feedback=true", "signsgd"),
        ({"precision": "fp32"}, {"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp16"}),
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}, {"optimizer": PLAIN}, {"optimizer": "sgd"}),
        (
            {"accumulation": 2},
            {"clip_norm": 0.1},
            {"accumulation": 2, "clip_norm": 0.1},
            {"memory_format": "channels_last"},
        ),
    )
    cases = []
    for a, b in itertools.product(range(4), repeat=2):
        # Over the field of four elements: a + b, a + x b, a + (x + 1) b.
        times_x = (0, 2, 3, 1)
        levels = (a, b, a ^ b, a ^ times_x[b], a ^ times_x[times_x[b]])
        strategy, compression, *others = (axis[level] for axis, level in zip(axes, levels, strict=True))
        merged = {"compression": compression}
        for other in others:
            merged |= other
        if strategy.startswith("local-sgd") and merged["precision"] == "fp16":
            merged["precision"] = "bf16"  # each rank would scale its own loss
        cases.append((strategy, merged))
    return cases


def test_a_resumed_run_goes_on_bit_for_bit(ranks, tmp_path) -> None:
    cases: list[Case] = [(SCRATCH, {"compression": "topk:0.1"}), ("scratch-fsdp", {}), (DILOCO, {})]
    assert ranks(2, resuming.broken, cases, tmp_path) == [[], []]


def test_a_run_on_one_device_goes_on_bit_for_bit(tmp_path) -> None:
    assert resuming.broken(0, [("single", {"optimizer": "adamw", "precision": "fp16"})], tmp_path) == []


@pytest.mark.slow
def test_stages_in_shards_and_split_layers_go_on(ranks, tmp_path) -> None:
    of_two = "pipeline:zbv:microbatches=2:pp=2"
    cases: list[Case] = [(f"{of_two}:shard=2", SCALED), (f"{of_two}:tp=2", {})]
    assert ranks(4, resuming.broken, cases, tmp_path) == [[]] * 4


@pytest.mark.slow
def test_every_strategy_compressor_and_setting_goes_on(ranks, tmp_path) -> None:
    assert ranks(2, resuming.broken, CASES, tmp_path) == [[], []]


@pytest.mark.slow
@pytest.mark.long
def test_any_two_settings_go_on_together(ranks, tmp_path) -> None:
    assert ranks(2, resuming.broken, pairs(), tmp_path) == [[], []]


@pytest.mark.slow
@pytest.mark.long
def test_on_three_ranks_sums_are_in_the_order_of_the_buckets(ranks, tmp_path) -> None:
    cases = [case for case in CASES if case[0] in (DDP, SCRATCH) and "schedule" not in case[1]]
    cases += [("hsdp", {"node_size": 1}), ("scratch-fsdp", {}), ("fsdp", {})]
    cases = [case for case in cases if case[1].get("collective") != "hierarchical"]
    assert ranks(3, resuming.broken, cases, tmp_path) == [[], [], []]


# A saved state, loaded into a fresh trainer: it goes on as the first one did, bit for bit.


class Crossed(nn.Module):
    """Layers that are used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(40, 5), nn.Linear(8, 20)
        self.second, self.third = nn.Linear(20, 30), nn.Linear(30, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def trained(trainer: Trainer, steps: range, rank: int) -> list[dict[str, Tensor]]:
    """Parameters after each step."""
    found = []
    for step in steps:
        trainer.step(iter([batch(step, rank)]))
        found.append({name: value.clone() for name, value in trainer.model.named_parameters()})
    return found


def open_trainer(strategy: str, compression: str) -> Trainer:
    torch.manual_seed(0)
    settings = {"strategy": strategy, "compression": compression, "optimizer": "sgd:lr=0.1:momentum=0"}
    return a_trainer(Crossed(), F.cross_entropy, group=open_exchange(), **settings)


def differing(rank: int, cases: list[tuple[str, str]]) -> list[str]:
    """On a rank: the cases in which a fresh trainer that loads the state of another continues differently."""
    found = []
    for case, saved in itertools.product(cases, (1, 3)):
        first, fresh = open_trainer(*case), open_trainer(*case)
        trained(first, range(saved), rank)
        parameters = [value.detach().clone() for value in first.model.parameters()]
        state = copy.deepcopy(first.model.strategy_state())
        expected = trained(first, range(saved, saved + 3), rank)
        with torch.no_grad():
            for value, kept in zip(fresh.model.parameters(), parameters, strict=True):
                value.copy_(kept)
        fresh.model.load_strategy_state(state)
        found += [
            f"{' '.join(case)}, saved after {saved}: step {step}"
            for step, theirs in enumerate(expected, start=saved)
            for ours in trained(fresh, range(step, step + 1), rank)
            if any(not torch.equal(ours[name], theirs[name]) for name in theirs)
        ]
    return found


def test_a_fresh_trainer_goes_on_as_the_one_whose_state_it_loads(ranks) -> None:
    assert ranks(2, differing, [(DDP, "signsgd"), (SCRATCH, "signsgd")]) == [[], []]
