"""A run resumes with another number of ranks, or as another strategy: parameters and moments are equal."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resuming
import torch
from rank_builders import a_trainer
from torch import Tensor

from strategies import CheckpointWarning, Trainer
from strategies.training.boxes import Box, rectangles
from workloads.llama import LlamaShape
from workloads.llama.model import build_llama
from workloads.moe import MoEShape
from workloads.moe.model import build_moe
from workloads.workload import Workload

FOLDED = "pipeline:zbv:microbatches=2"
Ranks = Callable[..., list[Any]]
SHARDED = "scratch-fsdp"
PIPELINE = "pipeline:1f1b:microbatches=2"
STAGES = "pipeline:1f1b:microbatches=2:pp=2:shard=2"
WAYS = (
    *(("ddp", 2, "fsdp", 3), ("fsdp", 3, "ddp", 2), ("fsdp", 2, "single", 1), ("single", 1, SHARDED, 3)),
    *(
        (SHARDED, 3, "fsdp:tp=2", 2),
        ("fsdp:tp=2", 2, PIPELINE, 2),
        (PIPELINE, 2, "tp", 2),
        ("tp:sequence=true", 2, SHARDED, 2),
        (PIPELINE, 2, FOLDED, 2),
        (FOLDED, 2, "fsdp", 2),
        ("fsdp:tp=2", 2, STAGES, 4),
        (STAGES, 4, "ddp", 2),
        ("pipeline:1f1b:microbatches=2:pp=2:tp=2", 4, STAGES, 4),
    ),
    *(("zero1", 2, "zero1", 3), ("zero1", 3, "scratch-fsdp:stage=1", 2), (SHARDED, 2, SHARDED, 3)),
    *(("fsdp:tp=2:sequence=true", 4, "fsdp", 2), ("fsdp:tp=2:sequence=true", 4, FOLDED, 2)),
    *(
        ("fsdp:cp=2", 4, "fsdp", 2),
        ("fsdp:cp=2:attention=gathered", 4, FOLDED, 2),
        (FOLDED, 2, "fsdp:cp=2", 4),
    ),
    *(("fsdp:ep=2", 4, "fsdp:ep=4:cp=2", 4), ("fsdp:ep=2", 2, STAGES, 4), (f"{STAGES}:ep=2", 4, "fsdp", 2)),
)
LLAMA = LlamaShape(
    layers=4, width=16, heads=2, context=4, vocabulary=11, seq=4, kv_heads=1, hidden=24, tied=True
)
"""A model with attention, for context parallelism."""
EXPERTS = MoEShape(**vars(LLAMA), experts=4, chosen=2)


def model_of(strategies: tuple[str, str]) -> Workload | None:
    """Return the model that both strategies need; None: any model will do."""
    if any(":ep=" in name for name in strategies):
        return build_moe(EXPERTS)
    return build_llama(LLAMA) if any(":cp=" in name for name in strategies) else None


def opened(strategy: str, seed: int, both: tuple[str, str] = ("", "")) -> Trainer:
    torch.manual_seed(seed)
    made = model_of(both)
    module, layout = (made.module, made.layout) if made else (resuming.Blocks(), resuming.LAYOUT)
    trainer = a_trainer(module, resuming.loss, layout=layout, strategy=strategy, optimizer="adamw")
    trainer.attach(schedule=torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 9))
    return trainer


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(trainer.steps)
        x = torch.randint(8, (4, 4), generator=generator)
        trainer.step(iter([(x, x.roll(1, 1))]))
        trainer.attached["schedule"].step()


def whole(trainer: Trainer) -> dict[str, Any]:
    """Parameters, moments and the rest, whatever they are distributed over."""
    found: dict[str, Any] = dict(trainer.full_state_dict())
    for name, state in trainer.model.named_state(trainer.optimizer):
        found |= {f"{key} of {name}": torch.as_tensor(value).clone() for key, value in state.items()}
    rate = trainer.optimizer.param_groups[0]["lr"]
    return {**found, "steps": torch.tensor(trainer.steps), "rate": torch.tensor(rate)}


def saved(rank: int, strategy: str, folder: Path, both: tuple[str, str] = ("", "")) -> dict[str, Any]:
    trainer = opened(strategy, 0, both)
    train(trainer, 3)
    assert trainer.save(folder).wait() is not None
    return whole(trainer)


def gone_on(
    rank: int, strategy: str, folder: Path, both: tuple[str, str] = ("", "")
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The loaded state, and the state three steps later."""
    trainer = opened(strategy, 1, both)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resumed = trainer.resume(folder)
    assert not resumed.exact
    assert any("residuals and random states start anew" in note for note in resumed.notes)
    assert bool([each for each in told if each.category is CheckpointWarning]) == (rank == 0)
    loaded = whole(trainer)
    train(trainer, 3)
    return loaded, whole(trainer)


