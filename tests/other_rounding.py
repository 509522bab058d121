"""Sums in another order, as another CPU's kernels take them: what may differ between two right computations.

Loaded by `conftest.py`, which hands it out as `other_rounding`.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.trainer import Trainer

aten = torch.ops.aten


class OtherOrder(TorchDispatchMode):
    """Products of matrices and sums over dimensions in two halves, the second one first."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        halved = None if named else _HALVED.get(function)
        return (halved or function)(*arguments, **named or {})


def _product(multiply: Any, a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    if half == 0:
        result: Tensor = multiply(a, b)
        return result
    first = multiply(a[..., :half], b[..., :half, :])
    second = multiply(a[..., half:], b[..., half:, :])
    total: Tensor = second + first
    return total


def _sum(x: Tensor, dims: list[int] | None, keepdim: bool = False) -> Tensor:
    dim = dims[0] if dims else 0
    if not dims or x.shape[dim] < 2:
        whole: Tensor = aten.sum.dim_IntList(x, dims, keepdim)
        return whole
    half = x.shape[dim] // 2
    first, second = x.narrow(dim, 0, half), x.narrow(dim, half, x.shape[dim] - half)
    total: Tensor = aten.sum.dim_IntList(second, dims, keepdim) + aten.sum.dim_IntList(first, dims, keepdim)
    return total


def _scaled(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, *others: Any) -> Tensor:
    half = a.shape[1] // 2
    first = aten._scaled_mm(a[:, :half], b[:half], of_a, of_b, *others)
    second = aten._scaled_mm(a[:, half:], b[half:], of_a, of_b, *others)
    total: Tensor = second + first
    return total


_HALVED: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: lambda a, b: _product(aten.mm, a, b),
    aten.bmm.default: lambda a, b: _product(aten.bmm, a, b),
    aten.addmm.default: lambda bias, a, b: _product(aten.mm, a, b) + bias,
    aten.sum.dim_IntList: _sum,
    aten._scaled_mm.default: _scaled,
}


@contextmanager
def trainer_sums_otherwise(rank: int, size: int) -> Iterator[None]:
    """The gradients that are trained with, and not those that a simulation computes beside them."""
    original = Trainer.compute_gradients

    def other(self: Trainer, batches: Any) -> Tensor:
        with OtherOrder():
            return original(self, batches)

    with patch.object(Trainer, "compute_gradients", other):
        yield


@contextmanager
def trainer_norms_round_later(rank: int, size: int) -> Iterator[None]:
    """BatchNorm of the trainer gives what the next layer rounds, as a compiler's fused kernel does."""
    original, plain = Trainer.compute_gradients, functional.batch_norm

    def later(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return plain(x.float(), *arguments, **named)

    def other(self: Trainer, batches: Any) -> Tensor:
        with patch.object(functional, "batch_norm", later):
            return original(self, batches)

    with patch.object(Trainer, "compute_gradients", other):
        yield


def trainer_doubles(rank: int, size: int) -> AbstractContextManager[None]:
    """Gradients that are trained with have the right direction, and twice the size."""
    return _multiplied(2)


def trainer_climbs(rank: int, size: int) -> AbstractContextManager[None]:
    """Gradients that are trained with have the right size, and the opposite direction."""
    return _multiplied(-1)


@contextmanager
def _multiplied(factor: float) -> Iterator[None]:
    original = Trainer.compute_gradients

    def other(self: Trainer, batches: Any) -> Tensor:
        loss = original(self, batches)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss

    with patch.object(Trainer, "compute_gradients", other):
        yield


def all_sum_otherwise(rank: int, size: int) -> AbstractContextManager[object]:
    """The trainer, and with it the simulation on the same CPU."""
    return OtherOrder()


def otherwise(rank: int, path: str, name: str, *arguments: object) -> Any:
    """On a rank: what a function of a file gives where the trainer sums otherwise."""
    with trainer_sums_otherwise(rank, 0):
        return runpy.run_path(path)[name](rank, *arguments)
