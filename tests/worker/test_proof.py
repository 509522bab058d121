"""The proof that a cell trains: real cells pass it, and every way of training wrongly is caught by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from harness.worker import proof, reference
from harness.worker.control import Control
from harness.worker.exchange import ExchangeGroup, open_exchange
from harness.worker.parts import Parts
from harness.worker.rank import Rank
from results.cell import Cell
from strategies.ddp import DdpModel
from strategies.parallel import GradientTask, ParallelModel
from strategies.trainer import Trainer

Ranks = Callable[..., list[Any]]
Fields = dict[str, Any]
CPU = torch.device("cpu")
MLP: Fields = {"workload": "mlp", "micro_batch": 4, "optimizer": "sgd:lr=0.05"}
RESNET: Fields = {"workload": "resnet18-32px", "micro_batch": 2, "optimizer": "sgd:lr=0.002"}
GPT: Fields = {"workload": "gpt-nano", "micro_batch": 1, "optimizer": "adamw:lr=0.001"}


def cell_of(size: int, fields: Fields) -> Cell:
    base = {
        "dataset": "synthetic",
        "strategy": "single" if size == 1 else "ddp",
        "gpus": size,
        "device": "cpu",
        "backend": "gloo",
    }
    return Cell(**(base | fields))


def prove(rank: int, fields: Fields, mutation: str | None = None) -> Fields:
    """On a rank: the proof of a cell, with something broken in it if told."""
    size = torch.distributed.get_world_size()
    cell = cell_of(size, fields)
    who = Rank(rank=rank, local_rank=rank, node_rank=0, gpus=size, local_gpus=size)
    parts = Parts(cell=cell, rank=who, device=CPU, source_folder=None)
    with ExitStack() as stack:
        if mutation is not None:
            stack.enter_context(MUTATIONS[mutation](rank, size))
        workload = parts.workload()
        trainer = parts.trainer(workload, open_exchange())
        found = proof.prove(parts, trainer, parts.batches(workload, rank), Control(CPU))
    return {name: getattr(found, name) for name in found.__struct_fields__}


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (1, MLP | {"accumulation": 2}),
        (1, GPT | {"dataset": "text"}),
        (2, MLP | {"accumulation": 2, "clip_norm": 0.1, "dataset": "digits"}),
        (2, MLP | {"strategy": "ddp:bucket_view=true:bucket_mb=0.1", "memory_format": "channels_last"}),
        (2, RESNET),
        (2, RESNET | {"accumulation": 2, "activation_checkpointing": True, "dataset": "digits"}),
        (2, GPT | {"accumulation": 2, "clip_norm": 1.0, "dataset": "text"}),
    ],
)
def test_a_cell_on_one_rank_or_two_is_proven_bit_for_bit(ranks: Ranks, size: int, fields: Fields) -> None:
    for found in ranks(size, prove, fields):
        assert found["passed"]
        assert found["method"] == "serial-simulation"
    first = ranks(size, prove, fields)[0]
    assert (first["max_difference"], first["max_bound"]) == (0.0, 0.0)
    assert first["detail"] == (
        f"3 steps of {size} replicas recomputed on one device;"
        " gradients, buffers and updates are equal bit for bit"
    )


@pytest.mark.parametrize("fields", [MLP | {"accumulation": 2}, RESNET, GPT | {"dataset": "text"}])
def test_a_cell_on_three_ranks_is_proven_within_the_rounding_of_a_sum(ranks: Ranks, fields: Fields) -> None:
    found = ranks(3, prove, fields)[0]
    assert found["passed"]
    assert "within the rounding of a sum in another order" in found["detail"]
    assert 0 < found["max_difference"] <= found["max_bound"] < 1e-6


@pytest.mark.parametrize("fields", [MLP | {"precision": "bf16"}, MLP | {"precision": "fp16", "clip_norm": 1.0}])
def test_low_precision_is_proven_within_a_stated_part_of_the_gradient(ranks: Ranks, fields: Fields) -> None:
    found = ranks(2, prove, fields)[0]
    assert found["passed"]
    stated = {"bf16": "0.03", "fp16": "0.01"}[fields["precision"]]
    assert f"gradients agree within {stated} of their L2 norm" in found["detail"]


def _gradients_times(factor: float) -> AbstractContextManager[object]:
    original = ParallelModel.compute_gradients

    def wrong(self: ParallelModel, batches: Any, task: GradientTask) -> Tensor:
        loss = original(self, batches, task)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss

    return patch.object(ParallelModel, "compute_gradients", wrong)


def _one_rank_dropped(rank: int, size: int) -> AbstractContextManager[object]:
    original = ExchangeGroup.allreduce

    def wrong(self: ExchangeGroup, tensors: list[Tensor], options: Any = None) -> Any:
        if rank == size - 1:
            for tensor in tensors:
                tensor.zero_()
        return original(self, tensors, options)

    return patch.object(ExchangeGroup, "allreduce", wrong)


def _off_in_the_last_step(rank: int, size: int) -> AbstractContextManager[object]:
    original, steps = Trainer.compute_gradients, iter(range(proof.STEPS))

    def wrong(self: Trainer, batches: Any) -> Tensor:
        exchange = self.model.module.process_group
        exchange.enabled = next(steps) < proof.STEPS - 1
        loss = original(self, batches)
        exchange.enabled = True
        return loss

    return patch.object(Trainer, "compute_gradients", wrong)


def _sum_instead_of_mean_of_micro_batches(rank: int, size: int) -> AbstractContextManager[object]:
    original = ParallelModel.compute_gradients

    def wrong(self: ParallelModel, batches: Any, task: GradientTask) -> Tensor:
        summed = replace(task, loss=lambda y, t: task.accumulation * task.loss(y, t))
        return original(self, batches, summed)

    return patch.object(ParallelModel, "compute_gradients", wrong)


def _first_micro_batch_exchanged_instead_of_the_last(rank: int, size: int) -> AbstractContextManager[object]:
    original = DdpModel.exchange
    return patch.object(DdpModel, "exchange", lambda self, *, now: original(self, now=not now))


def _buffers_of_another_rank(rank: int, size: int) -> AbstractContextManager[object]:
    """Every rank takes the running statistics of the last one, where DDP gives it those of rank 0."""
    original = Trainer.compute_gradients

    def wrong(self: Trainer, batches: Any) -> Tensor:
        for buffer in self.model.bare.buffers():
            torch.distributed.broadcast(buffer, src=size - 1)
        return original(self, batches)

    return patch.object(Trainer, "compute_gradients", wrong)


def _buffers_never_sent(rank: int, size: int) -> AbstractContextManager[object]:
    original = Trainer.__init__

    def wrong(self: Trainer, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.model.module.broadcast_buffers = False

    return patch.object(Trainer, "__init__", wrong)


def _update_twice(rank: int, size: int) -> AbstractContextManager[object]:
    original = Trainer.update

    def wrong(self: Trainer) -> None:
        self.optimizer.step()
        original(self)

    return patch.object(Trainer, "update", wrong)


def _update_left_out(rank: int, size: int) -> AbstractContextManager[object]:
    return patch.object(Trainer, "update", lambda self: self.optimizer.zero_grad())


def _clip_ignored(rank: int, size: int) -> AbstractContextManager[object]:
    return patch.object(ParallelModel, "clip_gradients", lambda self, max_norm: None)


def _gradients_not_forgotten(rank: int, size: int) -> AbstractContextManager[object]:
    return patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


def _wrong_rate(rank: int, size: int) -> AbstractContextManager[object]:
    original = Trainer.__init__

    def wrong(self: Trainer, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.optimizer.param_groups[0]["lr"] *= 1.001

    return patch.object(Trainer, "__init__", wrong)


def _rate_changes_after_a_step(rank: int, size: int) -> AbstractContextManager[object]:
    original = Trainer.update

    def wrong(self: Trainer) -> None:
        original(self)
        self.optimizer.param_groups[0]["lr"] *= 1.001

    return patch.object(Trainer, "update", wrong)


def _wrong_rate_on_the_last_rank(rank: int, size: int) -> AbstractContextManager[object]:
    return _wrong_rate(rank, size) if rank == size - 1 else ExitStack()


def _same_data_on_all_ranks(rank: int, size: int) -> AbstractContextManager[object]:
    original = Parts.batches

    def wrong(self: Parts, workload: Any, replica: int) -> Iterator[Any]:
        # The reference, on rank 0, asks for other replicas too and gets them.
        return original(self, workload, 0 if replica == rank else replica)

    return patch.object(Parts, "batches", wrong)


def _dropout_drawn_from_a_seed_of_the_trainers_own(rank: int, size: int) -> AbstractContextManager[object]:
    original = Trainer.compute_gradients

    def wrong(self: Trainer, batches: Any) -> Tensor:
        torch.manual_seed(0)
        return original(self, batches)

    return patch.object(Trainer, "compute_gradients", wrong)


@contextmanager
def _seeded_alike(rank: int, size: int) -> Iterator[None]:
    """All replicas draw the same dropout, by the worker's will: a choice of seeds, not an error of training."""
    original = reference.seed_step

    def alike(seed: int, step: int, replica: int) -> None:
        original(seed, step, 0)

    with patch.object(proof, "seed_step", alike), patch.object(reference, "seed_step", alike):
        yield


