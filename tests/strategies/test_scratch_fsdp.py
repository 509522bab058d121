"""Sharding on raw collectives over real ranks, against serial loops over the replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness.worker.exchange import open_exchange
from results.layout import ModelLayout
from strategies import Trainer, TrainSettings

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
STEPS = 3
UNIT_ROUNDOFF = 2.0**-24
KNOWN = ("normed", "dropped", "shared", "mixed", "embedded", "images")
"""Models of `data_parallel.py`: several data types, a frozen matrix, sparse gradients, convolutions."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{model}, stage {stage}": (model, {"strategy": f"scratch-fsdp:stage={stage}"})
        for model in KNOWN
        for stage in (1, 2, 3)
    },
    "offloaded": ("normed", {"strategy": "scratch-fsdp:offload=cpu"}),
    "checkpointed": ("dropped", {"activation_checkpointing": True}),
    "stage 1, accumulated": ("normed", {"strategy": "scratch-fsdp:stage=1", "accumulation": 2}),
}


def settings_of(case: str) -> tuple[str, dict[str, Any]]:
    model, settings = CASES[case]
    return model, {"strategy": "scratch-fsdp", "optimizer": "sgd:lr=0.1:momentum=0.9", **settings}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(
    ranks: Ranks, replicas: ModuleType, case: str
) -> None:
    replicas.assert_as_serial(ranks(2, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("case", [case for case in CASES if "stage 2" not in case])
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_agree_with_the_serial_loop_within_the_rounding_of_the_average(
    ranks: Ranks, replicas: ModuleType, case: str, size: int
) -> None:
    replicas.assert_near_serial(ranks(size, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_clipping_is_by_the_norm_of_all_shards(
    ranks: Ranks, replicas: ModuleType, size: int, stage: int
) -> None:
    settings = {
        "strategy": f"scratch-fsdp:stage={stage}", "optimizer": "sgd:lr=1:momentum=0", "clip_norm": 0.05
    }  # fmt: skip
    for result in ranks(size, replicas.train, "normed", settings):
        first = result[0]
        moved = [(first["parameters"][name] - first["start"][name]).flatten() for name in first["gradients"]]
        gradient = torch.cat([value.flatten() for value in first["gradients"].values()])
        assert gradient.norm() > 0.1
        torch.testing.assert_close(-torch.cat(moved), gradient * 0.05 / gradient.norm(), rtol=1e-4, atol=1e-7)


class Block(nn.Module):
    """66 elements; in a flat vector its five parameters begin at 0, 36, 44, 52 and 60."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.a(x)))
        return x + F.pad(self.b(y), (2, 2))


class Deep(nn.Module):
    """Three blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def head(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x)
        return y


class Tied(Deep):
    """The head is the first layer, the first block shares a matrix with the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()  # type: ignore[assignment]
        self.blocks[2].a.weight = self.blocks[0].a.weight

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first.weight.T)


class Frozen(Deep):
    """Of the first block and of the last a matrix is not trained, of the one between them nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].a.weight.requires_grad_(False)
        self.blocks[2].b.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class OneEach(Deep):
    """Blocks of one parameter; 36 elements do not divide by 5, nor 5 x 6 + 6 by 7."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))


class Repeated(Deep):
    """The first block is called again after the second."""

    def middle(self, x: Tensor) -> Tensor:
        for place in (0, 1, 0, 2):
            x = self.blocks[place](x)
        return x


class Recomputing(Deep):
    """A model that checkpoints its blocks itself: they are called again in backward, to their ends."""

    def middle(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return x


class Stochastic(Deep):
    def head(self, x: Tensor) -> Tensor:
        return super().head(F.dropout(x, 0.3))


MODELS = {kind.__name__: kind for kind in (Deep, Tied, Frozen, OneEach, Repeated, Recomputing, Stochastic)}
LAYOUT = ModelLayout(blocks=("blocks.0", "blocks.1", "blocks.2"))


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def batch(step: int, micro: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 1, generator=generator)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def copied(pairs: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in pairs}


def train(rank: int, model: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """On a rank: of each step the start, gradients and end; of the optimizer its state."""
    module, chosen = build(model), TrainSettings(**settings)
    trainer = Trainer(
        module, loss_of, device=CPU, settings=chosen, layout=LAYOUT, group=open_exchange()
    )  # fmt: skip
    found = []
    for step in range(STEPS):
        start = copied((*trainer.model.named_parameters(), *module.named_buffers()))
        torch.manual_seed(10 * step + rank)
        trainer.compute_gradients(batch(step, micro, rank) for micro in range(chosen.accumulation))
        gradients = copied(trainer.model.named_gradients())
        trainer.update()
        found.append(
            {
                "start": start,
                "gradients": gradients,
                "parameters": copied(trainer.model.named_parameters()),
                "state": {
                    name: copied((key, torch.as_tensor(value)) for key, value in state.items())
                    for name, state in trainer.model.named_state(trainer.optimizer)
                },
            }
        )
    return found


def serial_gradients(module: nn.Module, step: int, size: int, accumulation: int) -> Iterator[Any]:
    """By parameter: the average over the replicas, one after another, and that of the absolute values."""
    totals: dict[str, Tensor] = {}
    sizes: dict[str, Tensor] = {}
    for replica in range(size):
        twin = copy.deepcopy(module)
        torch.manual_seed(10 * step + replica)
        for micro in range(accumulation):
            before = copied((n, p.grad) for n, p in twin.named_parameters() if p.grad is not None)
            inputs, targets = batch(step, micro, replica)
            (loss_of(twin(inputs), targets) / accumulation).backward()
            for name, parameter in twin.named_parameters():
                if parameter.grad is not None:
                    own = parameter.grad - before.get(name, 0)
                    sizes[name] = sizes.get(name, 0) + own.abs() / size
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                totals[name] = totals.get(name, 0) + parameter.grad / size
        if replica == 0:
            buffers = dict(twin.named_buffers())
    yield from (totals, sizes, buffers)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def optimizer_for(text: str, module: nn.Module) -> torch.optim.Optimizer:
    if text.startswith("adamw"):
        return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


ADAMW = "adamw:lr=0.01:weight_decay=0.1"
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{model}, stage {stage}": (model, {"strategy": f"scratch-fsdp:stage={stage}"})
        for model in MODELS
        for stage in (1, 2, 3)
    },
    "AdamW": ("Deep", {"optimizer": ADAMW}),
    "AdamW, stage 1, not ahead": (
        "Tied",
        {"optimizer": ADAMW, "strategy": "scratch-fsdp:stage=1:prefetch=0"},
    ),
    "checkpointed": ("Stochastic", {"activation_checkpointing": True}),
    "selectively checkpointed": ("Tied", {"activation_checkpointing": "selective"}),
    "frozen and checkpointed": ("Frozen", {"activation_checkpointing": True}),
    "far ahead": ("Frozen", {"strategy": "scratch-fsdp:prefetch=8"}),
    "repeated, not ahead": ("Repeated", {"strategy": "scratch-fsdp:prefetch=0"}),
    "accumulated whole": ("Stochastic", {"strategy": "scratch-fsdp:stage=1", "accumulation": 3}),
}


def exact_settings(case: str) -> tuple[str, dict[str, Any]]:
    model, settings = EXACT[case]
    return model, {"strategy": "scratch-fsdp", "optimizer": "sgd:lr=0.1:momentum=0.9", **settings}


@pytest.mark.parametrize("case", EXACT)
def test_units_of_blocks_train_as_a_serial_loop_does_bit_for_bit(ranks: Ranks, case: str) -> None:
    model, settings = exact_settings(case)
    results = ranks(2, train, model, settings)
    module = build(model)
    optimizer = optimizer_for(settings["optimizer"], module)
    for step in range(STEPS):
        gradients, _, buffers = serial_gradients(module, step, 2, settings.get("accumulation", 1))
        for name, parameter in module.named_parameters():
            parameter.grad = gradients.get(name)
        optimizer.step()
        module.load_state_dict({**module.state_dict(), **buffers})
        expected = {name: gradients[name] for name, _ in module.named_parameters() if name in gradients}
        for result in results:
            assert_same(result[step]["gradients"], expected)
            assert_same(result[step]["parameters"], dict(module.named_parameters()))
    named = {
        name: optimizer.state[value] for name, value in module.named_parameters() if value in optimizer.state
    }
    for result in results:
        assert list(result[-1]["state"]) == list(named)
        for name, state in result[-1]["state"].items():
            assert_same(state, {key: torch.as_tensor(named[name][key]) for key in sorted(named[name])})


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_micro_batches_are_averaged_one_by_one(ranks: Ranks, size: int, stage: int) -> None:
    """2 or 3 times 3 terms in an order of the strategy's own: see `assert_near_serial` for the bound."""
    settings = {"strategy": f"scratch-fsdp:stage={stage}", "optimizer": "sgd:lr=0.1", "accumulation": 3}
    results = ranks(size, train, "Tied", settings)
    roundings = 3 * size + 1
    bound = 2 * roundings * UNIT_ROUNDOFF / (1 - roundings * UNIT_ROUNDOFF)
    for step in range(STEPS):
        module = build("Tied")
        module.load_state_dict(results[0][step]["start"], strict=False)
        gradients, sizes, _ = serial_gradients(module, step, size, 3)
        for result in results:
            assert result[step]["gradients"].keys() == gradients.keys()
            for name, gradient in result[step]["gradients"].items():
                # That a sum of micro-batches is taken apart again for their sizes rounds as well.
                assert bool(((gradient - gradients[name]).abs() <= 1.01 * bound * sizes[name]).all()), name
            assert_same(result[step]["parameters"], results[0][step]["parameters"])


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_gathered_ahead_changes_no_bit(ranks: Ranks, stage: int) -> None:
    settings = {"optimizer": ADAMW, "accumulation": 2}
    runs = [
        ranks(3, train, "Tied", {"strategy": f"scratch-fsdp:stage={stage}:prefetch={ahead}", **settings})
        for ahead in (0, 1, 2)
    ]
    for run in runs[1:]:
        for rank, result in enumerate(run):
            assert_same(result[-1]["parameters"], runs[0][rank][-1]["parameters"])
