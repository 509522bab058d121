"""torch's ZeroRedundancyOptimizer over real ranks, against a serial loop over the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.worker.exchange import open_exchange
from results.cell import Cell
from strategies import Trainer, TrainSettings
from strategies.refusal import refusal

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BatchNorm": ("normed", {}),
    "BatchNorm, accumulated": ("normed", {"accumulation": 2}),
    "many buckets": ("dropped", {"strategy": "zero1:bucket_mb=0.001"}),
    "checkpointed": ("dropped", {"activation_checkpointing": True}),
    "clipped": ("normed", {"clip_norm": 0.1}),
    "one matrix in three places": ("shared", {}),
    "convolutions": ("images", {}),
}


def settings_of(case: str) -> tuple[str, dict[str, Any]]:
    model, settings = CASES[case]
    return model, {"strategy": "zero1", "optimizer": SGD, **settings}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(
    ranks: Ranks, replicas: ModuleType, case: str
) -> None:
    replicas.assert_as_serial(ranks(2, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_agree_with_the_serial_loop_within_the_rounding_of_the_average(
    ranks: Ranks, replicas: ModuleType, case: str, size: int
) -> None:
    replicas.assert_near_serial(ranks(size, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("model", "optimizer"), [("gpt", ADAMW), ("frozen", SGD)])
def test_gradients_updates_and_state_are_those_of_a_plain_loop(
    ranks: Ranks, split_models: ModuleType, size: int, model: str, optimizer: str
) -> None:
    settings = {"strategy": "zero1", "optimizer": optimizer, "accumulation": 2, "clip_norm": 0.1}
    split_models.assert_as_serial(ranks(size, split_models.train, model, settings), model, settings)


class Four(nn.Module):
    """Matrices of 6 x 5, 4 x 6, 3 x 4 and 5 x 3: 30, 24, 12 and 15 elements."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (5, 6, 4, 3, 5)
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(sizes))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


PARAMETERS = 30 + 24 + 12 + 15


