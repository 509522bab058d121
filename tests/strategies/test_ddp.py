"""torch's DDP over real ranks, exchanging alone and by our hook, against a serial loop over the replicas."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_builders import a_trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.worker.exchange.group import open_exchange
from results.errors import UsageError
from strategies import CheckpointWarning, GradientExchange, Trainer


def options_in_force(rank: int, strategy: str) -> list[object]:
    """On a rank: static graph, unused search, and whether a gradient lies in a bucket with others."""
    module = nn.Linear(8, 5)
    trainer = a_trainer(module, group=open_exchange(), strategy=strategy)
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
def test_options_of_the_spec_reach_torch(ranks, strategy, expected) -> None:
    assert ranks(2, options_in_force, strategy) == [expected] * 2


def notes_of_a_resumed_run(rank: int, strategy: str, folder: Path) -> tuple[str, ...]:
    group = open_exchange()

    def made() -> Trainer:
        return a_trainer(nn.Linear(8, 5), group=group, strategy=strategy)

    first = made()
    first.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    first.save(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return tuple(made().resume(folder).notes)


def test_a_resumed_run_says_that_static_graph_may_round_otherwise(ranks, tmp_path) -> None:
    found = ranks(2, notes_of_a_resumed_run, "ddp:static_graph=true", tmp_path)
    told = "ddp with static_graph=true forms its buckets anew, and may round the first sums differently: what"
    assert all(len(notes) == 1 and notes[0].startswith(told) for notes in found)


def sums_of_a_step(rank: int, strategy: str) -> int:
    """The sums of three parameters of 0.8 MiB, when the buckets are formed anew."""
    module, group = nn.Sequential(*(nn.Linear(458, 458, bias=False) for _ in range(3))), open_exchange()
    trainer = a_trainer(module, group=group, strategy=strategy)
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
def test_buckets_are_as_large_as_torch_or_the_spec_has_them(ranks, strategy, sums) -> None:
    assert ranks(2, sums_of_a_step, strategy) == [sums] * 2


def ramp_steps(rank: int, strategy: str, compression: str) -> int:
    trainer = a_trainer(nn.Linear(2, 2), group=open_exchange(), strategy=strategy, compression=compression)
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
def test_how_many_steps_are_done_otherwise_at_the_start(ranks, strategy, compression, steps) -> None:
    assert ranks(2, ramp_steps, strategy, compression) == [steps] * 2


def failing(rank: int, strategy: str) -> tuple[str, bool]:
    """On a rank: what a step raises whose exchange fails, and whether the model is freed after it."""

    def fail(*arguments: object) -> None:
        raise ValueError("the cause")

    module = nn.Linear(8, 5)
    alive = weakref.ref(module)
    trainer = a_trainer(module, group=open_exchange(), strategy=strategy, compression="topk:0.5")
    try:
        with patch.object(GradientExchange, "sum_shares", fail):
            trainer.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    except ValueError as error:
        raised = str(error)
    del trainer, module
    gc.collect()
    return raised, alive() is None


@pytest.mark.parametrize("strategy", ["ddp", "scratch-ddp"])
def test_an_error_of_an_exchange_is_raised_by_the_step(ranks, strategy) -> None:
    assert ranks(2, failing, strategy) == [("the cause", True)] * 2


def freed(rank: int, compression: str) -> bool:
    module = nn.Linear(8, 5)
    alive = weakref.ref(module)
    trainer = a_trainer(module, group=open_exchange(), strategy="ddp", compression=compression)
    for _ in range(4):
        trainer.step(iter([(torch.ones(2, 8), torch.ones(2, 5))]))
    del trainer, module
    gc.collect()
    return alive() is None


@pytest.mark.parametrize("compression", ["none", "topk:0.5", "torch-powersgd:1"])
def test_a_model_that_is_dropped_is_freed(ranks, compression) -> None:
    assert ranks(2, freed, compression) == [True] * 2


def without_hooks(rank: int) -> None:
    with patch.object(DistributedDataParallel, "register_comm_hook", side_effect=AssertionError):
        a_trainer(nn.Linear(2, 2), strategy="ddp")


def test_torch_exchanges_alone_where_nothing_else_is_asked_for(ranks) -> None:
    ranks(2, without_hooks)


class OneOfTwo(nn.Module):
    """Two layers, of which the sign of the first input chooses one, and a third that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)[:, :4] if bool(x[0, 0] > 0) else self.b(x)


def without_gradient(rank: int, strategy: str, signs: list[float]) -> str:
    """On a rank: what is said of one step, whose micro-batches have these signs."""
    trainer = a_trainer(OneOfTwo(), group=open_exchange(), strategy=strategy, accumulation=len(signs))
    try:
        trainer.step((sign * torch.ones(2, 5), torch.ones(2, 4)) for sign in signs)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "ddp:bucket_view=true"])
@pytest.mark.parametrize("signs", [[1.0], [-1.0, 1.0]])
def test_a_parameter_without_a_gradient_is_named_with_the_way_out(ranks, strategy, signs) -> None:
    """In the last micro-batch: torch exchanges the gradients of its backward pass."""
    told = (
        "no gradient came for b.weight, b.bias, never.weight (4 of 6 parameters): freeze what is not used, "
        "or use ddp:find_unused=true"
    )
    assert ranks(2, without_gradient, strategy, signs) == [told] * 2


def branched(rank: int) -> str:
    """On a rank: what is said of a step in which each rank takes another branch."""
    return without_gradient(rank, "ddp", [1.0 - 2 * rank])


def test_a_branch_that_some_ranks_take_is_named_with_the_way_out(ranks) -> None:
    ours, theirs = ranks(2, branched)
    assert ours.startswith("no gradient came for b.weight, b.bias, never.weight (4 of 6 parameters)")
    assert theirs.startswith("no gradient came for a.weight, a.bias, never.weight (4 of 6 parameters)")