def run(ranks: Ranks, size: int, function: Callable[..., Any], *arguments: object) -> Any:
    """The state of rank 0."""
    return function(0, *arguments) if size == 1 else ranks(size, function, *arguments)[0]


def frozen_less(values: dict[str, Any]) -> dict[str, Any]:
    """Without the state of a parameter that is not trained, which a separate flat vector does not have."""
    return {
        name: value
        for name, value in values.items()
        if "blocks.0.norm.bias" not in name or " of " not in name
    }


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in WAYS[:1] else [pytest.mark.slow]) for way in WAYS], ids=str
)
def test_values_are_equal_and_training_goes_on_as_on_one_device(ranks, tmp_path, way) -> None:
    """All replicas see the same batches, so that every layout trains as one device does, up to rounding."""
    strategy, size, other, others = way
    both = strategy, other
    before = run(ranks, size, saved, strategy, tmp_path, both)
    loaded, later = run(ranks, others, gone_on, other, tmp_path, both)
    assert loaded.keys() == before.keys()
    torch.testing.assert_close(frozen_less(loaded), frozen_less(before), rtol=0, atol=0)
    alone = opened("single", 0, both)
    train(alone, 6)
    expected = whole(alone)
    assert later.keys() == expected.keys()
    torch.testing.assert_close(later, expected, rtol=1e-3, atol=1e-4)


class Late(torch.nn.BatchNorm1d):
    """With a parameter that the first replica does not use: it gets no momentum there."""

    def __init__(self) -> None:
        super().__init__(3)
        self.late = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.late if torch.distributed.get_rank() else y


def momenta(trainer: Trainer) -> dict[str, Tensor]:
    named, state = trainer.model.bare.named_parameters(), trainer.optimizer.state
    return {f"momentum of {name}": state[value]["momentum_buffer"] for name, value in named if state[value]}


def outer_momenta(trainer: Trainer) -> dict[str, Tensor]:
    return {f"outer momentum of {name}": value for name, value in trainer.model.named_outer_state()}


def apart(rank: int, folder: Path, strategy: str, steps: int) -> dict[str, Tensor]:
    """On a rank of local SGD in the middle of a period: its own parameters and momentum."""
    torch.manual_seed(0)
    trainer = a_trainer(Late(), strategy=strategy, optimizer="sgd:lr=0.1")
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        trainer.step(iter([(torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator))]))
    trainer.save(folder)
    return {**trainer.model.bare.state_dict(), **momenta(trainer), **outer_momenta(trainer)}


def together(rank: int, folder: Path, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On any number of ranks: what is loaded, and what the parameters are after a period more."""
    trainer = a_trainer(Late(), strategy=strategy, optimizer="sgd:lr=0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.resume(folder)
    loaded = {**trainer.model.bare.state_dict(), **momenta(trainer), **outer_momenta(trainer)}
    loaded = {name: value.clone() for name, value in loaded.items()}
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        trainer.step(iter([(torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator))]))
    return loaded, trainer.model.bare.state_dict()


@pytest.mark.parametrize(("strategy", "steps"), [("local-sgd:4", 1), ("local-sgd:4:outer=nesterov", 5)])
def test_replicas_that_differ_become_their_mean_on_another_number_of_ranks(
    ranks, tmp_path, strategy, steps
) -> None:
    first, second = ranks(2, apart, tmp_path, strategy, steps)
    found = ranks(3, together, tmp_path, strategy)
    for loaded, _ in found:
        for name in ("weight", "bias", "running_mean", "running_var", "momentum of weight"):
            torch.testing.assert_close(loaded[name], (first[name] + second[name]) / 2)
        # Of the one that has it.
        torch.testing.assert_close(loaded["momentum of late"], second["momentum of late"], rtol=0, atol=0)
        assert loaded["num_batches_tracked"] == steps
        outer = {name for name in loaded if name.startswith("outer")}
        assert bool(outer) is (steps == 5)
        for name in outer:
            assert loaded[name].count_nonzero()
            torch.testing.assert_close(loaded[name], first[name], rtol=0, atol=0)
    assert "momentum of late" not in first
    later = [after for _, after in found]
    torch.testing.assert_close(later[1:], later[:1] * 2, rtol=0, atol=0)


# Where a part of a tensor lies in the whole of it.


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (3, 4), (2, 3, 4), (2, 2, 2, 3)])
def test_rectangles_are_the_elements_of_the_range_in_their_order(shape) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(values.numel() + 1), 2):
        found = []
        for offsets, sizes in rectangles(shape, start, stop):
            part = values[
                tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            ]
            assert part.shape == torch.Size(sizes)
            found += part.flatten().tolist()
        assert found == list(range(start, stop))


def test_a_rectangle_is_named_by_its_ends_unless_it_is_the_whole() -> None:
    assert Box("weight", (4, 8), (0, 0), (4, 8)).text == "weight"
    assert Box("weight", (4, 8), (2, 0), (2, 8)).text == "weight[2:4,0:8]"
