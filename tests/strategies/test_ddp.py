"""torch's DDP over real ranks, exchanging alone and by our hook, against a serial loop over the replicas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.worker.exchange import open_exchange
from strategies import GradientExchange, Trainer, TrainSettings

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


def options_in_force(rank: int, strategy: str) -> list[object]:
    """On a rank: static graph, unused search, and whether a gradient lies in a bucket with others."""
    module = nn.Linear(8, 5)
    settings = TrainSettings(strategy=strategy)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    trainer.compute_gradients(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    gradient: Any = module.bias.grad
    wrapper: Any = trainer.model.module
    in_bucket = gradient.untyped_storage().nbytes() > gradient.nbytes
    return [wrapper.static_graph, wrapper.find_unused_parameters, in_bucket]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", [False, False, False]),
        ("ddp:static_graph=true", [True, False, False]),
        ("ddp:find_unused=true", [False, True, False]),
        ("ddp:bucket_view=true", [False, False, True]),
    ],
)
def test_options_of_the_spec_reach_torch(ranks: Ranks, strategy: str, expected: list[bool]) -> None:
    assert ranks(2, options_in_force, strategy) == [expected] * 2


def sums_of_a_step(rank: int, strategy: str) -> int:
    """Of three parameters of 0.8 MiB, when the buckets are formed anew."""
    module, group = nn.Sequential(*(nn.Linear(458, 458, bias=False) for _ in range(3))), open_exchange()
    settings = TrainSettings(strategy=strategy)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=group)
    for _ in range(3):
        group.traffic.operations = 0
        trainer.step(iter([(torch.ones(1, 458), torch.ones(1, 458))]))
    return group.traffic.operations


@pytest.mark.parametrize(
    ("strategy", "sums"),
    [
        # As torch has it when it is given no number: a first bucket of 1 MiB, which two of them fill.
        ("ddp", 2),
        ("ddp:bucket_mb=25", 2),
        ("ddp:bucket_mb=24", 1),
        ("ddp:bucket_mb=0.5", 3),
    ],
)
def test_buckets_are_as_large_as_torch_or_the_spec_has_them(ranks: Ranks, strategy: str, sums: int) -> None:
    assert ranks(2, sums_of_a_step, strategy) == [sums] * 2


def ramp_steps(rank: int, strategy: str, compression: str) -> int:
    settings = TrainSettings(strategy=strategy, compression=compression)
    trainer = Trainer(nn.Linear(2, 2), F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    return trainer.model.ramp_steps


@pytest.mark.parametrize(
    ("strategy", "compression", "steps"),
    [
        ("ddp", "none", 0),
        ("ddp", "powersgd:1:warmup=3", 3),
        ("scratch-ddp", "powersgd:1:warmup=3", 3),
        ("ddp", "torch-powersgd:1", 2),
    ],
)
def test_how_many_steps_are_done_otherwise_at_the_start(
    ranks: Ranks, strategy: str, compression: str, steps: int
) -> None:
    assert ranks(2, ramp_steps, strategy, compression) == [steps] * 2


def failing(rank: int, strategy: str) -> tuple[str, bool]:
    """On a rank: what a step raises whose exchange fails, and whether the model is freed after it."""

    def fail(*arguments: object) -> None:
        raise ValueError("the cause")

    module = nn.Linear(8, 5)
    alive = weakref.ref(module)
    settings = TrainSettings(strategy=strategy, compression="topk:0.5")
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    try:
        with patch.object(GradientExchange, "sum_shares", fail):
            trainer.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    except ValueError as error:
        raised = str(error)
    del trainer, module
    gc.collect()
    return raised, alive() is None


@pytest.mark.parametrize("strategy", ["ddp", "scratch-ddp"])
def test_what_an_exchange_raises_on_its_lane_is_raised_by_the_step(ranks: Ranks, strategy: str) -> None:
    assert ranks(2, failing, strategy) == [("the cause", True)] * 2


def freed(rank: int, compression: str) -> bool:
    module = nn.Linear(8, 5)
    alive = weakref.ref(module)
    settings = TrainSettings(strategy="ddp", compression=compression)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    for _ in range(4):
        trainer.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    del trainer, module
    gc.collect()
    return alive() is None


@pytest.mark.parametrize("compression", ["none", "topk:0.5", "torch-powersgd:1"])
def test_a_model_that_is_dropped_is_freed(ranks: Ranks, compression: str) -> None:
    assert ranks(2, freed, compression) == [True] * 2


def without_hooks(rank: int) -> None:
    with patch.object(DistributedDataParallel, "register_comm_hook", side_effect=AssertionError):
        Trainer(nn.Linear(2, 2), F.mse_loss, device=CPU, settings=TrainSettings(strategy="ddp"))


def test_torch_exchanges_alone_where_nothing_else_is_asked_for(ranks: Ranks) -> None:
    ranks(2, without_hooks)
