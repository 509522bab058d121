"""Models that some strategies cannot train, `py:unusual_models:NAME`, and one that all of them can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import LinearSplit, ModelLayout, splits_of
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


class Conditioned(Stack):
    def forward(self, x: Tensor) -> Tensor:
        shift = self.layers[1].up(x)[:, :WIDTH]
        return super().forward(x + shift)


def outside(layout: ModelLayout | None = None) -> Workload:
    """A part of a block is called outside of the block."""
    return replace(workload_of(Conditioned()), layout=layout)


def outside_in_one_unit() -> Workload:
    return outside(ModelLayout())


class Bounded(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.mul_(0.9)
        return super().forward(x)


def written() -> Workload:
    """A block writes its own weight in the forward pass."""
    return workload_of(Stack(Bounded))


def penalized() -> Workload:
    """A loss with the norm of a gradient."""

    def step(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].detach().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.mse_loss(y, batch[1]) + slope.square().sum(dim=1).mean()

    return Workload(module=Stack(), step=step, synthetic=pairs)


class Dropped(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if torch.rand(()) < 0.5 else x
        return self.last(x)


def dropped() -> Workload:
    """Each block is left out of half of the steps, which the meta device does not run."""
    return workload_of(Dropped())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=1)
        return x + self.down(F.silu(gate) * value)


def gated(parts: int = 1) -> Workload:
    """A layer of two matrices, which its layout does not say."""
    layers = tuple(f"layers.{index}" for index in range(3))
    pair = (
        LinearSplit(name="both", by="outputs", parts=parts),
        LinearSplit(name="down", by="inputs"),
    )
    layout = ModelLayout(blocks=layers, splits=splits_of(layers, pair))
    return replace(workload_of(Stack(Gated)), layout=layout)


def gated_and_said() -> Workload:
    return gated(parts=2)


def hooked() -> Workload:
    """Hooks on parameters of a block."""
    stack = Stack()
    for parameter in stack.layers[1].parameters():
        parameter.register_hook(lambda gradient: 0.25 * gradient)
    return workload_of(stack)


class Shuffled(nn.Module):
    """Its layers are registered in the order of the rank, as a loop over a set may do."""

    def __init__(self) -> None:
        super().__init__()
        names = ["north", "south"]
        for name in names[:: -1 if dist.is_initialized() and dist.get_rank() else 1]:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.north(x) - self.south(x).tanh())


def shuffled() -> Workload:
    return workload_of(Shuffled())


class Spectral(nn.Module):
    """Complex parameters next to real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.complex64)), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex64) @ self.mix).abs())


def spectral() -> Workload:
    return workload_of(Spectral())


class Attention(nn.Module):
    """It counts tokens in its input, as models of transformers do, and scales each by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:-1], -1, 4) * places
        return x + self.down(heads.flatten(2))


class CountedInInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(0, 1, x.shape[1])[:, None, None]
        for layer in self.layers:
            x = layer(x, places)
        return x


def counted_in_inputs() -> Workload:
    def sequences(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 4, WIDTH, generator=generator)
        return x, x.roll(1, 1)

    blocks = ("layers.0", "layers.1")
    splits = (LinearSplit(name="up", by="outputs"), LinearSplit(name="down", by="inputs"))
    layout = ModelLayout(blocks=blocks, splits=splits_of(blocks, splits))
    return Workload(module=CountedInInputs(), loss=F.mse_loss, synthetic=sequences, layout=layout)
