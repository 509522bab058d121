"""torch's ZeroRedundancyOptimizer over real ranks: who keeps what, and what it is refused for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import recorded_world
import split_models
import torch
from rank_builders import a_trainer
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from harness.worker.exchange.group import open_exchange
from strategies import Trainer

SGD = "sgd:lr=0.1:momentum=0.9"


class Four(nn.Module):
    """Matrices of 6 x 5, 4 x 6, 3 x 4 and 5 x 3: 30, 24, 12 and 15 elements."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (5, 6, 4, 3, 5)
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(sizes))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trainer_of(group: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return a_trainer(Four(), group=group, **{"strategy": "zero1", "optimizer": SGD, **settings})


def momentum_kept(rank: int) -> int:
    """On a rank: elements of momentum after a step."""
    trainer = trainer_of(open_exchange())
    trainer.step(iter([(torch.ones(2, 5), torch.ones(2, 5))]))
    states = trainer.model.local_state(trainer.optimizer).values()
    return sum(state["momentum_buffer"].numel() for state in states)


# The largest first, each to the rank that has the fewest elements: 30, 24, 15, 12.
@pytest.mark.parametrize(("size", "kept"), [(2, [30 + 12, 24 + 15]), (3, [30, 24, 15 + 12])])
def test_each_rank_keeps_the_state_of_its_parameters(ranks, size, kept) -> None:
    assert ranks(size, momentum_kept) == kept


# torch's own module warns of itself when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("strategy", "least", "most"), [("zero1", 1, 1), ("zero1:bucket_mb=0.001", 9, 28)])
def test_buckets_are_as_large_as_asked_for(strategy, least, most) -> None:
    # 28 parameters, of which the 9 matrices have more than the 1049 bytes of a bucket of 0.001 MiB.
    settings = {"strategy": strategy, "optimizer": SGD}
    with recorded_world.opened(0, 2) as (group, calls):
        trainer = split_models.trainer_of("gpt", settings, group)
        for step in range(3):
            calls.clear()
            trainer.step(split_models.batches_of(step, 0, settings))
        sums = sum(call.operation == "all_reduce" for call in calls)
        group.reset()
    assert least <= sums <= most


def views(rank: int) -> tuple[bool, bool, bool]:
    """On a rank: whether parameters are what the buffers hold, what DDP reduces, and what the model uses."""
    trainer = trainer_of(open_exchange())
    bare = trainer.model.bare
    buffers = {b.untyped_storage().data_ptr() for bs in trainer.optimizer._buckets for b in bs}
    named = dict(trainer.model.named_parameters())
    held = all(value.untyped_storage().data_ptr() in buffers for value in named.values())
    reduced = {id(p) for p in trainer.model.module.parameters()} == {id(p) for p in bare.parameters()}
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter.zero_()
    used = not trainer.model.module(torch.ones(1, 5)).any()
    return held, reduced, used


def test_parameters_that_moved_are_those_that_all_see(ranks) -> None:
    assert ranks(2, views) == [(True, True, True)] * 2


def rates_of_a_cycle(rank: int, strategy: str) -> tuple[list[float], list[float]]:
    """On a rank: the parameters after four steps of a schedule that also moves beta1, and its last betas."""
    trainer = trainer_of(open_exchange(), strategy=strategy, optimizer="adamw:lr=0.01")
    schedule = OneCycleLR(trainer.optimizer, max_lr=0.1, total_steps=5)
    for _ in range(4):
        trainer.step(iter([(torch.ones(2, 5), torch.ones(2, 5))]))
        schedule.step()
    flat = torch.cat([value.flatten() for _, value in trainer.model.named_parameters()])
    return flat.tolist(), list(trainer.optimizer.param_groups[0]["betas"])


def test_a_schedule_that_moves_the_momentum_is_followed(ranks) -> None:
    expected = ranks(2, rates_of_a_cycle, "ddp")
    assert ranks(2, rates_of_a_cycle, "zero1") == expected
    assert expected[0][1][0] != pytest.approx(0.9)


def complaint(rank: int) -> str:
    """On a rank: what the strategy says of a model of several data types."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double())
    try:
        a_trainer(module, group=open_exchange(), strategy="zero1")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_model_of_several_data_types_is_refused_with_the_way_out(ranks) -> None:
    told = "UsageError: zero1 takes parameters of one data type, not float32, float64: use ddp or scratch-ddp"
    assert ranks(2, complaint) == [told] * 2
