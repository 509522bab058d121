"""Every way of training wrongly is caught by the proof: each is planted, and looked for in the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planting import (
    GPT,
    GRADIENT,
    MLP,
    NORMED,
    REPLICAS,
    STATE,
    UPDATE,
    Fields,
    Planted,
    after,
    gradients_times,
    wrapped,
)
from planting import WIDE as WIDE_FP32
from torch import Tensor

from harness.worker.cell.setup import CellSetup
from harness.worker.exchange.group import ExchangeGroup
from harness.worker.proof import examination, proof, reference
from results.record import STEPS
from strategies import optimizers as optimizer
from strategies import trainer
from strategies.ddp.model import DdpModel
from strategies.optimizers import AdamW, Sgd
from strategies.trainer import Trainer
from strategies.training import parallel
from strategies.training.parallel import ParallelModel
from workloads import data

DIGITS: Fields = MLP | {"dataset": "digits"}
WIDE: Fields = WIDE_FP32 | {"precision": "bf16"}
NANO: Fields = {
    "workload": "llama-nano:seq=16",
    "micro_batch": 4,
    "optimizer": "adamw:lr=0.001",
    "precision": "float8",
}
PRECISION = "the step was computed in fp32"
BUFFERS = "buffers differs from the serial simulation"


def _divided_by_one_more(rank: int, size: int) -> Planted:
    return after(ParallelModel, "compute_gradients", gradients_times(size / (size + 1)))


def _not_divided(rank: int, size: int) -> Planted:
    return after(ParallelModel, "compute_gradients", gradients_times(size))


def _last_bit_off(rank: int, size: int) -> Planted:
    return after(ParallelModel, "compute_gradients", gradients_times(1 + 2**-23))


def _one_rank_dropped(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Any, tensors: list[Tensor], *options: Any) -> Any:
        for tensor in tensors if rank == size - 1 else ():
            tensor.zero_()
        return original(self, tensors, *options)

    return wrapped(ExchangeGroup, "allreduce", wrong)


def _off_in_the_last_step(rank: int, size: int) -> Planted:
    steps = iter(range(STEPS))

    def wrong(original: Any, self: Trainer, batches: Any) -> Tensor:
        exchange = self.model.module.process_group
        exchange.traffic.enabled = next(steps) < STEPS - 1
        loss = original(self, batches)
        exchange.traffic.enabled = True
        return loss

    return wrapped(Trainer, "compute_gradients", wrong)


def _sum_instead_of_mean_of_micro_batches(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Any, batches: Any, task: Any) -> Tensor:
        summed = replace(task, loss=lambda y, t: task.accumulation * task.loss(y, t))
        return original(self, batches, summed)

    return wrapped(ParallelModel, "compute_gradients", wrong)


def _first_micro_batch_exchanged_instead_of_the_last(rank: int, size: int) -> Planted:
    return wrapped(DdpModel, "exchange", lambda original, self, *, now: original(self, now=not now))


def _buffers_of_another_rank(rank: int, size: int) -> Planted:
    """Every rank takes the running statistics of the last one, where DDP gives it rank 0's."""

    def wrong(original: Any, self: Trainer, batches: Any) -> Tensor:
        for buffer in self.model.bare.buffers():
            torch.distributed.broadcast(buffer, src=size - 1)
        return original(self, batches)

    return wrapped(Trainer, "compute_gradients", wrong)


def _buffers_never_sent(rank: int, size: int) -> Planted:
    return after(Trainer, "__init__", lambda self: setattr(self.model.module, "broadcast_buffers", False))


def _update_twice(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Trainer) -> None:
        self.optimizer.step()
        original(self)

    return wrapped(Trainer, "update", wrong)


def _update_left_out(rank: int, size: int) -> Planted:
    return patch.object(Trainer, "update", lambda self: self.optimizer.zero_grad())


def _clip_ignored(rank: int, size: int) -> Planted:
    return patch.object(ParallelModel, "clip_gradients", lambda self, max_norm: None)


def _gradients_not_forgotten(rank: int, size: int) -> Planted:
    return patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


def _higher_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 1.001


def _wrong_rate(rank: int, size: int) -> Planted:
    return after(Trainer, "__init__", _higher_rate)


def _rate_changes_after_a_step(rank: int, size: int) -> Planted:
    return after(Trainer, "update", _higher_rate)


def _wrong_rate_on_the_last_rank(rank: int, size: int) -> Planted:
    return _wrong_rate(rank, size) if rank == size - 1 else ExitStack()


