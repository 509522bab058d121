"""Data parallelism on raw collectives over real ranks, against a serial loop over the replicas."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from results.errors import UsageError
from strategies import ExchangeSettings, ParallelModel, Trainer, TrainSettings, parallelize

CPU = torch.device("cpu")
SMALL = "bucket_mb=0.001:first_bucket_mb=0.001"
"""About 260 floats: the models have several buckets."""


class Counted(nn.Module):
    """Parameters and buffers of several types and sizes, one of them not trained."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(rank)))
        self.fixed = nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64), requires_grad=False)
        self.register_buffer("flag", torch.tensor([rank > 0, False]))
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("halves", torch.full((5,), float(rank), dtype=torch.float16), persistent=False)
        self.register_buffer("turned", torch.full((2, 3), float(rank)).t())
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.fixed.float()


def scratch(module: nn.Module, group: object, options: str = "") -> ParallelModel:
    settings: Any = ExchangeSettings(group=group)
    return parallelize(module, f"scratch-ddp{options}", device=CPU, exchange=settings)


def step(model: ParallelModel, inputs: Tensor) -> None:
    """Forward and backward of one micro-batch, exchanged."""
    with torch.enable_grad(), model.exchange(now=True):
        model.started()
        model.module(inputs).sum().backward()


def values_of(module: nn.Module) -> list[list[float]]:
    values = [*module.parameters(), *module.buffers()]
    return [value.detach().double().flatten().tolist() for value in values]


def start_and_buffers(group: ExchangeGroup) -> dict[str, Any]:
    module = Counted(group.rank())
    model = scratch(module, group)
    found: dict[str, Any] = {"start": values_of(module)}
    # Changed in place, and by another tensor in the same place.
    module.steps += 7 + group.rank()
    module.halves = torch.full((5,), 5.0 - group.rank(), dtype=torch.float16)
    step(model, torch.ones(1, 2))
    found["next"] = values_of(module)[2:]
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_replicas_start_as_rank_0_and_take_its_buffers_at_every_step(threads, size) -> None:
    zeros = [[0.0] * 6, [0.0] * 3, [0.0] * 2, [0.0], [0.0] * 5, [0.0] * 6]
    for found in threads(size, start_and_buffers):
        assert found["start"] == zeros
        assert found["next"] == [[0.0] * 2, [7.0], [5.0] * 5, [0.0] * 6]


def bytes_of_a_step(group: ExchangeGroup, options: str) -> tuple[int, int]:
    """The sums of the third step: in the first two, ranks agree on the order in which gradients become
    ready."""
    module = Counted(group.rank())
    model = scratch(module, group, options)
    for _ in range(2):
        step(model, torch.ones(1, 2))
    before = group.traffic.payload_bytes, group.traffic.operations
    step(model, torch.ones(1, 2))
    return group.traffic.payload_bytes - before[0], group.traffic.operations - before[1]


@pytest.mark.parametrize("size", [2, 5])
def test_a_step_moves_each_gradient_and_each_buffer_once(threads, size) -> None:
    # 6 floats of gradient; buffers of 2 booleans, an int64, 5 halves and 6 floats, in one message.
    payload = 6 * 4 + 2 + 8 + 5 * 2 + 6 * 4
    assert threads(size, bytes_of_a_step, "") == [(payload, 2)] * size
    # And a byte for the one parameter that is trained.
    assert threads(size, bytes_of_a_step, ":find_unused=true") == [(payload + 1, 3)] * size


def sums_of_a_step(group: ExchangeGroup, options: str) -> int:
    """The sums of six parameters of 2 KiB."""
    module = nn.Sequential(*(nn.Linear(512, 1, bias=False) for _ in range(6)))
    module.forward = lambda x: sum(layer(x) for layer in module)
    model = scratch(module, group, options)
    for _ in range(2):
        step(model, torch.ones(1, 512))
    before = group.traffic.operations
    step(model, torch.ones(1, 512))
    return group.traffic.operations - before


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ("", 1),
        # 1 + 2 + 2 + 1 parameters.
        (":first_bucket_mb=0.001:bucket_mb=0.0039", 4),
        # 2 + 1 + 1 + 1 + 1.
        (":first_bucket_mb=0.0039:bucket_mb=0.001", 5),
    ],
)
def test_the_options_say_how_large_buckets_are(threads, options, sums) -> None:
    assert threads(2, sums_of_a_step, options) == [sums] * 2


