"""The library face of `strategies`: what its docstring promises to users with their own loop."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
from torch import nn

import strategies


def test_all_that_is_listed_is_there_and_nothing_else_is_offered() -> None:
    from strategies.trainer import Trainer

    # Asked after the submodules are loaded: one that is named like what it offers would hide it.
    assert strategies.Trainer is Trainer
    assert sorted(strategies.__all__) == sorted(
        name for names in strategies._HOMES.values() for name in names
    )
    offered = {name: getattr(strategies, name) for name in strategies.__all__}
    assert {name for name, value in offered.items() if getattr(value, "__name__", None) != name} == set()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainor'"):
        strategies.Trainor  # noqa: B018


def test_the_example_of_the_docstring_trains() -> None:
    from strategies import Trainer, TrainSettings

    torch.manual_seed(0)
    model, loss, device = nn.Linear(3, 1), nn.functional.mse_loss, torch.device("cpu")
    inputs = torch.randn(64, 3)
    batches = repeat((inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.5))
    trainer = Trainer(model, loss, device=device, settings=TrainSettings(optimizer="adamw:lr=0.05"))
    for _ in range(400):
        trainer.step(batches)
    # The model that made the targets, but for AdamW's weight decay.
    torch.testing.assert_close(model.weight.data, torch.tensor([[1.0, -2.0, 3.0]]), rtol=0, atol=0.05)
    torch.testing.assert_close(model.bias.data, torch.tensor([0.5]), rtol=0, atol=0.05)
