"""A saved state, loaded into a fresh trainer: it goes on as the first one did, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import open_exchange
from strategies import Trainer, TrainSettings

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
DDP = "ddp:bucket_mb=0.001"
SCRATCH = "scratch-ddp:bucket_mb=0.001:first_bucket_mb=0.001"
COMPRESSIONS = (
    *("none", "bf16", "topk:0.1", "topk:0.1:select=sampled", "randomk:0.1", "randomk:0.1:feedback=false"),
    *("powersgd:1", "int8", "int8:feedback=true", "signsgd", "dgc:0.1:warmup=4"),
)
CASES = (
    *((strategy, compression) for strategy in (DDP, SCRATCH) for compression in COMPRESSIONS),
    (DDP, "torch-powersgd:1"),
    ("ddp:bucket_mb=0.001:bucket_view=true", "topk:0.1"),
    ("ddp:find_unused=true", "none"),
    *((strategy, "none") for strategy in ("zero1:bucket_mb=0.001", "fsdp", "zero2", "scratch-fsdp")),
    *(("local-sgd:2:warmup=1", compression) for compression in ("none", "topk:0.1", "signsgd")),
)


class Crossed(nn.Module):
    """Layers that are used in another order than that of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(40, 5), nn.Linear(8, 20)
        self.second, self.third = nn.Linear(20, 30), nn.Linear(30, 40)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return y


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
    settings = TrainSettings(strategy=strategy, compression=compression, optimizer="sgd:lr=0.1:momentum=0")
    return Trainer(Crossed(), F.cross_entropy, device=CPU, settings=settings, group=open_exchange())


def differing(rank: int, cases: list[tuple[str, str]]) -> list[str]:
    """On a rank: the cases in which a fresh trainer that loads the state of another goes on differently."""
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


def test_a_fresh_trainer_goes_on_as_the_one_whose_state_it_loads(ranks: Ranks) -> None:
    assert ranks(2, differing, [(DDP, "signsgd"), (SCRATCH, "signsgd")]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_state_is_all_that_goes_on(ranks: Ranks, size: int) -> None:
    """On three ranks the order of a sum, and so its rounding, follows from the buckets as well."""
    assert ranks(size, differing, CASES, timeout_s=200) == [[]] * size
