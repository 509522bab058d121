"""Models that some strategies cannot train, `py:unusual_models:NAME`, and one that all of them can."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads import Workload

WIDTH = 8


def pairs(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, WIDTH, generator=generator)
    return x, x[:, :1] - x[:, 1:2]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Stack(nn.Module):
    """Three layers between two linear ones."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.Sequential(*(layer() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)))


def workload_of(module: nn.Module) -> Workload:
    return Workload(module=module, loss=F.mse_loss, synthetic=pairs)


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def scalar() -> Workload:
    """A parameter without a dimension."""
    return workload_of(Scaled())
