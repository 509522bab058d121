"""torch's PowerSGD behind our hook: the same gradients as torch alone, and what it keeps, by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies import Trainer, TrainSettings
from strategies.snapshot import Snapshot

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
OPTIMIZER = "sgd:lr=0.1:momentum=0.9"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def trainer_of(strategy: str = "ddp", group: ExchangeGroup | None = None) -> Trainer:
    settings = TrainSettings(strategy=strategy, compression="torch-powersgd:2", optimizer=OPTIMIZER, seed=11)
    return Trainer(network(), F.cross_entropy, device=CPU, settings=settings, group=group or open_exchange())


def gradients(trainer: Trainer, data: Iterator[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
    trainer.compute_gradients(data)
    found = {name: value.flatten().tolist() for name, value in trainer.model.named_gradients()}
    trainer.update()
    return found


def ours(rank: int) -> list[dict[str, list[float]]]:
    trainer, data = trainer_of(), batches(rank)
    return [gradients(trainer, data) for _ in range(5)]


def torch_alone(rank: int) -> list[dict[str, list[float]]]:
    module, data = network(), batches(rank)
    wrapper = DistributedDataParallel(module)
    state = PowerSGDState(None, 2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8, random_seed=11)
    wrapper.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(5):
        inputs, targets = next(data)
        F.cross_entropy(wrapper(inputs), targets).backward()
        found.append({name: value.grad.flatten().tolist() for name, value in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_gradients_are_those_of_torchs_own_hook_bit_for_bit(ranks: Ranks) -> None:
    # The model is one bucket: with several, torch's hook leaves to chance which all-reduce comes first.
    assert ranks(2, ours) == ranks(2, torch_alone)


def kept(trainer: Trainer) -> dict[str, Tensor]:
    exchange = trainer.model.gradient_exchange
    assert exchange is not None
    return {name: value.clone() for name, value in exchange.residual()}


def units(rank: int) -> tuple[bool, bool]:
    """On a rank: whether a sent bias keeps (g_r - mean) / p, and whether nothing is kept while dense."""
    trainer, data, size = trainer_of(), batches(rank), dist.get_world_size()
    for _ in range(2):
        trainer.step(data)
    dense = kept(trainer)
    inputs, targets = next(data)
    own = torch.autograd.grad(
        F.cross_entropy(trainer.model.bare(inputs), targets), trainer.model.bare[4].bias
    )  # type: ignore[index]
    trainer.compute_gradients(iter([(inputs, targets)]))
    mean = dict(trainer.model.named_gradients())["4.bias"]
    return torch.equal(kept(trainer)["4.bias"], (own[0] - mean) / size), dense == {}


def test_what_is_kept_is_in_units_of_shares(ranks: Ranks) -> None:
    assert ranks(2, units) == [(True, True)] * 2


def redo(rank: int, strategy: str) -> tuple[bool, bool]:
    """On a rank: whether steps that are taken again after a snapshot are the same, and kept errors too."""
    trainer, data = trainer_of(strategy), batches(rank)
    for _ in range(4):
        trainer.step(data)
    snapshot, drawn = Snapshot(trainer), [next(data) for _ in range(3)]
    first = [gradients(trainer, iter([batch])) for batch in drawn]
    errors = kept(trainer)
    snapshot.restore()
    second = [gradients(trainer, iter([batch])) for batch in drawn]
    return first == second, all(torch.equal(errors[name], value) for name, value in kept(trainer).items())


@pytest.mark.parametrize("strategy", ["ddp", "ddp:bucket_mb=0.001"])
def test_a_snapshot_brings_back_errors_factors_and_the_count_of_steps(ranks: Ranks, strategy: str) -> None:
    assert ranks(2, redo, strategy) == [(True, True)] * 2


def resume(rank: int) -> dict[str, Any]:
    """On a rank: errors go to a new wrapper, whose buckets are others at first; two steps there."""
    trainer, data = trainer_of("ddp:bucket_mb=0.001"), batches(rank)
    for _ in range(4):
        trainer.step(data)
    fresh = trainer_of("ddp:bucket_mb=0.001")
    fresh.model.load_strategy_state(trainer.model.strategy_state())
    before = kept(trainer)
    found: dict[str, Any] = {
        "moved": all(torch.equal(before[name], part) for name, part in kept(fresh).items())
    }
    found["all"] = kept(fresh).keys() == before.keys()
    for step in range(2):
        carried, (inputs, targets) = kept(fresh), next(data)
        own = torch.autograd.grad(
            F.cross_entropy(fresh.model.bare(inputs), targets), list(fresh.model.bare.parameters())
        )
        fresh.compute_gradients(iter([(inputs, targets)]))
        applied, residual = dict(fresh.model.named_gradients()), kept(fresh)
        names = [name for name, _ in fresh.model.bare.named_parameters()]
        errors = []
        for name, gradient in zip(names, own, strict=True):
            parts = torch.stack([gradient / 2, carried[name], -residual[name]]).double()
            size = parts.abs().sum()
            total = parts.sum(0)
            dist.all_reduce(total)
            errors.append(((total - applied[name]).norm() / size).item())
        found[f"step {step}"] = max(errors) < 256 * 2**-24
        found[f"compressed {step}"] = all(bool((residual[name] != carried[name]).any()) for name in names)
        fresh.update()
    return found


def test_errors_outlive_a_new_distribution_over_buckets(ranks: Ranks) -> None:
    for found in ranks(2, resume):
        assert all(found.values()), found


def of_zeros(rank: int) -> bool:
    trainer = trainer_of()
    trainer.loss = lambda outputs, targets: 0 * outputs.sum()
    found = [gradients(trainer, batches(rank)) for _ in range(4)]
    return all(value == 0 for step in found for values in step.values() for value in values)


def test_gradients_of_zeros_stay_zeros(ranks: Ranks) -> None:
    assert ranks(2, of_zeros) == [True] * 2
