"""Clipping where no rank has all gradients: against numpy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_builders import Queues
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.worker.exchange.group import ExchangeGroup
from strategies.collectives.link import Link
from strategies.devices import KINDS, Host
from strategies.training import clipping
from strategies.training.clipping import EPSILON, clip_shards

CPU = torch.device("cpu")


def gradients_of(rank: int) -> list[tuple[Tensor, int]]:
    """Gradients that all ranks have, and this rank only: pieces of 4 values, a rest, none, and turned in
    memory."""
    generator = torch.Generator().manual_seed(7)
    alike = torch.randn(3, 3, generator=generator)
    generator.manual_seed(rank)
    shapes = [(8,), (5,), (0,), (), (2, 3, 1)]
    own = [torch.randn(shape, generator=generator) for shape in shapes]
    return [(alike, 3), *((value, 1) for value in own), (torch.randn(3, 5, generator=generator).t(), 1)]


def clipped(group: ExchangeGroup, max_norm: float) -> list[Tensor]:
    gradients = gradients_of(group.rank())
    clip_shards(gradients, max_norm, Link(group), CPU)
    return [value for value, _ in gradients]


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("device", [Host, Queues])
def test_the_norm_is_of_what_all_ranks_have_with_copies_counted_once(
    threads, monkeypatch, max_norm, device
) -> None:
    monkeypatch.setattr(clipping, "PIECE", 4)
    monkeypatch.setitem(KINDS, "cpu", device)
    found = threads(3, clipped, max_norm)
    everyone = [gradients_of(rank) for rank in range(3)]
    distinct = [everyone[0][0][0], *(value for own in everyone for value, copies in own if copies == 1)]
    norm = np.sqrt(sum(np.square(value.numpy().astype(np.float64)).sum() for value in distinct))
    assert 0.5 < norm < 1e3
    factor = min(1.0, max_norm / (norm + EPSILON))
    for own, before in zip(found, everyone, strict=True):
        for value, (old, _) in zip(own, before, strict=True):
            # Of the factor and of the product, in single precision.
            np.testing.assert_allclose(value.numpy(), old.numpy().astype(np.float64) * factor, rtol=2**-23)


@pytest.mark.parametrize("device", [Host, Queues])
def test_a_sparse_gradient_counts_what_it_has_twice_as_its_sum(threads, monkeypatch, device) -> None:
    monkeypatch.setitem(KINDS, "cpu", device)

    def norm(group: ExchangeGroup) -> Tensor:
        # Row 1 twice: (1 + 2, 0) and row 0 (0, 4): a norm of 5.
        rows = torch.tensor([[1, 1, 0]])
        values = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]])
        gradient = torch.sparse_coo_tensor(rows, values, (3, 2), check_invariants=True)
        clip_shards([(gradient, 1)], 1.0, Link(group), CPU)
        return gradient.to_dense()

    (found,) = threads(1, norm)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.8], [0.6, 0.0], [0.0, 0.0]]), rtol=1e-6, atol=0)


class Doubles(TorchDispatchMode):
    """Notes the largest tensor in double precision that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.largest = max(self.largest, made.numel())
        return made


def test_on_a_gpu_the_number_of_calls_does_not_grow_with_the_number_of_gradients(
    threads, monkeypatch
) -> None:
    monkeypatch.setitem(KINDS, "cpu", Queues)

    def calls(group: ExchangeGroup, gradients: int) -> int:
        with Calls() as found:
            clip_shards([(torch.ones(3), 1) for _ in range(gradients)], 1.0, Link(group), CPU)
        return len(found.names) - gradients  # each is made inside

    assert threads(1, calls, 2) == threads(1, calls, 40)


class Calls(TorchDispatchMode):
    """Counts the calls of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_on_a_gpu_the_host_reads_no_number(threads, monkeypatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", Queues)

    def read(group: ExchangeGroup) -> list[str]:
        with Calls() as found:
            clip_shards(gradients_of(group.rank()), 1.0, Link(group), CPU)
        return [name for name in found.names if name in READS]

    assert threads(3, read) == [[], [], []]


READS = {
    "aten._local_scalar_dense.default",
    "aten.lift_fresh.default",
    "aten.equal.default",
    "aten.nonzero.default",
}
"""The operators by which the host gets a number of the device's, or makes a tensor of numbers of the host."""


def test_a_piece_at_a_time_is_in_double_precision(threads) -> None:
    def largest(group: ExchangeGroup) -> int:
        with Doubles() as doubles:
            clip_shards([(torch.ones(3 * clipping.PIECE + 1), 1)], 1.0, Link(group), CPU)
        return doubles.largest

    assert threads(1, largest) == [clipping.PIECE]
