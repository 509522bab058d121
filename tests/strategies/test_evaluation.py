"""Validation: the figures of all ranks together, the same on each, and a model that goes on as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from results.cell import Precision
from results.errors import UsageError
from strategies import BatchLoss, Trainer, TrainSettings, evaluate
from strategies.training.loss import Loss

CPU = torch.device("cpu")
Threads = Callable[..., list[Any]]


def model() -> nn.Sequential:
    """Its dropout and BatchNorm tell training from evaluation."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(13, 6, generator=generator), torch.randint(3, (13,), generator=generator)


def trainer(loss: Loss, precision: Precision = "fp32") -> Trainer:
    return Trainer(model(), loss, device=CPU, settings=TrainSettings(precision=precision))


def by_hand() -> dict[str, float]:
    x, y = samples()
    with torch.no_grad():
        outputs = model().eval()(x)
    hits = sum(int(output.argmax()) == int(target) for output, target in zip(outputs, y, strict=True))
    return {"val_loss": F.cross_entropy(outputs, y).item(), "val_accuracy": hits / 13}


def on_ranks(group: ProcessGroup, strategy: str, net: nn.Sequential) -> tuple[dict[str, float], list[bool]]:
    # Drawn before: ranks that are threads draw from one generator.
    net = copy.deepcopy(net)
    settings = TrainSettings(strategy=strategy)
    made = Trainer(net, F.cross_entropy, device=CPU, settings=settings, group=group)
    net[3].eval()
    x, y = samples()
    # 13 samples: 4 and 3 of them for rank 0, 4 and 2 for rank 1.
    mine = [(x[part][group.rank() :: 2], y[part][group.rank() :: 2]) for part in (slice(8), slice(8, 13))]
    return evaluate(made, mine), [module.training for module in made.model.bare.modules()]


@pytest.mark.parametrize("strategy", ["scratch-ddp", "local-sgd:4"])
def test_all_ranks_have_the_mean_over_the_samples_of_all(threads: Threads, strategy: str) -> None:
    (first, modes), (second, _) = threads(2, on_ranks, strategy, model())
    assert first == second == pytest.approx(by_hand())
    # The model is as it was: training, but for the module that its user has put into evaluation mode.
    assert modes == [True, True, True, True, False]


@pytest.mark.parametrize(
    "loss",
    [
        BatchLoss(lambda model, batch: {"loss": F.cross_entropy(model(batch[0]), batch[1])}),
        lambda outputs, targets: F.mse_loss(outputs, F.one_hot(targets, 3).float()),
    ],
)
def test_a_loss_of_ones_own_is_taken_and_accuracy_is_told_where_targets_are_classes(loss: Loss) -> None:
    x, y = samples()
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    found = evaluate(trainer(loss), batches)
    if isinstance(loss, BatchLoss):
        assert found == pytest.approx({"val_loss": by_hand()["val_loss"]})
    else:
        assert found["val_accuracy"] == by_hand()["val_accuracy"]


def test_it_computes_in_the_precision_of_a_step_and_leaves_no_gradient() -> None:
    made = trainer(F.cross_entropy, precision="bf16")
    found = evaluate(made, [samples()])
    assert found["val_loss"] != by_hand()["val_loss"]
    assert found["val_loss"] == pytest.approx(by_hand()["val_loss"], rel=0.02)
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_nothing_to_validate_on_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no sample to validate on: hold out more"):
        evaluate(trainer(F.cross_entropy), [])