def _no_time(rank: int, size: int) -> AbstractContextManager[object]:
    return patch.object(proof, "LONGEST_S", 0.0)


def _no_room(rank: int, size: int) -> AbstractContextManager[object]:
    return patch.object(proof, "simulate_step", side_effect=torch.OutOfMemoryError("no room"))


@contextmanager
def _no_time_and_wrong_rate_on_the_last_rank(rank: int, size: int) -> Iterator[None]:
    with _no_time(rank, size), _wrong_rate_on_the_last_rank(rank, size):
        yield


MUTATIONS: dict[str, Callable[[int, int], AbstractContextManager[Any]]] = {
    "divided by N + 1": lambda rank, size: _gradients_times(size / (size + 1)),
    "not divided": lambda rank, size: _gradients_times(size),
    "one bit off": lambda rank, size: _gradients_times(1 + 2**-23),
    "one rank dropped": _one_rank_dropped,
    "off in the last step": _off_in_the_last_step,
    "sum of micro-batches": _sum_instead_of_mean_of_micro_batches,
    "first micro-batch exchanged": _first_micro_batch_exchanged_instead_of_the_last,
    "buffers of another rank": _buffers_of_another_rank,
    "buffers never sent": _buffers_never_sent,
    "update twice": _update_twice,
    "update left out": _update_left_out,
    "clip ignored": _clip_ignored,
    "gradients not forgotten": _gradients_not_forgotten,
    "wrong rate": _wrong_rate,
    "rate changes after a step": _rate_changes_after_a_step,
    "wrong rate on the last rank": _wrong_rate_on_the_last_rank,
    "same data on all ranks": _same_data_on_all_ranks,
    "dropout of the trainer's own": _dropout_drawn_from_a_seed_of_the_trainers_own,
    "seeded alike": _seeded_alike,
    "no time": _no_time,
    "no room": _no_room,
    "no time, wrong rate on the last rank": _no_time_and_wrong_rate_on_the_last_rank,
}
GRADIENT = "gradient of .* differs from the serial simulation"
UPDATE = "update differs from the serial simulation"
BUFFERS = "buffers differs from the serial simulation"
REPLICAS = "replicas differ after the update"


