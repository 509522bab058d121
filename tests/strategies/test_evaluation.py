"""Validation: the figures of all ranks together, the same on each, and a model that is unchanged."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from results.cell import Precision
from results.errors import UsageError
from strategies import BatchLoss, Trainer, TrainSettings, evaluate
from strategies.training.loss import Loss
from workloads import Workload

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    """A model whose dropout and BatchNorm differ between training and evaluation."""
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
def test_all_ranks_have_the_mean_over_the_samples_of_all(threads, strategy) -> None:
    (first, modes), (second, _) = threads(2, on_ranks, strategy, model())
    assert first == second == pytest.approx(by_hand())
    # The model is as it was: training, but for the module that its user has put into evaluation mode.
    assert modes == [True, True, True, True, False]


def trained_on_unlike_samples(rank: int, strategy: str, folder: str) -> tuple[float, float, bool, bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    settings = TrainSettings(strategy=strategy)
    made = Trainer(copy.deepcopy(net), F.cross_entropy, device=CPU, settings=settings)
    for _ in range(3):
        x, y = samples()
        made.step(iter([(x * (1 + rank) + rank, y)]))
    own = [*(value.clone() for value in made.model.bare.buffers()), *_values(made)]
    found = evaluate(made, [samples()])["val_loss"]
    after = [*made.model.bare.buffers(), *_values(made)]
    is_as_before = all(torch.equal(*each) for each in zip(own, after, strict=True))
    made.save(folder)
    resumed = Trainer(copy.deepcopy(net), F.cross_entropy, device=CPU, settings=settings)
    resumed.resume(folder)
    saved = resumed.full_state_dict()
    net.load_state_dict(exported := made.full_state_dict())
    is_saved = all(torch.equal(saved[name], value) for name, value in exported.items())
    with torch.no_grad():
        x, y = samples()
        return found, F.cross_entropy(net.eval()(x), y).item(), is_as_before, is_saved


def _values(made: Trainer) -> list[Tensor]:
    return [value.clone() for _, value in made.model.named_parameters()]


@pytest.mark.parametrize("strategy", ["scratch-ddp", "fsdp", "scratch-fsdp", "local-sgd:2"])
def test_the_model_that_is_exported_is_evaluated_and_saved(ranks, tmp_path, strategy) -> None:
    for evaluated, exported, is_as_before, is_saved in ranks(
        2, trained_on_unlike_samples, strategy, str(tmp_path)
    ):
        assert evaluated == pytest.approx(exported, rel=1e-6)
        assert is_as_before
        assert is_saved


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(ignore_index=1), partial(F.cross_entropy, ignore_index=1)]
)
def test_targets_that_the_loss_ignores_are_not_counted(loss) -> None:
    inputs = torch.eye(3)[torch.tensor([0, 2, 0, 2])]
    ignored = -100 if loss is F.cross_entropy else 1
    net = nn.Linear(3, 3, bias=False)
    nn.init.eye_(net.weight)
    made = Trainer(net, loss, device=CPU, settings=TrainSettings())
    # Of the three that count two are right.
    found = evaluate(made, [(inputs, torch.tensor([0, 2, ignored, 0]))])
    assert found["val_accuracy"] == pytest.approx(2 / 3)


def test_metrics_are_means_over_the_samples() -> None:
    x, y = samples()
    made = trainer(F.cross_entropy)
    metrics = {"share": lambda outputs, targets: (targets == 0).double().mean(), "size": lambda *_: 2}
    found = evaluate(made, [(x[:8], y[:8]), (x[8:], y[8:])], metrics=metrics)
    assert (found["share"], found["size"]) == (pytest.approx((y == 0).sum().item() / 13), 2)
    assert found["val_loss"] == pytest.approx(by_hand()["val_loss"])
    with pytest.raises(UsageError, match=r"give a loss\(outputs, targets\)"):
        evaluate(trainer(BatchLoss(lambda model, batch: model(batch[0]).sum())), [(x, y)], metrics=metrics)


class FreezesItself(nn.Sequential):
    """A model with a BatchNorm that its own `train` keeps fixed."""

    def train(self, mode: bool = True) -> FreezesItself:
        super().train(mode)
        self[1].eval()
        return self


def test_modules_keep_the_mode_that_their_author_gave_them() -> None:
    frozen, itself, whole = model(), FreezesItself(*model()), model()
    fixed = [True, False, True, True]
    frozen[1].eval()
    whole.eval()
    for net, modes in ((frozen, fixed), (itself, fixed), (whole, [True] * 4)):
        workload = Workload(module=copy.deepcopy(net), loss=F.cross_entropy, data=[samples()])
        assert [part.training for part in workload.module] == modes
        made = Trainer(net, F.cross_entropy, device=CPU, settings=TrainSettings())
        made.step(iter([samples()]))
        evaluate(made, [samples()])
        assert [part.training for part in net] == modes
        assert bool(net[1].num_batches_tracked) == modes[1]


@pytest.mark.parametrize(
    "loss",
    [
        BatchLoss(lambda model, batch: {"loss": F.cross_entropy(model(batch[0]), batch[1])}),
        lambda outputs, targets: F.mse_loss(outputs, F.one_hot(targets, 3).float()),
    ],
)
def test_a_loss_of_ones_own_is_taken_and_accuracy_is_told_where_targets_are_classes(loss) -> None:
    x, y = samples()
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    found = evaluate(trainer(loss), batches)
    if isinstance(loss, BatchLoss):
        assert found == pytest.approx({"val_loss": by_hand()["val_loss"]})
    else:
        assert found["val_accuracy"] == by_hand()["val_accuracy"]


def test_evaluation_uses_the_precision_of_a_step_and_leaves_no_gradient() -> None:
    made = trainer(F.cross_entropy, precision="bf16")
    found = evaluate(made, [samples()])
    assert found["val_loss"] != by_hand()["val_loss"]
    assert found["val_loss"] == pytest.approx(by_hand()["val_loss"], rel=0.02)
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_nothing_to_validate_on_is_refused() -> None:
    with pytest.raises(UsageError, match="samples to validate on: hold out more"):
        evaluate(trainer(F.cross_entropy), [])