def _state_after_a_step(change: Callable[[Tensor], object]) -> Planted:
    def changed(trainer: Trainer) -> None:
        for state in trainer.model.local_state(trainer.optimizer).values():
            for key, value in state.items():
                if key != "step":
                    change(value)

    return after(Trainer, "update", changed)


def _momentum_lost(rank: int, size: int) -> Planted:
    return _state_after_a_step(Tensor.zero_)


def _momentum_off_in_its_last_bit(rank: int, size: int) -> Planted:
    return _state_after_a_step(lambda value: value.mul_(1 + 2**-23))


def _state_forgotten(rank: int, size: int) -> Planted:
    return after(Trainer, "update", lambda self: self.optimizer.state.clear())


def _batches(replica_of: Callable[[int], int]) -> Planted:
    """Give each replica the batches of another one."""
    return wrapped(
        CellSetup,
        "batches",
        lambda original, self, workload, replica: original(self, workload, replica_of(replica)),
    )


def _same_data_on_all_ranks(rank: int, size: int) -> Planted:
    # The reference, on rank 0, asks for other replicas too and gets them.
    return _batches(lambda replica: 0 if replica == rank else replica)


def _one_sampler_for_all(rank: int, size: int) -> Planted:
    """All replicas get the same data, in whatever the worker opens."""
    return _batches(lambda replica: 0)


def _dropout_drawn_from_a_seed_of_the_trainers_own(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Trainer, batches: Any) -> Tensor:
        torch.manual_seed(0)
        return original(self, batches)

    return wrapped(Trainer, "compute_gradients", wrong)


@contextmanager
def _seeded_alike(rank: int, size: int) -> Any:
    """All replicas draw the same dropout, in the simulation too."""

    def alike(original: Any, seed: int, step: int, replica: int) -> None:
        original(seed, step, 0)

    with ExitStack() as stack:
        for module in (proof, examination, reference):
            stack.enter_context(wrapped(module, "seed_step", alike))
        yield


def _seed_of_data_without_replica(rank: int, size: int) -> Planted:
    return patch.object(data, "seed_of", lambda seed, replica: seed)


def _dealt(**wrong: Any) -> Planted:
    sampler = data.DistributedSampler
    return patch.object(
        data, "DistributedSampler", lambda samples, **named: sampler(samples, **named | wrong)
    )


def _epochs_not_dealt_to_replicas(rank: int, size: int) -> Planted:
    return _dealt(rank=0)


def _data_in_the_order_of_the_file(rank: int, size: int) -> Planted:
    return _dealt(shuffle=False)


def _a_batch_left_out(rank: int, size: int) -> Planted:
    """The last rank drops its first micro-batch and continues with the second."""

    def wrong(original: Any, self: CellSetup, workload: Any, replica: int) -> Any:
        draws = original(self, workload, replica)
        if rank == size - 1:
            next(draws._batches)
        return draws

    return wrapped(CellSetup, "batches", wrong)