@pytest.mark.parametrize(
    ("mutation", "fields", "detail"),
    [
        ("divided by N + 1", MLP, GRADIENT),
        ("not divided", MLP, GRADIENT),
        ("one rank dropped", MLP, GRADIENT),
        ("off in the last step", MLP, f"{GRADIENT}|{REPLICAS}"),
        ("sum of micro-batches", MLP | {"accumulation": 2}, GRADIENT),
        ("first micro-batch exchanged", MLP | {"accumulation": 2}, f"{GRADIENT}|{REPLICAS}"),
        ("buffers of another rank", RESNET, BUFFERS),
        ("buffers never sent", RESNET, "buffers"),
        ("update twice", MLP, UPDATE),
        ("update left out", MLP, UPDATE),
        ("clip ignored", MLP | {"clip_norm": 0.01}, UPDATE),
        ("gradients not forgotten", MLP, GRADIENT),
        ("wrong rate", MLP, UPDATE),
        ("wrong rate", GPT, UPDATE),
        ("rate changes after a step", MLP, UPDATE),
        ("wrong rate on the last rank", MLP, REPLICAS),
        ("same data on all ranks", MLP, GRADIENT),
        ("dropout of the trainer's own", MLP, GRADIENT),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_wrong_training_is_caught_on_all_ranks(
    ranks: Ranks, size: int, mutation: str, fields: Fields, detail: str
) -> None:
    results = ranks(size, prove, fields, mutation)
    assert [found["passed"] for found in results] == [False] * size
    assert results[0]["method"] == "serial-simulation"
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]


def test_on_two_ranks_a_gradient_is_caught_that_is_off_in_its_last_bit(ranks: Ranks) -> None:
    found = ranks(2, prove, MLP, "one bit off")[0]
    assert not found["passed"]
    assert re.search(GRADIENT, found["detail"])


def test_replicas_that_draw_the_same_dropout_train_rightly_if_the_worker_seeds_them_so(ranks: Ranks) -> None:
    assert ranks(2, prove, MLP, "seeded alike")[0]["passed"]


@pytest.mark.parametrize(
    ("mutation", "reason"),
    [
        ("no time", r"a serial simulation would take about \d+ s"),
        ("no room", "a serial simulation does not fit on the device beside the model"),
    ],
)
def test_where_the_reference_does_not_fit_the_weaker_proof_is_given_and_named(
    ranks: Ranks, mutation: str, reason: str
) -> None:
    for found in ranks(2, prove, MLP, mutation):
        assert found["passed"]
        assert found["method"] == "replica-agreement"
        assert found["detail"].startswith("the replicas' parameters are equal bit for bit after the update; ")
    assert re.search(reason, ranks(2, prove, MLP, mutation)[0]["detail"])


def test_the_weaker_proof_too_can_fail(ranks: Ranks) -> None:
    for found in ranks(2, prove, MLP, "no time, wrong rate on the last rank"):
        assert not found["passed"]
        assert found["method"] == "replica-agreement"
        assert "parameters differ after the update" in found["detail"]
