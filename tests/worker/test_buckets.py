"""Buckets of a step, and those that begin before the last gradient: by hand, and the same under any load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_builders import CPU
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.worker.exchange.buckets import BucketCounter
from harness.worker.exchange.group import open_exchange
from harness.worker.exchange.recorder import Recorder
from harness.worker.measure.clock import StepClock
from results.groups import GroupLayout
from results.layout import ModelLayout
from results.record import Buckets
from strategies import Trainer, TrainSettings
from strategies.catalog import group_layout
from strategies.scratch_ddp.reducer import GradientReducer
from strategies.training.observer import Phase, SilentObserver


@contextmanager
def busy(*, on: bool) -> Iterator[None]:
    """A thread that takes the interpreter from the others whenever it can."""
    over = threading.Event()

    def burn() -> None:
        while not over.is_set():
            pass

    threads = [threading.Thread(target=burn)] if on else []
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


def no_overlap(self: GradientReducer, index: int) -> None:
    """In the place of `ready`: all buckets are left to the end of the exchange."""


class Penalised(nn.Sequential):
    """The layers with a penalty over all parameters, which a forward pass begins with."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        penalty = 0.01 * sum(parameter.square().sum() for parameter in self.parameters())
        return super().forward(inputs) + penalty


def count(
    rank: int, fields: dict[str, Any], lost: bool = False, model: type[nn.Sequential] = nn.Sequential
) -> list[tuple[Any, Any, Any, dict[str, str]]]:
    """On a rank: what is counted in three periods of a model of four blocks, the last two under load."""
    torch.manual_seed(0)
    exchange = open_exchange()
    ready = no_overlap if lost else GradientReducer.ready
    with patch.object(GradientReducer, "ready", ready):
        trainer = Trainer(
            model(*(nn.Linear(64, 64) for _ in range(4))),
            F.mse_loss,
            device=CPU,
            settings=TrainSettings(**fields),
            layout=ModelLayout(blocks=("0", "1", "2", "3")),
            group=exchange,
        )
        batches = iter(lambda: (torch.randn(4, 64), torch.randn(4, 64)), None)
        found = []
        for repetition in range(4):
            recorder = Recorder(StepClock(CPU), CPU)
            counter = BucketCounter(recorder)
            exchange.traffic.recorder, exchange.traffic.buckets = recorder, counter
            with busy(on=repetition > 1), counter.counting(trainer):
                for _ in range(trainer.model.period):
                    trainer.step(batches)
            exchange.traffic.recorder = exchange.traffic.buckets = None
            buckets, unknown = counter.counted(group_layout(fields["strategy"], 2))
            found.append((buckets.started, buckets.early, buckets.left, unknown))
    # In the first period a strategy learns in which order gradients come.
    return found[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "started", "early"),
    [
        # A bias and a weight are 16,640 bytes: with a limit of 10,485 each layer is a bucket, and the first
        # layer's is full with the last gradient.
        ({"strategy": "ddp:bucket_mb=0.01"}, [4], [3]),
        # torch keeps the buckets that it made in the order of registration (the first weight, a bias with the
        # next layer's weight three times, the last bias), and sums which parameters were used.
        ({"strategy": "ddp:bucket_mb=0.01:find_unused=true"}, [6], [4]),
        ({"strategy": "ddp:bucket_mb=0.01", "compression": "topk:0.1"}, [4], [3]),
        ({"strategy": "zero1:bucket_mb=0.01"}, [4], [3]),
        ({"strategy": "scratch-ddp:first_bucket_mb=0.01:bucket_mb=0.01"}, [4], [3]),
        ({"strategy": "scratch-ddp:first_bucket_mb=0.01:bucket_mb=0.01", "compression": "int8"}, [4], [3]),
        # With the gradients of two micro-batches: exchanged once.
        ({"strategy": "scratch-ddp:first_bucket_mb=0.01:bucket_mb=0.01", "accumulation": 2}, [4], [3]),
        # One bucket of all gradients.
        ({"strategy": "scratch-ddp"}, [1], [0]),
        # A block is a unit; that of the first one is averaged when backward is over.
        ({"strategy": "fsdp"}, [4], [3]),
        ({"strategy": "scratch-fsdp:stage=2"}, [4], [3]),
        ({"strategy": "local-sgd:2"}, [0, 1], [0, 0]),
    ],
)
def test_the_same_buckets_begin_early_in_every_repetition(ranks, fields, started, early) -> None:
    for found in ranks(2, count, fields, False):
        assert [(each[0], each[1], each[3]) for each in found] == [(started, early, {})] * 3
        assert found[0][2] == found[1][2] == found[2][2]


