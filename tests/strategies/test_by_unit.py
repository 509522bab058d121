"""Models that are given their initial values unit by unit: the same values, and one unit whole at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders import a_cell
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.worker.exchange.group import open_exchange
from results.parts import ModelParts
from strategies import Trainer, TrainSettings
from strategies.catalog import STRATEGIES
from strategies.training.parallel import Blank
from workloads.build import build
from workloads.gpt import GPTShape
from workloads.llama import LlamaShape
from workloads.resnet import ResNetShape
from workloads.shape import Shape

CPU = torch.device("cpu")
PATIENCE_S = 20.0
GPT = GPTShape(layers=2, width=24, heads=4, context=20, vocabulary=37, seq=11)
LLAMA = LlamaShape(
    layers=2, width=32, heads=4, kv_heads=2, hidden=44, context=64, vocabulary=29, seq=13, tied=True
)
RESNET = ResNetShape(blocks=(1, 1, 1, 1), bottleneck=False, px=48, classes=7)


def trainer_of(shape: Shape, settings: TrainSettings, *, by_unit: bool) -> Trainer:
    """On a rank: collective."""
    workload = build(shape, by_unit=by_unit)
    module, initial = workload.module, workload.initial
    assert (initial is not None) == by_unit
    return Trainer(
        module if initial is None else Blank(module, initial),
        workload.loss,
        device=CPU,
        settings=settings,
        layout=workload.layout,
        group=open_exchange(),
    )


def start_of(rank: int, shape: Shape, settings: TrainSettings) -> Any:
    """On a rank: parameters and buffers that a trainer starts with, drawn by each rank from its own seed."""
    torch.manual_seed(5 + rank)
    model = trainer_of(shape, settings, by_unit=True).model
    return {
        name: value.clone()
        for named in (model.named_parameters(), model.named_buffers())
        for name, value in named
    }


@pytest.mark.parametrize(
    ("shape", "size", "strategy"),
    [
        *((GPT, size, strategy) for size in (1, 2) for strategy in ("fsdp", "scratch-fsdp", "tp")),
        *((LLAMA, 2, strategy) for strategy in ("fsdp", "scratch-fsdp", "tp")),
        *((RESNET, 2, strategy) for strategy in ("fsdp", "scratch-fsdp")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Shape) else str(value),
)
def test_all_ranks_start_as_rank_0_would_whole(ranks, shape, strategy, size) -> None:
    torch.manual_seed(5)
    whole = build(shape).module
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for found in ranks(size, start_of, shape, TrainSettings(strategy=strategy)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        TrainSettings(strategy="hsdp", node_size=2),
        TrainSettings(strategy="fsdp:tp=2"),
        TrainSettings(strategy="manual:reshard.offload+keep.checkpoint"),
        TrainSettings(strategy="scratch-fsdp:offload=cpu:params=bf16", precision="bf16"),
    ],
    ids=lambda settings: settings.strategy,
)
@pytest.mark.slow
def test_other_layouts_train_alike(ranks, settings) -> None:
    torch.manual_seed(5)
    expected = dict(build(GPT).module.named_parameters())
    for found in ranks(4, start_of, GPT, settings):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


class Living(TorchDispatchMode):
    """The most bytes of memory that tensors had at once, of all that an operation took or made.

    A thread of Gloo keeps what it has moved until it runs again. So this thread waits where more than
    `allowed` lives: what the model holds stays.
    """

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.peak = 0
        self._allowed = allowed
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                known = StorageWeakRef(tensor.untyped_storage())
                self._known[known.cdata] = known
        end = time.monotonic() + PATIENCE_S
        while self._living() > self._allowed >= self.peak and time.monotonic() < end:
            time.sleep(0.001)
        self.peak = max(self.peak, self._living())
        return made

    def _living(self) -> int:
        self._known = {key: known for key, known in self._known.items() if not known.expired()}
        return sum(map(_bytes, self._known.values()))


def _bytes(known: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
    return 0 if storage is None else storage.nbytes()


DEEP = GPTShape(layers=8, width=64, heads=4, context=32, vocabulary=256, seq=16)
"""8 blocks of 200 kB; 74 kB around them, of which one parameter has 66 kB."""


def peak_of_building(rank: int, strategy: str, by_unit: bool, allowed: int) -> int:
    """On a rank: bytes, from before the model is built until a trainer has it."""
    settings = TrainSettings(strategy=strategy)
    with Living(allowed) as living:
        trainer_of(DEEP, settings, by_unit=by_unit)
    return living.peak


@pytest.mark.parametrize(
    ("strategy", "size"),
    [("fsdp", 2), ("scratch-fsdp", 2), ("tp", 2), pytest.param("fsdp:tp=2", 4, marks=pytest.mark.slow)],
)
def test_one_unit_is_whole_at_a_time(ranks, strategy, size) -> None:
    """Living tensors take, while a model is built, the predicted memory, to a tenth, and little more than
    half of a model that is built whole: of 1.68 MB half a model in shards or in parts of layers, and a block
    or a layer."""
    facts, parts = STRATEGIES.facts(strategy), DEEP.parts()
    cell = a_cell(workload="gpt-nano", strategy=strategy, gpus=size)
    moments = [moment for moment in facts.moments(cell, parts) if moment.moment == "model built"]
    predicted = max(moment.total for moment in moments)
    assert predicted < 0.7 * 4 * parts.values
    # Beside the model `scratch-fsdp` holds a number of 4 bytes for each unit, and one of 8 for each block.
    numbers = 4 * (DEEP.layers + 1) + 8 * DEEP.layers
    for peak in ranks(size, peak_of_building, strategy, True, predicted + numbers):
        assert 0.9 * predicted <= peak <= predicted + numbers
    for peak in ranks(size, peak_of_building, strategy, False, sys.maxsize):
        assert peak > 4 * parts.values


def test_a_plan_of_a_model_that_is_built_whole_has_it_whole() -> None:
    """A model without facts, as a user's."""
    parts = DEEP.parts()
    whole = 4 * parts.values
    unknown = ModelParts(stem=parts.stem, blocks=parts.blocks, head=parts.head)
    assert built("fsdp", 4, unknown) > whole
    assert built("fsdp:tp=2", 4, unknown) > whole
    assert built("tp", 4, unknown) > whole
    assert built("fsdp", 4, parts) < whole / 2


def built(strategy: str, gpus: int, parts: ModelParts) -> int:
    cell = a_cell(workload="gpt-nano", strategy=strategy, gpus=gpus)
    moments = STRATEGIES.facts(strategy).moments(cell, parts)
    return max(moment.total for moment in moments if moment.moment == "model built")