def strides(rank: int, compression: str) -> tuple[int, ...]:
    module = nn.Conv2d(2, 6, 2)
    settings = TrainSettings(strategy="scratch-ddp", compression=compression, memory_format="channels_last")
    trainer = Trainer(module, lambda y, t: y.sum(), device=CPU, settings=settings, group=open_exchange())
    trainer.compute_gradients(iter([(torch.ones(1, 2, 2, 2), torch.ones(1))]))
    return module.weight.grad.stride()


def test_gradients_lie_as_their_parameters_do_unless_a_compressor_sees_them(ranks) -> None:
    # (6, 2, 2, 2): with the channels last, and row by row.
    assert ranks(2, strides, "none") == [(8, 1, 4, 2)] * 2
    assert ranks(2, strides, "topk:0.5") == [(8, 4, 2, 1)] * 2


def forgotten(group: ExchangeGroup) -> str:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    module.forward = module["used"].forward
    try:
        step(scratch(module, group), torch.ones(1, 2))
    except UsageError as error:
        return str(error)
    return ""


def test_a_parameter_without_a_gradient_is_an_error_that_names_it_and_the_way_out(threads) -> None:
    for message in threads(2, forgotten):
        assert "no gradient came for left.weight, left.bias (2 of 4 parameters)" in message
        assert "find_unused=true" in message


def freed(group: ExchangeGroup, options: str) -> list[bool]:
    """Whether strategy, buckets and module are gone when they are dropped, and hooks then do nothing."""
    module = nn.Linear(2, 2)
    model = scratch(module, group, options)
    for _ in range(2):
        step(model, torch.ones(1, 2))
    strategy, alive = weakref.ref(model), weakref.ref(module)
    reducer: Any = weakref.ref(model._reducer)
    del model
    gc.collect()
    found = [strategy() is None, reducer() is None]
    module.zero_grad()
    before = group.traffic.operations
    with torch.enable_grad():
        module(torch.full((1, 2), 3.0)).sum().backward()
    found += [module.weight.grad.tolist() == [[3.0] * 2] * 2, group.traffic.operations == before]
    del module
    gc.collect()
    return [*found, alive() is None]


@pytest.mark.parametrize("options", ["", ":find_unused=true"])
def test_a_dropped_model_is_freed_and_its_hooks_do_nothing(threads, options) -> None:
    assert threads(2, freed, options) == [[True] * 5] * 2


def switched(group: ExchangeGroup, on: list[bool]) -> list[list[float]]:
    """The gradient of each step; of rank r, on its own, it is 2 (r + 1)."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    module.forward = module[0].forward
    module[1].requires_grad_(False)
    model = scratch(module, group, f":{SMALL}:find_unused=true")
    found = []
    for enabled in on:
        group.traffic.enabled = enabled
        step(model, torch.full((1, 1), 2.0 * (group.rank() + 1)))
        found.append(module[0].weight.grad.item())
        module.zero_grad()
    return found


@pytest.mark.parametrize("on", [[True, False, True], [False, True, True], [False, False, True], [True, True]])
def test_without_exchange_a_rank_has_its_share_and_with_it_the_mean_again(threads, on) -> None:
    # Shares are 2 / 2 and 4 / 2, the mean is 3.
    first, second = threads(2, switched, on)
    assert first == [3.0 if enabled else 1.0 for enabled in on]
    assert second == [3.0 if enabled else 2.0 for enabled in on]


def losses(rank: int, compiled: bool, strategy: str) -> list[float]:
    """On a rank: the sums of the parameters after each of three steps."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5))
    settings = TrainSettings(strategy=strategy, optimizer="sgd:lr=0.1", compile=compiled)
    trainer = Trainer(module, F.cross_entropy, device=CPU, settings=settings, group=open_exchange())
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        trainer.step(iter([(torch.randn(4, 8, generator=generator), torch.tensor([0, 1, 2, 3]))]))
        found.append(sum(value.detach().double().sum().item() for value in module.parameters()))
    return found


@pytest.mark.slow
def test_a_compiled_model_trains_as_torchs_ddp_does(ranks) -> None:
    ours = ranks(2, losses, True, f"scratch-ddp:{SMALL}")
    theirs = ranks(2, losses, False, "ddp")
    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert all(first != second for first, second in pairwise(ours[0]))
