"""What `scratch-fsdp` averages: sums of parts, gradients that overflow, and bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.worker.exchange import ExchangeGroup, open_exchange
from strategies import Trainer, TrainSettings
from strategies.collectives.link import Link
from strategies.collectives.scatter import _Reduced, start_reduce_scatter

Ranks = Callable[..., list[Any]]
Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")


def parameters_of(trainer: Trainer) -> list[Tensor]:
    return [value.clone() for _, value in trainer.model.named_parameters()]


def overflowing(rank: int) -> tuple[list[float], list[bool]]:
    """On a rank: the scaler's factor after each of three steps, and whether parameters moved in it.

    The loss is sum(y t) of y = W x, and the gradient of W's row i t_i x: row 0 is the shard of rank 0, row 1
    that of rank 1.
    """
    settings = TrainSettings(strategy="scratch-fsdp", precision="fp16")
    module = nn.Linear(4, 2, bias=False)
    trainer = Trainer(
        module, lambda y, t: (y * t).sum(), device=CPU, settings=settings, group=open_exchange()
    )
    factors, moved = [trainer.scaler.get_scale()], []
    for step in range(3):
        before = parameters_of(trainer)
        # Beyond what half precision holds, in the second step, for row 1 alone.
        targets = torch.tensor([[0.001, 1e6 if (step, rank) == (1, 1) else 0.001]])
        trainer.step(iter([(torch.ones(1, 4), targets)]))
        factors.append(trainer.scaler.get_scale())
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, parameters_of(trainer), strict=True)))
    return factors, moved


def test_an_overflow_in_one_shard_makes_all_ranks_leave_the_step_out(ranks: Ranks) -> None:
    first, second = ranks(2, overflowing)
    assert first == second
    factors, moved = first
    assert moved == [True, False, True]
    assert [after / before for before, after in itertools.pairwise(factors)] == [1.0, 0.5, 1.0]


def bfloat16_step(rank: int) -> tuple[list[list[float]], str]:
    """On a rank: the average gradient of W in y = W x, and what the module computes in."""
    module = nn.Linear(2, 1, bias=False)
    settings = TrainSettings(strategy="scratch-fsdp:params=bf16", precision="bf16")
    trainer = Trainer(
        module, lambda y, t: 2 * (y * t).sum(), device=CPU, settings=settings, group=open_exchange()
    )
    trainer.compute_gradients(iter([(torch.tensor([[(256.0, 1.0)[rank], 4.0]]), torch.ones(1, 1))]))
    (name, gradient), = trainer.model.named_gradients()  # fmt: skip
    assert (name, gradient.dtype) == ("weight", torch.float32)
    assert [shard.dtype for shard in trainer.model.parameters()] == [torch.float32]
    return gradient.tolist(), str(module.weight.dtype)


def test_the_average_of_bfloat16_gradients_is_a_single_precision_number(ranks: Ranks) -> None:
    # 2 * 256 / 2 + 2 * 1 / 2 = 257, which bfloat16 does not have: 256 or 258.
    assert ranks(2, bfloat16_step) == [([[257.0, 8.0]], "torch.bfloat16")] * 2


def scattered(group: ExchangeGroup, by_backend: bool) -> tuple[Tensor, list[float]]:
    link = Link(group)
    values = (torch.arange(3 * link.size) * (link.rank + 1)).float()
    kept = values.clone()
    summed = (_Reduced(link, values) if by_backend else start_reduce_scatter(link, values)).wait()
    assert torch.equal(values, kept)
    return summed.tolist()


@pytest.mark.parametrize("by_backend", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_gets_its_part_of_the_sum(threads: Threads, size: int, by_backend: bool) -> None:
    # Rank r gives r + 1 times 0, 1, 2, ...
    factor = size * (size + 1) / 2
    expected = [[factor * (3 * rank + place) for place in range(3)] for rank in range(size)]
    assert threads(size, scattered, by_backend) == expected
