"""Dealt experts: what a layer computes on ranks with other tokens each, and layers that cannot be dealt."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from harness.worker.exchange.group import ExchangeGroup
from results.errors import UsageError
from results.layout import ModelLayout
from strategies.collectives.link import Link
from strategies.experts.model import ExpertSplit
from strategies.training.slicing import Slicings

COUNTS = [[5, 0, 1, 2, 0, 0], [0, 0, 3, 0, 0, 4], [1, 0, 0, 0, 0, 0]]
"""The rows of six experts on each of three ranks: expert 1 and the experts of rank 2 have few, or none."""
LAYOUT = ModelLayout(blocks=("block",), experts=("block.experts",))


class Scaled(nn.Module):
    """Experts that scale the rows that they get, each by a number of its own."""

    def __init__(self, count: int = 6, rows: int = 6) -> None:
        super().__init__()
        self.count, self.first = count, 0
        self.scale = nn.Parameter(torch.arange(1.0, 1.0 + rows)[:, None])

    def deal(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert len(counts) == len(self.scale) == self.count
        return rows * self.scale.repeat_interleave(counts, 0)


def model_of(experts: nn.Module) -> nn.Module:
    return nn.ModuleDict({"block": nn.ModuleDict({"experts": experts})})


def has_values(tensors: Iterable[Tensor]) -> None:
    """Nothing is to be done to begin with: all ranks have the same values."""


def test_rows_come_back_to_their_places_and_gradients_are_summed(threads) -> None:
    """Row i of rank r is (r, i): an expert's gradient is the sum of the rows that chose it, on all ranks."""

    def step(group: ExchangeGroup) -> tuple[int, Tensor, Tensor, Tensor]:
        link, experts, slicings = Link(group), Scaled(), Slicings()
        split = ExpertSplit(model_of(experts), LAYOUT, link, slicings)
        split.split("block.experts", has_values)
        counts = torch.tensor(COUNTS[link.rank])
        rows = torch.tensor([[float(link.rank), float(at)] for at in range(int(counts.sum()))])
        rows.requires_grad_()
        with torch.enable_grad():
            results = experts(rows, counts)
            results.sum().backward()
        whole = slicings.whole("block.experts.scale", experts.scale.grad)
        return experts.first, results.detach(), rows.grad, whole

    expected = torch.zeros(6, 1)
    for rank, counts in enumerate(COUNTS):
        at = 0
        for expert, count in enumerate(counts):
            expected[expert] += sum(rank + row for row in range(at, at + count))
            at += count
    for rank, (first, results, gradient, whole) in enumerate(threads(3, step)):
        scales = [float(1 + expert) for expert, count in enumerate(COUNTS[rank]) for _ in range(count)]
        assert first == 2 * rank
        assert results.tolist() == [[rank * scale, at * scale] for at, scale in enumerate(scales)]
        assert gradient.tolist() == [[scale, scale] for scale in scales]
        assert torch.equal(whole, expected)


class Undealt(nn.Module):
    """Experts without a method by which they learn which of them are left."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 6
        self.scale = nn.Parameter(torch.ones(6, 1))


@pytest.mark.parametrize(
    ("experts", "layout", "words"),
    [
        (Scaled(), ModelLayout(blocks=("block",)), "a model whose layout names its layers of experts"),
        (Scaled(), ModelLayout(experts=("block.experts",)), "block.experts is in none of the blocks"),
        (Scaled(count=5, rows=5), LAYOUT, "5 experts of block.experts do not divide by ep=2"),
        (Scaled(count=4), LAYOUT, "block.experts.scale has 6 rows, which 4 experts do not divide"),
        (Undealt(), LAYOUT, r"a method deal\(first, count\)"),
        (nn.Linear(2, 2), LAYOUT, "block.experts lacks an attribute count"),
    ],
)
def test_experts_that_cannot_be_dealt_are_refused_by_name(threads, experts, layout, words) -> None:
    def refused(group: ExchangeGroup) -> None:
        with pytest.raises(UsageError, match=words):
            ExpertSplit(model_of(experts), layout, Link(group), Slicings())

    threads(2, refused)
