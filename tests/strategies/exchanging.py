"""Shared by the tests of compressors and collectives: buckets, their values, and a wire of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from strategies.exchange.buckets import Bucket, pieces_of
from strategies.gradient_exchange import ExchangeSettings, GradientExchange

Threads = Callable[..., list[Any]]
CPU = torch.device("cpu")


def bucket_of(values: Tensor, index: int = 0, shape: tuple[int, ...] | None = None) -> Bucket:
    """A bucket of one parameter, which is as long as the values or has another shape of their size."""
    pieces = pieces_of(iter([("w", torch.Size(values.shape if shape is None else shape))]))
    return Bucket(index=index, values=values, pieces=pieces)


def an_exchange(group: ExchangeGroup, spec: str, *, seed: int = 0) -> GradientExchange:
    """An exchange with a compressor, which keeps the residual as it is for a proof."""
    exchange = GradientExchange(ExchangeSettings(group=group, compression=spec, seed=seed), device=CPU)
    exchange.audited = True
    return exchange


def residual_of(exchange: GradientExchange) -> Tensor:
    """A copy of the residual of the only parameter."""
    ((_, residual),) = exchange.residual()
    return residual.clone()


def normal(n: int, *seeds: int) -> Tensor:
    """`n` normal values that follow from the seeds, each below 1000."""
    seed = sum(1000**place * seed for place, seed in enumerate(seeds))
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def whole_numbers(rank: int, numel: int) -> Tensor:
    """2 ** r * (1000 + i) for rank r at place i: exact in single precision in any order of the sum, so that
    every wrong sum of ranks or places shows."""
    return 2.0**rank * (1000 + torch.arange(numel, dtype=torch.float32))


class Alone:
    """A wire of one rank."""

    rank, size = 0, 1

    def largest(self, values: Tensor) -> None: ...

    def all_reduce(self, values: Tensor) -> None: ...

    def all_gather(self, values: Tensor) -> Tensor:
        return values.view(1, -1)

    def all_to_all(self, values: Tensor) -> Tensor:
        return values
