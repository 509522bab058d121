"""A fused update on a device with streams: which optimizers, and a state that goes on in either way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Trainer, TrainSettings
from strategies.devices import KINDS, Host

CPU = torch.device("cpu")


class Queues(Host):
    """The CPU, taken for a device whose calls return before their work is done."""

    asynchronous = True


def batches(first: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(first, 100):
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def trainer(optimizer: str) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    settings = TrainSettings(strategy="single", optimizer=optimizer)
    return Trainer(model, nn.functional.mse_loss, device=CPU, settings=settings)


def trained(trainer: Trainer, first: int, steps: int) -> Trainer:
    data = batches(first)
    for _ in range(steps):
        trainer.step(data)
    return trainer


def fused(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group.get("fused") for group in optimizer.param_groups]


def test_adamw_is_fused_on_a_device_with_streams_and_sgd_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused(trainer("adamw").optimizer) == [None]
    monkeypatch.setitem(KINDS, "cpu", Queues)
    assert fused(trainer("adamw").optimizer) == [True]
    assert not any(fused(trainer("sgd").optimizer))


@pytest.mark.parametrize(("before", "after"), [(Host, Queues), (Queues, Host), (Queues, Queues)])
def test_training_goes_on_from_a_state_of_the_other_kind_of_update(
    monkeypatch: pytest.MonkeyPatch, before: type[Host], after: type[Host]
) -> None:
    expected = trained(trainer("adamw:lr=0.01"), 0, 6)
    monkeypatch.setitem(KINDS, "cpu", before)
    state = trained(trainer("adamw:lr=0.01"), 0, 3).state_dict()
    monkeypatch.setitem(KINDS, "cpu", after)
    found = trainer("adamw:lr=0.01")
    found.load_state_dict(state)
    assert fused(found.optimizer) == [True if after is Queues else None]
    trained(found, 3, 3)
    assert [int(each["step"]) for each in found.optimizer.state.values()] == [6] * 4
    # Both compute in single precision: of six updates of at most the rate each, a few roundings.
    for (name, mine), (_, its) in zip(
        found.model.bare.named_parameters(), expected.model.bare.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=6 * 0.01 * 16 * 2**-24 + 6 * 2**-24, msg=name)
