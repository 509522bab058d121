"""`scratch-fsdp` where a rank lacks a gradient: all ranks issue the same, and all say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.errors import UsageError
from results.layout import ModelLayout
from strategies import Trainer, TrainSettings

Ranks = Callable[..., list[Any]]
Recording = Callable[[int, int], Any]
LAYOUT = ModelLayout(blocks=("1", "2", "3"))


class Choosing(nn.Linear):
    """A block that uses its bias where the first input is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias if bool(x[0, 0] > 0) else None)


def trainer_of(group: ExchangeGroup, strategy: str) -> Trainer:
    """Of three blocks after a matrix that is trained as well; all keep the sign of what they take."""
    module = nn.Sequential(nn.Linear(5, 5, bias=False), *(Choosing(5, 5) for _ in range(3)))
    for layer in module:
        nn.init.eye_(layer.weight)  # type: ignore[arg-type]
    for block in module[1:]:
        nn.init.zeros_(block.bias)  # type: ignore[arg-type]
    return Trainer(
        module,
        F.mse_loss,
        device=torch.device("cpu"),
        settings=TrainSettings(strategy=strategy, optimizer="sgd:lr=0"),
        layout=LAYOUT,
        group=group,
    )


def complaint(trainer: Trainer, sign: float) -> str:
    try:
        trainer.step(iter([(sign * torch.ones(2, 5), torch.ones(2, 5))]))
    except UsageError as error:
        return str(error)
    return ""


def complaints(rank: int, strategy: str, signs: list[list[float]]) -> list[str]:
    """On a rank: what is said of each step, whose first input has this rank's sign."""
    trainer = trainer_of(open_exchange(), strategy)
    return [complaint(trainer, step[rank]) for step in signs]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_gradient_is_refused_on_all_ranks(ranks: Ranks, stage: int) -> None:
    here, there = ranks(2, complaints, f"scratch-fsdp:stage={stage}", [[-1.0, 1.0], [1.0, 1.0]])
    assert here[0] == (
        "no gradient came for 1.bias, 2.bias, 3.bias (3 parameters), and shards are updated as a whole: "
        "freeze what is not used, or use ddp:find_unused=true or scratch-ddp:find_unused=true"
    )
    assert there[0] == "no gradient came for a parameter on another rank, whose error names it"
    assert here[1] == there[1] == ""
    later = ranks(2, complaints, f"scratch-fsdp:stage={stage}", [[1.0, 1.0], [-1.0, -1.0]])
    assert [told[0] for told in later] == ["", ""]
    assert all(told[1].startswith("no gradient came for 1.bias, 2.bias, 3.bias") for told in later)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_issues_the_same_whether_its_gradients_come_or_not(recording: Recording, stage: int) -> None:
    seen, told = [], []
    for sign in (1.0, -1.0):
        group = recording(0, 4)
        told.append(complaint(trainer_of(group, f"scratch-fsdp:stage={stage}"), sign))
        seen.append(group.seen)
    assert [bool(text) for text in told] == [False, True]
    assert seen[0] == seen[1]
    # A block: 25 values, 3 zeros, 5 values, filled up to 4 * 9. Around them 25, filled up to 4 * 7: last.
    averages = [numbytes for name, numbytes in seen[0] if name == "alltoall_base"]
    assert averages == [4 * 36] * 3 + [4 * 28]


def loop_of_ones_own(rank: int) -> str:
    """On a rank: what is said of a backward pass that no step of the strategy is around."""
    model = trainer_of(open_exchange(), "scratch-fsdp").model
    try:
        with model.exchange(now=True):
            model.module(torch.ones(2, 5)).sum().backward()
    except UsageError as error:
        return str(error)
    return ""


def test_a_loop_of_ones_own_is_refused_and_not_trained_wrongly(ranks: Ranks) -> None:
    assert all("train with a Trainer" in told for told in ranks(2, loop_of_ones_own))
