"""Tokens that are split between layers: what a rank keeps, and models that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from builders import a_cell
from torch import Tensor, nn

from harness.worker.exchange.group import ExchangeGroup
from results.errors import UsageError
from results.layout import LinearSplit, ModelLayout, splits_of
from strategies.catalog import STRATEGIES
from strategies.collectives.link import Link
from strategies.tensor_parallel import sequence
from strategies.tensor_parallel.model import TensorSplit
from strategies.training.slicing import Slicings
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt
from workloads.llama import LlamaShape
from workloads.llama.model import build_llama

BLOCKS = ("blocks.0", "blocks.1")
SPLITS = (LinearSplit(name="up", by="outputs"), LinearSplit(name="down", by="inputs"))
LAYOUT = ModelLayout(blocks=BLOCKS, splits=splits_of(BLOCKS, SPLITS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result if added is None else result + added


class Model(nn.Module):
    """Tokens (samples, tokens, 4) through two blocks, with what a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(4, 4),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(4, 1),
        )
        self.between: Callable[[Tensor], Tensor] = lambda x: x
        self.added: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x), **self.added)
        result: Tensor = self.head(self.blocks[1](self.between(x)))
        return result


def _convolution(model: Model) -> None:
    model.blocks[1].register_module("mix", nn.Conv1d(4, 4, 1))


def _shared(model: Model) -> None:
    model.head = nn.Linear(4, 4)
    model.head.bias = model.blocks[0].norm.bias


def _called_between(model: Model) -> None:
    model.between = model.stem


def _cut_between(model: Model) -> None:
    model.between = lambda x: x[:, 1:]


def _second_gradient(model: Model) -> None:
    model.added = {"added": torch.ones(1, requires_grad=True)}


def _two_results(model: Model) -> None:
    model.blocks[1].register_forward_hook(lambda block, inputs, output: (output, output))


def _nothing(model: Model) -> None:
    """A model that is split, except for its batch or layout."""


def nothing_to_take(values: Iterable[Tensor]) -> None:
    """All ranks have the same values."""


def run(group: ExchangeGroup, change: Callable[[Model], None], layout: ModelLayout, x: Tensor) -> None:
    model = Model()
    change(model)
    TensorSplit(model, layout, Link(group), Slicings(), nothing_to_take, sequence=True)
    with torch.enable_grad():
        model(x)


X = torch.ones(2, 6, 4)


@pytest.mark.parametrize(
    ("change", "layout", "x", "words"),
    [
        (_nothing, ModelLayout(splits=LAYOUT.splits), X, "blocks.0.up is in none of the blocks"),
        (_convolution, LAYOUT, X, "blocks.1.mix, a Conv1d, computes tokens from others"),
        (_shared, LAYOUT, X, "blocks.0 and what is around the blocks share"),
        (_nothing, LAYOUT, X[0], "of blocks.0 by position is not (samples, tokens, features)"),
        (_nothing, LAYOUT, X[:, :5], "5 tokens do not divide into 2 pieces (the nearest lengths: 4 and 6)"),
        (_called_between, LAYOUT, X, "stem is called between two blocks"),
        (_cut_between, LAYOUT, X, "of blocks.1 by position is not the output of the block before it"),
        (_second_gradient, LAYOUT, X, "blocks.0 takes a second input that gets a gradient"),
        (_two_results, LAYOUT, X, "blocks.1 does not return (samples, tokens, features)"),
    ],
)
def test_a_model_whose_tokens_cannot_be_split_is_refused_by_name(threads, change, layout, x, words) -> None:
    def refused(group: ExchangeGroup) -> str:
        with pytest.raises(UsageError) as error:
            run(group, change, layout, x)
        return str(error.value)

    for found in threads(2, refused):
        assert words in found
        assert found.endswith("leave sequence=true out")


def test_a_forward_pass_after_one_that_failed_is_as_the_first(threads) -> None:
    def both(group: ExchangeGroup) -> None:
        model = Model()
        TensorSplit(model, LAYOUT, Link(group), Slicings(), nothing_to_take, sequence=True)
        model.between = lambda x: x[0, 0, 0, 0]
        with pytest.raises(IndexError):
            model(X)
        model.between = lambda x: x
        assert model(X).shape == (2, 6, 1)

    threads(2, both)


def test_a_second_input_without_a_gradient_is_taken_as_it_is(threads) -> None:
    def constant(model: Model) -> None:
        model.added = {"added": torch.ones(1)}

    threads(2, run, constant, LAYOUT, X)


@pytest.mark.parametrize("most", [8, 2**20])
def test_small_gradients_are_summed_at_once_and_each_large_one_alone(threads, monkeypatch, most) -> None:
    monkeypatch.setattr(sequence, "BUCKET_BYTES", most)

    def summed(group: ExchangeGroup) -> tuple[list[list[float]], int]:
        model = Model()
        split = sequence.SequenceSplit(model, LAYOUT, Link(group))
        found = [torch.full((size,), 1.0 + group.rank()) for size in (4, 2, 1)]
        names = ("blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.bias")
        split.sum_gradients(zip(names, found, strict=True), torch.device("cpu"))
        return [each.tolist() for each in found], group.traffic.operations

    for found, operations in threads(2, summed):
        assert found == [[3.0] * 4, [3.0] * 2, [3.0]]
        assert operations == (2 if most == 8 else 1)


SHAPES: dict[str, Any] = {
    "gpt": GPTShape(layers=2, width=16, heads=4, context=8, vocabulary=37, seq=8),
    "llama": LlamaShape(
        layers=2, width=16, heads=4, kv_heads=4, hidden=24, context=8, vocabulary=37, seq=8, tied=True
    ),
}


def saved(group: ExchangeGroup, model: str, *, sequence: bool) -> int:
    """Bytes of the storages that autograd keeps from a forward pass, without parameters."""
    workload = build_gpt(SHAPES[model]) if model == "gpt" else build_llama(SHAPES[model])
    TensorSplit(workload.module, workload.layout, Link(group), Slicings(), nothing_to_take, sequence=sequence)
    own = {parameter.untyped_storage().data_ptr() for parameter in workload.module.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(value)
        return value

    inputs, targets = workload.synthetic(torch.Generator().manual_seed(0), 3)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        workload.loss(workload.module(inputs), targets)
    return sum(kept.values())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("model", SHAPES)
def test_a_rank_keeps_the_bytes_of_the_closed_form(threads, model, sequence) -> None:
    parts = SHAPES[model].parts()
    strategy = "tp:sequence=true" if sequence else "tp"
    cell = a_cell(workload="gpt-nano", strategy=strategy, gpus=2, micro_batch=3)
    expected = STRATEGIES.facts(strategy).sizes(cell, parts).activations().at_loss - 2 * 3 * parts.logits
    assert threads(2, partial(saved, sequence=sequence), model) == [expected] * 2
