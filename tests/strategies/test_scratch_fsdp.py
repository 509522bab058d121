"""What `scratch-fsdp` averages, and what it gathers ahead; how it trains is in test_strategy_laws.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import data_parallel as replicas
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Ranks = Callable[..., list[Any]]
UNIT_ROUNDOFF = 2.0**-24
ACCUMULATION, SIZE = 3, 3


def sizes_of_terms(module: nn.Module, step: int) -> dict[str, Tensor]:
    """Of each element the sum of the absolute values of what is averaged: micro-batches of all replicas."""
    sizes: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for replica in range(SIZE):
        for micro in range(ACCUMULATION):
            module.zero_grad()
            inputs, targets = replicas.batch(step, micro, replica)
            (F.cross_entropy(module(inputs), targets) / ACCUMULATION / SIZE).backward()
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                sizes[name] = sizes[name] + parameter.grad.abs()
    return sizes


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_are_averaged_one_by_one(ranks: Ranks, stage: int) -> None:
    """3 times 3 terms in an order of the strategy's own: see `assert_near_serial` for the bound."""
    settings = {"strategy": f"scratch-fsdp:stage={stage}", "optimizer": "sgd", "accumulation": ACCUMULATION}
    results = ranks(SIZE, replicas.train, "tied", settings)
    roundings = ACCUMULATION * SIZE + 1
    bound = 2 * roundings * UNIT_ROUNDOFF / (1 - roundings * UNIT_ROUNDOFF)
    for step in range(replicas.STEPS):
        serial = replicas.Serial("tied", SIZE, settings)
        serial.module.load_state_dict(results[0][step]["start"], strict=False)
        sizes = sizes_of_terms(replicas, replicas.copy.deepcopy(serial.module), step)
        gradients, _ = serial.gradients(step)
        for result in results:
            assert result[step]["gradients"].keys() == gradients.keys()
            for name, gradient in result[step]["gradients"].items():
                assert bool(((gradient - gradients[name]).abs() <= bound * sizes[name]).all()), name
        assert len({result[step]["fingerprint"] for result in results}) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_gathered_ahead_changes_no_bit(ranks: Ranks, stage: int) -> None:
    settings = {"optimizer": replicas.ADAMW, "accumulation": 2}
    runs = [
        ranks(
            2,
            replicas.train,
            "tied",
            {"strategy": f"scratch-fsdp:stage={stage}:prefetch={ahead}", **settings},
        )
        for ahead in (0, 1, 2)
    ]
    assert len({result[-1]["fingerprint"] for run in runs for result in run}) == 1
