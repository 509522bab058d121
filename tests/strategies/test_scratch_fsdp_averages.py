"""What `scratch-fsdp` averages: sums of parts, gradients that overflow, and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies import Trainer, TrainSettings
from strategies.collectives.link import Link
from strategies.scratch_fsdp.flat import _Reduced, start_reduce_scatter

Ranks = Callable[..., list[Any]]
Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")


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
