"""torch's DDP over real ranks, exchanging alone and by our hook, against a serial loop over the replicas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.worker.exchange import open_exchange
from strategies import GradientExchange, Trainer, TrainSettings

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
SMALL = "bucket_mb=0.001"
"""About 260 floats: the models have several buckets."""

ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "BatchNorm": ("normed", {}),
    "BatchNorm, accumulated": ("normed", {"accumulation": 2}),
    "dropout, small buckets": ("dropped", {"strategy": f"ddp:{SMALL}"}),
    "dropout, accumulated, gradients in buckets": (
        "dropped",
        {"accumulation": 2, "strategy": f"ddp:{SMALL}:bucket_view=true"},
    ),
    "shared, gradients in buckets": ("shared", {"strategy": "ddp:bucket_view=true"}),
    "shared, accumulated": ("shared", {"accumulation": 2, "strategy": f"ddp:{SMALL}"}),
    "unused": ("unused", {"strategy": "ddp:find_unused=true"}),
    "unused, accumulated": ("unused", {"accumulation": 2, "strategy": f"ddp:find_unused=true:{SMALL}"}),
    "static graph": ("normed", {"strategy": f"ddp:static_graph=true:{SMALL}"}),
    "clipped": ("shared", {"clip_norm": 0.05}),
}
HOOKED: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("normed", {"collective": "ring"}),
    "ring, small buckets": ("dropped", {"collective": "ring", "strategy": f"ddp:{SMALL}"}),
    "tree, accumulated, gradients in buckets": (
        "normed",
        {"collective": "tree", "accumulation": 2, "strategy": f"ddp:{SMALL}:bucket_view=true"},
    ),
    "ring, shared, clipped": ("shared", {"collective": "ring", "clip_norm": 0.05}),
    "ring, static graph": ("normed", {"collective": "ring", "strategy": f"ddp:static_graph=true:{SMALL}"}),
    "ring, two data types": ("mixed", {"collective": "ring"}),
    "ring, channels last": ("images", {"collective": "ring", "memory_format": "channels_last"}),
}
CASES = ALONE | HOOKED


def settings_of(case: str) -> tuple[str, dict[str, Any]]:
    model, settings = CASES[case]
    return model, {"strategy": "ddp", "optimizer": "sgd:lr=0.1:momentum=0.9", **settings}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(
    ranks: Ranks, replicas: ModuleType, case: str
) -> None:
    replicas.assert_as_serial(ranks(2, replicas.train, *settings_of(case)), *settings_of(case))


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_agree_with_the_serial_loop_within_the_rounding_of_the_average(
    ranks: Ranks, replicas: ModuleType, case: str
) -> None:
    replicas.assert_near_serial(ranks(3, replicas.train, *settings_of(case)), *settings_of(case))


def test_the_data_let_replicas_use_different_parameters(replicas: ModuleType) -> None:
    # What the cases named "unused" stand on: in some step one replica uses `sometimes`, the other not.
    used = [
        [bool(replicas.batch(step, 0, replica)[0][0, 0] > 0) for replica in range(2)]
        for step in range(replicas.STEPS)
    ]
    assert any(first != second for first, second in used)


def test_a_parameter_that_no_replica_uses_has_no_gradient_and_stays(
    ranks: Ranks, replicas: ModuleType
) -> None:
    first, _ = ranks(2, replicas.train, *settings_of("unused, accumulated"))
    assert "always.weight" in first[-1]["gradients"]
    assert "never.weight" not in first[-1]["gradients"]
    assert torch.equal(first[-1]["parameters"]["never.weight"], first[0]["start"]["never.weight"])


@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [
        ("ddp", {}),
        (f"ddp:{SMALL}:bucket_view=true", {}),
        ("ddp", {"collective": "ring"}),
        (f"ddp:{SMALL}:bucket_view=true", {"collective": "tree"}),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_integer_gradients_are_averaged_exactly_on_any_number_of_ranks(
    ranks: Ranks, replicas: ModuleType, size: int, strategy: str, exchange: dict[str, Any]
) -> None:
    weight = torch.tensor(dict(replicas.INTEGER_WEIGHTS)[size])
    for parameters in ranks(size, replicas.integer_step, strategy, exchange):
        assert torch.equal(parameters["weight"], weight)


def options_in_force(rank: int, strategy: str) -> list[object]:
    """On a rank: static graph, unused search, and whether a gradient lies in a bucket with others."""
    module = nn.Linear(8, 5)
    settings = TrainSettings(strategy=strategy)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    trainer.compute_gradients(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    gradient: Any = module.bias.grad
    wrapper: Any = trainer.model.module
    in_bucket = gradient.untyped_storage().nbytes() > gradient.nbytes
    return [wrapper.static_graph, wrapper.find_unused_parameters, in_bucket]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", [False, False, False]),
        ("ddp:static_graph=true", [True, False, False]),
        ("ddp:find_unused=true", [False, True, False]),
        ("ddp:bucket_view=true", [False, False, True]),
    ],
)
def test_options_of_the_spec_reach_torch(ranks: Ranks, strategy: str, expected: list[bool]) -> None:
    assert ranks(2, options_in_force, strategy) == [expected] * 2


@pytest.mark.parametrize(
    ("settings", "exchanges"),
    [
        # The model is one bucket.
        ({"strategy": "ddp"}, 1),
        ({"strategy": "ddp:bucket_view=true"}, 1),
        # And who used what.
        ({"strategy": "ddp:find_unused=true"}, 2),
        # A ring of two: each sends one segment to sum it, and one that is summed.
        ({"strategy": "ddp", "collective": "ring"}, 2),
    ],
)
def test_nothing_is_exchanged_before_the_last_micro_batch(
    ranks: Ranks, replicas: ModuleType, settings: dict[str, Any], exchanges: int
) -> None:
    for seen in ranks(2, replicas.count_exchanges, settings):
        before = ["data", "forward", "backward"] * 3
        assert seen[:9] == [(phase, 0) for phase in before]
        assert seen[9:] == [("optimizer", exchanges), ("done", exchanges)]


@pytest.mark.parametrize("strategy", ["ddp", f"ddp:{SMALL}"])
@pytest.mark.parametrize(
    ("model", "compression"),
    [
        ("normed", "topk:0.3"),
        ("images", "topk:0.3"),
        ("shared", "powersgd:1"),
        ("images", "powersgd:1"),
        ("normed", "torch-powersgd:1"),
        ("images", "torch-powersgd:1"),
    ],
)
def test_what_a_compressed_exchange_does_not_apply_it_keeps(
    ranks: Ranks, replicas: ModuleType, model: str, compression: str, strategy: str
) -> None:
    # Five steps: torch forms its buckets anew after the first, and is dense in the first two.
    form = "channels_last" if model == "images" else "contiguous"
    settings = {"strategy": strategy, "compression": compression, "memory_format": form}
    results = ranks(3, replicas.train, model, settings, 5)
    lossy_steps = 3 if compression.startswith("torch") else 5
    assert replicas.assert_law_is_kept(results, model, settings) == lossy_steps


def sums_of_a_step(rank: int, strategy: str) -> int:
    """Of three parameters of 0.8 MiB, when the buckets are formed anew."""
    module, group = nn.Sequential(*(nn.Linear(458, 458, bias=False) for _ in range(3))), open_exchange()
    settings = TrainSettings(strategy=strategy)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=group)
    for _ in range(3):
        group.traffic.operations = 0
        trainer.step(iter([(torch.ones(1, 458), torch.ones(1, 458))]))
    return group.traffic.operations


@pytest.mark.parametrize(
    ("strategy", "sums"),
    [
        # As torch has it when it is given no number: a first bucket of 1 MiB, which two of them fill.
        ("ddp", 2),
        ("ddp:bucket_mb=25", 2),
        ("ddp:bucket_mb=24", 1),
        ("ddp:bucket_mb=0.5", 3),
    ],
)
def test_buckets_are_as_large_as_torch_or_the_spec_has_them(ranks: Ranks, strategy: str, sums: int) -> None:
    assert ranks(2, sums_of_a_step, strategy) == [sums] * 2


def ramp_steps(rank: int, strategy: str, compression: str) -> int:
    settings = TrainSettings(strategy=strategy, compression=compression)
    trainer = Trainer(nn.Linear(2, 2), F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    return trainer.model.ramp_steps


@pytest.mark.parametrize(
    ("strategy", "compression", "steps"),
    [
        ("ddp", "none", 0),
        ("ddp", "powersgd:1:warmup=3", 3),
        ("scratch-ddp", "powersgd:1:warmup=3", 3),
        ("ddp", "torch-powersgd:1", 2),
    ],
)
def test_how_many_steps_are_done_otherwise_at_the_start(
    ranks: Ranks, strategy: str, compression: str, steps: int
) -> None:
    assert ranks(2, ramp_steps, strategy, compression) == [steps] * 2


def failing(rank: int, compression: str) -> tuple[str, bool]:
    """On a rank: what a step raises whose exchange fails, and whether the model is freed after it."""

    def fail(*arguments: object) -> None:
        raise ValueError("the cause")

    module = nn.Linear(8, 5)
    alive = weakref.ref(module)
    settings = TrainSettings(strategy="ddp", compression=compression)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    try:
        with patch.object(GradientExchange, "sum_shares", fail):
            trainer.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    except ValueError as error:
        raised = str(error)
    del trainer, module
    gc.collect()
    return raised, alive() is None


def test_what_an_exchange_raises_on_its_lane_is_raised_by_the_step(ranks: Ranks) -> None:
    assert ranks(2, failing, "topk:0.5") == [("the cause", True)] * 2


def freed(rank: int, compression: str) -> bool:
    module = nn.Linear(8, 5)
    alive = weakref.ref(module)
    settings = TrainSettings(strategy="ddp", compression=compression)
    trainer = Trainer(module, F.mse_loss, device=CPU, settings=settings, group=open_exchange())
    for _ in range(4):
        trainer.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    del trainer, module
    gc.collect()
    return alive() is None


@pytest.mark.parametrize("compression", ["none", "topk:0.5", "torch-powersgd:1"])
def test_a_model_that_is_dropped_is_freed(ranks: Ranks, compression: str) -> None:
    assert ranks(2, freed, compression) == [True] * 2


def without_hooks(rank: int) -> None:
    with patch.object(DistributedDataParallel, "register_comm_hook", side_effect=AssertionError):
        Trainer(nn.Linear(2, 2), F.mse_loss, device=CPU, settings=TrainSettings(strategy="ddp"))


def test_torch_exchanges_alone_where_nothing_else_is_asked_for(ranks: Ranks) -> None:
    ranks(2, without_hooks)