def test_an_exchange_that_has_lost_its_overlap_begins_no_bucket_early(ranks) -> None:
    fields = {"strategy": "scratch-ddp:first_bucket_mb=0.01:bucket_mb=0.01"}
    for found in ranks(2, count, fields, True):
        assert found == [([4], [0], [[0.0] * 4], {})] * 3


SCRATCH = {"strategy": "scratch-ddp:first_bucket_mb=0.01:bucket_mb=0.01"}
PLAIN_LEFT = [12 / 17, 8 / 17, 4 / 17, 0.0]
"""One node is the loss. A layer is four: the product with its bias, the transposed weight, two gradients."""


@pytest.mark.parametrize(
    ("fields", "model", "left"),
    [
        (SCRATCH, nn.Sequential, PLAIN_LEFT),
        ({"strategy": "ddp:bucket_mb=0.01"}, nn.Sequential, PLAIN_LEFT),
        ({"strategy": "ddp:bucket_mb=0.01", "compression": "topk:0.1"}, nn.Sequential, PLAIN_LEFT),
        # Of the micro-batch in whose backward pass they begin.
        ({**SCRATCH, "accumulation": 2}, nn.Sequential, PLAIN_LEFT),
        # The forward passes that are repeated are no nodes of the graph.
        ({**SCRATCH, "activation_checkpointing": True}, nn.Sequential, PLAIN_LEFT),
        # The penalty adds three nodes for each of 8 parameters (square, sum, added up), its factor, and its
        # sum with the outputs. Loss, that sum, 8 nodes of layers and the factor come before any gradient, as
        # what a forward pass begins with is last in backward; then each gradient comes after its three.
        (SCRATCH, Penalised, [24 / 43, 16 / 43, 8 / 43, 0.0]),
        ({"strategy": "ddp:bucket_mb=0.01"}, Penalised, [24 / 43, 16 / 43, 8 / 43, 0.0]),
    ],
)
def test_what_is_left_of_backward_is_counted_by_nodes(ranks, fields, model, left) -> None:
    """The order alone is blind to the penalty: as many buckets begin early."""
    for found in ranks(2, count, fields, False, model):
        assert found == [([4], [3], [left], {})] * 3


class Reentrant(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)


class Compiled(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.compile(super().forward, backend="aot_eager")(inputs)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Reentrant, "reentrant checkpointing runs backward passes inside of a node"),
        pytest.param(Compiled, "a compiled backward pass is a single node", marks=pytest.mark.slow),
    ],
)
def test_nodes_that_hide_backward_leave_its_rest_unknown(ranks, model, reason) -> None:
    for found in ranks(2, count, SCRATCH, False, model):
        assert [(left, unknown) for _, _, left, unknown in found] == [(None, {"backward_left": reason})] * 3


@pytest.mark.parametrize(
    ("groups", "buckets", "unknown"),
    [
        (GroupLayout(tensor=2), None, "tensor parallelism sums activations in the backward pass too"),
        (GroupLayout(pipeline=2), [0], "a pipeline's stages have several backward passes at once"),
        (GroupLayout(replicate=2), [0], "the strategy computes its loss by itself"),
    ],
)
def test_what_is_not_known_has_a_reason(groups, buckets, unknown) -> None:
    counter = BucketCounter(SilentObserver())
    counter.begins(Phase.BACKWARD)
    counter.step_done(torch.zeros(()))
    expected = None if buckets is None else Buckets(started=buckets)
    assert counter.counted(groups) == (expected, {"buckets": unknown})