class OneAhead(torch.optim.AdamW):
    """AdamW that corrects the bias of its moments as if one step more had been made."""

    def _init_group(self, group: Any, *arguments: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update(moments, step=torch.tensor(1.0))
        return super()._init_group(group, *arguments)


def _bias_correction_off_by_one(rank: int, size: int) -> Planted:
    """Adam's bias correction is one step ahead in every optimizer that bench builds."""
    return patch.object(optimizer, "load", lambda place: OneAhead)


_ONLY_RATE = property(lambda self: {"lr": self.spec.number("lr")})


def _decay_ignored(rank: int, size: int) -> Planted:
    return patch.object(AdamW, "arguments", _ONLY_RATE)


def _other_momentum_by_default(rank: int, size: int) -> Planted:
    return patch.object(Sgd, "arguments", _ONLY_RATE)


def _half_precision_ignored(rank: int, size: int) -> Planted:
    return patch.object(parallel, "autocast", lambda *given, **named: nullcontext())


def _float8_ignored(rank: int, size: int) -> Planted:
    return patch.object(trainer, "scale_products", lambda *given: None)


# On two ranks a sum has one order and the bound is zero; on three it is that of rounding.
@pytest.mark.parametrize(
    ("mutation", "sizes", "fields", "detail"),
    [
        (_divided_by_one_more, [2, 3], MLP, GRADIENT),
        (_not_divided, [2], MLP, GRADIENT),
        (_one_rank_dropped, [3], MLP, GRADIENT),
        (_off_in_the_last_step, [2], MLP, f"{GRADIENT}|{REPLICAS}"),
        (_sum_instead_of_mean_of_micro_batches, [2], MLP | {"accumulation": 2}, GRADIENT),
        (
            _first_micro_batch_exchanged_instead_of_the_last,
            [3],
            MLP | {"accumulation": 2},
            f"{GRADIENT}|{REPLICAS}",
        ),
        (_buffers_of_another_rank, [3], NORMED, BUFFERS),
        (_buffers_never_sent, [3], NORMED, "a replica's buffers differ from the serial simulation"),
        (_update_twice, [2], MLP, UPDATE),
        (_update_left_out, [2], MLP, UPDATE),
        (_clip_ignored, [2, 3], MLP | {"clip_norm": 0.01}, UPDATE),
        (_gradients_not_forgotten, [2], MLP, GRADIENT),
        (_wrong_rate, [2, 3], MLP, UPDATE),
        (_wrong_rate, [3], GPT, UPDATE),
        (_rate_changes_after_a_step, [3], MLP, UPDATE),
        (_wrong_rate_on_the_last_rank, [3], MLP, REPLICAS),
        (_momentum_lost, [2], MLP, STATE),
        (_momentum_off_in_its_last_bit, [2, 3], MLP, STATE),
        (_momentum_lost, [2], MLP | {"precision": "bf16"}, STATE),
        (_state_forgotten, [3], GPT, STATE),
        (_same_data_on_all_ranks, [3], MLP, "replicas 0 and 1 have the same micro-batches"),
        (_one_sampler_for_all, [2, 3], MLP, "replicas 0 and 1 have the same micro-batches"),
        (_seed_of_data_without_replica, [2], MLP, "replicas 0 and 1 have the same micro-batches"),
        (_epochs_not_dealt_to_replicas, [2], DIGITS, "replicas 0 and 1 have the same micro-batches"),
        (_data_in_the_order_of_the_file, [2], DIGITS, "micro-batches of 2 of 2 ranks"),
        (_a_batch_left_out, [2], MLP, r"micro-batches of 1 of 2 ranks \(rank 1\)"),
        (_seeded_alike, [2], MLP, "replicas 0 and 1 have the same random state"),
        (_bias_correction_off_by_one, [2], GPT, UPDATE),
        (_decay_ignored, [2], GPT | {"optimizer": "adamw:lr=0.001:weight_decay=0.1"}, UPDATE),
        (_other_momentum_by_default, [2], MLP, f"{UPDATE}|{STATE}"),
        (_half_precision_ignored, [2], WIDE | {"strategy": "fsdp"}, PRECISION),
        (_half_precision_ignored, [1], GPT | {"precision": "fp16"}, PRECISION),
        (_half_precision_ignored, [2], WIDE | {"strategy": "local-sgd:2"}, PRECISION),
        (_half_precision_ignored, [2], WIDE | {"compression": "topk:0.1"}, PRECISION),
        (_half_precision_ignored, [1], NANO | {"strategy": "single"}, PRECISION),
        (_float8_ignored, [2], NANO | {"strategy": "fsdp"}, f"{PRECISION} or bf16"),
        (_float8_ignored, [2], NANO | {"strategy": "pipeline:zbv"}, f"{PRECISION} or bf16"),
        (_dropout_drawn_from_a_seed_of_the_trainers_own, [2], MLP, GRADIENT),
    ],
)
def test_wrong_training_is_caught_on_all_ranks(proofs, mutation, sizes, fields, detail) -> None:
    for size in sizes:
        results = proofs(size, fields, broken=mutation)
        assert [found["passed"] for found in results] == [False] * size
        assert results[0]["method"] == "serial-simulation"
        assert re.search(detail, results[0]["detail"]), results[0]["detail"]


@pytest.mark.parametrize(
    "fields", [MLP, MLP | {"workload": "py:proof_models:conditioned", "strategy": "fsdp"}]
)
def test_on_two_ranks_a_gradient_is_caught_that_is_off_in_its_last_bit(proofs, fields) -> None:
    found = proofs(2, fields, broken=_last_bit_off)[0]
    assert not found["passed"]
    size = re.search(f"{GRADIENT} by ([^ ]+) in an element, more than 0;?", found["detail"])
    assert size, found["detail"]
    assert 0 < float(size[1]) < 1e-6
