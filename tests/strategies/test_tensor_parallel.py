"""Tensor parallelism over real ranks, against the whole model on one, and closed forms of what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import split_models
import torch
from torch import nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.layout import LinearSplit, ModelLayout
from strategies import Trainer, TrainSettings
from strategies.collectives.link import Link
from strategies.tensor_parallel.model import TensorSplit
from strategies.training.slicing import Slicing, Slicings
from workloads.build import build_workload

SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"


@pytest.mark.parametrize(
    ("size", "model", "settings"),
    [(4, "gpt", {"optimizer": ADAMW}), (2, "grouped", {"optimizer": SGD, "clip_norm": 0.1})],
)
def test_sums_in_another_order_train_alike(ranks, other_rounding, size, model, settings) -> None:
    settings = {"strategy": "tp", **settings}
    results = ranks(size, other_rounding.otherwise, split_models.__file__, "train", model, settings)
    split_models.assert_as_serial(results, model, settings)


def autocast_losses(rank: int, strategy: str) -> list[float]:
    """On a rank: three losses of a small model under bf16 autocast."""
    torch.manual_seed(0)
    workload = build_workload("llama-nano:seq=8")
    trainer = Trainer(
        workload.module,
        workload.loss,
        device=torch.device("cpu"),
        settings=TrainSettings(strategy=strategy, precision="bf16", optimizer="sgd:lr=0.05:momentum=0"),
        layout=workload.layout,
        group=None if strategy == "single" else open_exchange(),
    )
    tokens = torch.arange(16).view(2, 8)
    return [trainer.step(iter([(tokens, tokens + 1)])).item() for _ in range(3)]


def test_under_bf16_autocast_it_learns_alike(ranks) -> None:
    # bf16 has 8 bits: activations differ by 2^-8, and a mean loss by less.
    whole = autocast_losses(0, "single")
    first, second = ranks(2, autocast_losses, "tp")
    assert first == second
    assert first == pytest.approx(whole, rel=2**-8)
    assert whole[2] < 0.9 * whole[0]


def has_values(tensors: Iterable[torch.Tensor]) -> None:
    """Nothing is to be done to begin with: all ranks have the same values."""


def test_a_layer_gives_what_it_gives_whole_under_autocast(threads) -> None:
    def output(group: ExchangeGroup) -> torch.dtype:
        module = Layers()
        TensorSplit(module, ModelLayout(splits=SPLITS), Link(group), Slicings(), has_values)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(torch.ones(1, 3)).dtype

    assert threads(2, output) == [torch.bfloat16] * 2


def buffers_of(rank: int) -> dict[str, float]:
    """On a rank: buffers that began as the number of the rank."""
    module = Layers()
    module.register_buffer("kept", torch.tensor(float(rank)))
    settings, device = TrainSettings(strategy="tp"), torch.device("cpu")
    layout = ModelLayout(splits=SPLITS)
    trainer = Trainer(
        module, F.mse_loss, device=device, settings=settings, layout=layout, group=open_exchange()
    )
    return {name: value.item() for name, value in trainer.model.named_buffers()}


def test_buffers_are_those_of_the_first_rank(ranks) -> None:
    assert ranks(2, buffers_of) == [{"kept": 0.0}] * 2


@pytest.mark.parametrize(
    ("dim", "parts", "expected"),
    [
        # Rows 0..3: two matrices of two rows, of each of which a rank has one row.
        (0, 2, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]),
        (0, 1, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]),
        (1, 1, [[[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14, 15]]]),
        (1, 2, [[[0, 2], [4, 6], [8, 10], [12, 14]], [[1, 3], [5, 7], [9, 11], [13, 15]]]),
    ],
)
def test_a_matrix_is_cut_and_put_together(threads, dim, parts, expected) -> None:
    whole = torch.arange(16).view(4, 4)

    def both(group: ExchangeGroup) -> tuple[torch.Tensor, torch.Tensor]:
        slicing = Slicing(link=Link(group), dim=dim, parts=parts)
        part = slicing.part(whole)
        return part, slicing.whole(part)

    for (part, again), rows in zip(threads(2, both), expected, strict=True):
        assert part.tolist() == rows
        assert torch.equal(again, whole)


class Layers(nn.Module):
    """Two layers, of which the first has its outputs split, and the second its inputs."""

    def __init__(self, hidden: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = 3
        self.first, self.drop, self.second = nn.Linear(3, hidden), nn.Dropout(dropout), nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x))))


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self[1].weight = self[0].weight


SPLITS = (LinearSplit(name="first", by="outputs"), LinearSplit(name="second", by="inputs"))
UNFIT: dict[str, tuple[Callable[[], nn.Module], ModelLayout, str]] = {
    "no splits": (Layers, ModelLayout(), "whose layout says what it splits: use fsdp"),
    "features": (lambda: Layers(5), ModelLayout(splits=SPLITS), "of first (5) must be a multiple of its"),
    "heads": (Layers, ModelLayout(splits=SPLITS, heads=("heads",)), "heads (3) must be a multiple of"),
    "dropout": (lambda: Layers(4, 0.1), ModelLayout(splits=SPLITS), "does not support dropout (drop)"),
    "another module": (
        Layers,
        ModelLayout(splits=(LinearSplit(name="drop", by="outputs"),)),
        "splits only nn.Linear, not drop",
    ),
    "tied": (
        Tied,
        ModelLayout(splits=(LinearSplit(name="0", by="outputs"),)),
        "0.weight, 1.weight share",
    ),
}


def complaint(rank: int, case: str) -> str:
    """On a rank: what the strategy says of a model that it cannot split."""
    build, layout, _ = UNFIT[case]
    settings, device = TrainSettings(strategy="tp"), torch.device("cpu")
    try:
        Trainer(build(), F.mse_loss, device=device, settings=settings, layout=layout, group=open_exchange())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_cannot_be_split_is_refused_with_the_way_out(ranks, case) -> None:
    for answer in ranks(2, complaint, case):
        assert answer.startswith("UsageError: ")
        assert UNFIT[case][2] in answer
        assert answer.endswith("use fsdp, which splits any model")


def overflowing_steps(rank: int) -> list[tuple[bool, float]]:
    """On a rank: of each step whether its own gradients are finite, and the scaler's factor after it.

    The loss is a quarter of the sum of three outputs. The second half of the hidden values, the last rank's,
    goes into each output by a factor of 4, so that their gradient is 3 of the scaler's factor; the gradient
    of the first half is small.
    """
    module = Layers()
    with torch.no_grad():
        module.first.weight.fill_(0.1)
        module.second.weight.copy_(torch.tensor([2.0**-10, 2.0**-10, 4.0, 4.0]).expand(3, 4))
    trainer = Trainer(
        module,
        lambda outputs, targets: outputs.float().sum() / 4,
        device=torch.device("cpu"),
        settings=TrainSettings(strategy="tp", precision="fp16", optimizer="sgd:lr=0"),
        layout=ModelLayout(splits=SPLITS),
        group=open_exchange(),
    )
    found = []
    for _ in range(3):
        trainer.compute_gradients(iter([(torch.ones(1, 3), torch.ones(1, 3))]))
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        trainer.update()
        found.append((finite, trainer.scaler.get_scale()))
    return found


def test_a_part_that_overflows_makes_all_ranks_leave_the_step_out(ranks) -> None:
    # fp16 ends at 65504, and the factor begins at 2^16: 3 * 2^16 and 3 * 2^15 overflow, 3 * 2^14 does not.
    first, second = ranks(2, overflowing_steps)
    assert first == [(True, 2.0**15), (True, 2.0**14), (True, 2.0**14)]
    assert second == [(False, 2.0**15), (False, 2.0**14), (True, 2.0**14)]


def test_layers_that_take_one_input_share_the_sum_of_its_gradient(threads) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.out(self.a(x) * self.b(y))

    layout = ModelLayout(
        splits=(
            LinearSplit(name="a", by="outputs"),
            LinearSplit(name="b", by="outputs"),
            LinearSplit(name="out", by="inputs"),
        )
    )
    torch.manual_seed(0)
    weights = Beside().double().state_dict()

    def sums(group: ExchangeGroup, *, alike: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            module = Beside().double()
            module.load_state_dict(weights)
            if group.size() > 1:
                TensorSplit(module, layout, Link(group), Slicings(), has_values)
            x = torch.arange(8.0).view(2, 4).double().requires_grad_()
            y = x if alike else torch.ones(2, 4).double().requires_grad_()
            outcome = module(x, y)
            outcome.square().sum().backward()
            assert x.grad is not None
            assert y.grad is not None
            return group.traffic.operations, x.grad, y.grad

    def both(group: ExchangeGroup) -> list[Any]:
        return [sums(group, alike=True), sums(group, alike=False)]

    ((_, *shared), (_, *apart)) = threads(1, both)[0]
    for once, again in threads(2, both):
        # One sum forward, and one backward where the input is one, two where there are two.
        assert (once[0], again[0] - once[0]) == (1 + 1, 1 + 2)
        for ours, theirs in zip((*once[1:], *again[1:]), (*shared, *apart), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