def trainer_of(group: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    chosen = TrainSettings(**{"strategy": "zero1", "optimizer": SGD, **settings})
    return Trainer(Four(), F.mse_loss, device=CPU, settings=chosen, group=group)


def traffic_of_a_step(rank: int, accumulation: int) -> tuple[int, int, int]:
    """On a rank: payload bytes and operations of a step, and elements of momentum that it keeps."""
    group = open_exchange()
    trainer = trainer_of(group, accumulation=accumulation)
    batches = iter([(torch.ones(2, 5), torch.ones(2, 5))] * 3 * accumulation)
    before = 0, 0
    for _ in range(3):
        before = group.traffic.payload_bytes, group.traffic.operations
        trainer.step(batches)
    kept = trainer.model.local_state(trainer.optimizer).values()
    momentum = [state["momentum_buffer"] for state in kept]
    return (
        group.traffic.payload_bytes - before[0],
        group.traffic.operations - before[1],
        sum(value.numel() for value in momentum),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("size", "momentum"),
    [
        # The largest first, each to the rank that has the fewest elements: 30, 24, 15, 12.
        (2, [30 + 12, 24 + 15]),
        (3, [30, 24, 15 + 12]),
        (4, [30, 24, 15, 12]),
    ],
)
def test_what_travels_and_what_is_kept_are_the_closed_forms(
    ranks: Ranks, size: int, momentum: list[int], accumulation: int
) -> None:
    # One bucket of all gradients, and the parameters of each rank: twice P handed over, of which an
    # all-reduce sends each byte twice.
    results = ranks(size, traffic_of_a_step, accumulation)
    assert [kept for _, _, kept in results] == momentum
    for payload, operations, _ in results:
        assert (payload, operations) == (2 * 4 * PARAMETERS, 1 + size)


# torch's own module warns of itself when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("rank", [0, 255])
def test_what_travels_between_256_ranks(recorded_world: ModuleType, rank: int) -> None:
    found: Counter[tuple[str, int]] = Counter()
    with recorded_world.opened(rank, 256) as (group, calls):
        trainer = trainer_of(group)
        for _ in range(3):
            calls.clear()
            trainer.step(iter([(torch.ones(2, 5), torch.ones(2, 5))]))
        for call in calls:
            found[call.operation, call.ranks] += call.payload_bytes
        operations = len(calls)
        group.reset()
    # torch has a message of one element for each rank without a parameter.
    assert found == {("all_reduce", 256): 4 * PARAMETERS, ("broadcast", 256): 4 * (PARAMETERS + 252)}
    assert operations == 1 + 256


# As above.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("strategy", "least", "most"), [("zero1", 1, 1), ("zero1:bucket_mb=0.001", 9, 28)])
def test_buckets_are_as_large_as_asked_for(
    recorded_world: ModuleType, split_models: ModuleType, strategy: str, least: int, most: int
) -> None:
    # 28 parameters, of which the 9 matrices have more than the 1049 bytes of a bucket of 0.001 MiB.
    settings = {"strategy": strategy, "optimizer": SGD}
    with recorded_world.opened(0, 2) as (group, calls):
        trainer = split_models.trainer_of("gpt", settings, group)
        for step in range(3):
            calls.clear()
            trainer.step(split_models.batches_of(step, 0, settings))
        sums = sum(call.operation == "all_reduce" for call in calls)
        group.reset()
    assert least <= sums <= most


def overflowing_steps(rank: int) -> list[tuple[float, bool]]:
    """On a rank: after each step the scaler's factor, and whether parameters have changed."""
    trainer = trainer_of(open_exchange(), precision="fp16", clip_norm=1.0)
    found = []
    for _ in range(3):
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        # On the last rank alone gradients are beyond fp16 in the first step.
        large = 1e5 if rank == 1 and not found else 1.0
        trainer.step(iter([(torch.ones(2, 5), torch.full((2, 5), large))]))
        changed = any(not torch.equal(before[n], value) for n, value in trainer.model.named_parameters())
        found.append((trainer.scaler.get_scale(), changed))
    return found


def test_all_ranks_leave_a_step_out_that_overflowed_on_one(ranks: Ranks) -> None:
    first, second = ranks(2, overflowing_steps)
    assert first == second
    assert first[0] == (2.0**15, False)
    assert first[-1][1]


def views(rank: int) -> tuple[bool, bool, bool]:
    """On a rank: whether parameters are what the buffers hold, what DDP reduces, and what the model uses."""
    trainer = trainer_of(open_exchange())
    bare = trainer.model.bare
    buffers = {b.untyped_storage().data_ptr() for bs in trainer.optimizer._buckets for b in bs}  # type: ignore[attr-defined]
    named = dict(trainer.model.named_parameters())
    held = all(value.untyped_storage().data_ptr() in buffers for value in named.values())
    reduced = {id(p) for p in trainer.model.module.parameters()} == {id(p) for p in bare.parameters()}
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter.zero_()
    used = not trainer.model.module(torch.ones(1, 5)).any()
    return held, reduced, used


def test_parameters_that_moved_are_those_that_all_see(ranks: Ranks) -> None:
    assert ranks(2, views) == [(True, True, True)] * 2


def test_steps_without_exchange_can_be_undone_and_nothing_holds_the_model(
    ranks: Ranks, split_models: ModuleType
) -> None:
    settings = {"strategy": "zero1", "optimizer": ADAMW}
    assert ranks(2, split_models.switched_off, "gpt", settings) == [True] * 2
    assert ranks(2, split_models.freed, "gpt", settings) == [True] * 2


def complaint(rank: int) -> str:
    """On a rank: what the strategy says of a model of several data types."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double())
    settings = TrainSettings(strategy="zero1")
    try:
        Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_model_of_several_data_types_is_refused_with_the_way_out(ranks: Ranks) -> None:
    told = "UsageError: zero1 takes parameters of one data type, not float32, float64: use ddp or scratch-ddp"
    assert ranks(2, complaint) == [told] * 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compression": "topk:0.01"}, "goes with --compression none and --collective default alone"),
        ({"collective": "ring"}, "goes with --compression none and --collective default alone"),
        ({"memory_format": "channels_last"}, "goes with --memory-format contiguous alone"),
        ({"gpus": 1}, "needs at least 2"),
    ],
)
def test_combinations_without_sense_are_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "workload": "gpt-nano", "dataset": "synthetic", "strategy": "zero1", "gpus": 2, "micro_batch": 4,
        "device": "cpu", "backend": "gloo", "optimizer": "sgd", **changes,
    }  # fmt: skip
    assert reason in str(refusal(Cell(**fields)))
