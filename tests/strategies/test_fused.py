"""A fused update on a device with streams: its parameters, a state that either kind of update resumes, and
steps that a loss scaler leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_builders import Queues
from torch import Tensor, nn

from strategies import Trainer, TrainSettings
from strategies.devices import KINDS, Host
from strategies.optimizers import build_optimizer

CPU = torch.device("cpu")


def batches(first: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(first, 100):
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def trainer(optimizer: str, dtype: torch.dtype = torch.float32, **others: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    settings = TrainSettings(**{"strategy": "single", "optimizer": optimizer, **others})
    return Trainer(model, nn.functional.mse_loss, device=CPU, settings=settings)


def trained(trainer: Trainer, first: int, steps: int) -> Trainer:
    """Train for `steps` steps in double precision."""
    data = ((inputs.double(), targets.double()) for inputs, targets in batches(first))
    for _ in range(steps):
        trainer.step(data)
    return trainer


def fused(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group.get("fused") for group in optimizer.param_groups]


def test_adamw_is_fused_on_a_device_with_streams_and_sgd_is_not(monkeypatch) -> None:
    assert fused(trainer("adamw").optimizer) == [None]
    monkeypatch.setitem(KINDS, "cpu", Queues)
    assert fused(trainer("adamw").optimizer) == [True]
    assert not any(fused(trainer("sgd").optimizer))


@pytest.mark.parametrize(("before", "after"), [(Host, Queues), (Queues, Host), (Queues, Queues)])
def test_training_goes_on_from_a_state_of_the_other_kind_of_update(monkeypatch, before, after) -> None:
    expected = trained(trainer("adamw:lr=0.01", torch.float64), 0, 6)
    monkeypatch.setitem(KINDS, "cpu", before)
    state = trained(trainer("adamw:lr=0.01", torch.float64), 0, 3).state_dict()
    monkeypatch.setitem(KINDS, "cpu", after)
    found = trainer("adamw:lr=0.01", torch.float64)
    found.load_state_dict(state)
    assert fused(found.optimizer) == [True if after is Queues else None]
    trained(found, 3, 3)
    assert [int(each["step"]) for each in found.optimizer.state.values()] == [6] * 4
    # Both compute in double precision: what single precision would round is no part of the difference.
    for (name, mine), (_, its) in zip(
        found.model.bare.named_parameters(), expected.model.bare.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=6 * 0.01 * 16 * 2**-24 + 6 * 2**-24, msg=name)


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(2, 3).t(),
        torch.zeros(1, 4, 2, 2).to(memory_format=torch.channels_last),
        torch.zeros(2, dtype=torch.cfloat),
    ],
    ids=["transposed", "channels last", "complex"],
)
def test_the_kernel_is_given_real_numbers_row_by_row(monkeypatch, odd) -> None:
    monkeypatch.setitem(KINDS, "cpu", Queues)
    plain = nn.Parameter(torch.zeros(3))
    assert fused(build_optimizer("adamw", [plain])) == [True]
    assert fused(build_optimizer("adamw", [plain, nn.Parameter(odd)])) == [None]


def overflowing(rank: int, strategy: str) -> list[tuple[float, dict[str, Tensor], int]]:
    """On a rank: scale, parameters and updates so far after each of three steps; the first overflows only on
    rank 1."""
    found: list[tuple[float, dict[str, Tensor], int]] = []
    with patch.dict(KINDS, cpu=Queues):
        trained = trainer("adamw:lr=0.01", strategy=strategy, precision="fp16")
        trained.scaler.load_state_dict(trained.scaler.state_dict() | {"scale": 1024.0})
        data = batches(50 * rank)
        for step in range(3):
            inputs, targets = next(data)
            if rank == 1 and step == 0:
                inputs[0, 0] = torch.inf
            trained.step(iter([(inputs, targets)]))
            state = trained.model.local_state(trained.optimizer).values()
            done = max((int(each["step"]) for each in state if "step" in each), default=0)
            parameters = {name: value.detach().clone() for name, value in trained.model.named_parameters()}
            found.append((trained.scaler.get_scale(), parameters, done))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "scratch-fsdp", "scratch-ddp"])
def test_a_step_that_a_scaler_leaves_out_is_no_update(ranks, strategy) -> None:
    start = dict(trainer("adamw").model.named_parameters())
    for first, second, third in ranks(2, overflowing, strategy):
        assert (first[0], second[0], third[0]) == (512.0, 512.0, 512.0)
        assert (first[2], second[2], third[2]) == (0, 1, 2)
        for name, value in first[1].items():
            assert torch.equal(value, start[name]), name
            assert third[1][name].isfinite().all()
            assert not torch.equal(third[1][name], value)
