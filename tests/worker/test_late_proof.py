"""Defects after the first steps are found by counts of every timed step, and by steps checked after them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planting import (
    GPT,
    GRADIENT,
    MLP,
    NORMED,
    UPDATE,
    WIDE,
    Fields,
    Planted,
    after,
    gradients_times,
    wrapped,
)
from torch import Tensor

from harness.worker import run as run_module
from harness.worker.cell.sampler import Draws
from harness.worker.proof import proof, reference, simulation
from harness.worker.turns import Turns
from results.record import LATE_STEPS
from strategies.compression.base import Compressor
from strategies.gradient_exchange import GradientExchange
from strategies.local_sgd.model import LocalSgdModel
from strategies.trainer import Trainer
from strategies.training.parallel import GradientTask, ParallelModel

TOPK: Fields = WIDE | {"strategy": "scratch-ddp:bucket_mb=0.01", "compression": "topk:0.05"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (1, GPT | {"workload": "py:proof_models:gpt_of_samples", "dataset": "text", "accumulation": 2}),
        pytest.param(
            1,
            GPT | {"workload": "py:proof_models:last_token", "micro_batch": 3, "precision": "bf16"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1, GPT | {"workload": "py:proof_models:gpt_by_a_step", "dataset": "text"}, marks=pytest.mark.slow
        ),
        (1, GPT | {"workload": "py:proof_models:masked_gpt", "dataset": "own"}),
        (2, MLP | {"dataset": "digits", "clip_norm": 0.1}),
        pytest.param(3, NORMED | {"strategy": "scratch-ddp", "accumulation": 2}, marks=pytest.mark.slow),
        (2, NORMED | {"strategy": "local-sgd:4"}),
        (2, NORMED | {"strategy": "local-sgd:15:outer=nesterov"}),
        pytest.param(
            2, NORMED | {"strategy": "local-sgd:15", "compression": "topk:0.1"}, marks=pytest.mark.slow
        ),
        pytest.param(2, GPT | {"strategy": "zero1"}, marks=pytest.mark.slow),
        (2, GPT | {"strategy": "fsdp"}),
        (2, TOPK),
        (2, WIDE | {"compression": "int8"}),
        (2, MLP | {"precision": "fp16"}),
        pytest.param(2, GPT | {"strategy": "scratch-fsdp:stage=3"}, marks=pytest.mark.slow),
        pytest.param(2, WIDE | {"compression": "torch-powersgd:2"}, marks=pytest.mark.slow),
        pytest.param(
            4,
            GPT | {"strategy": "pipeline:1f1b:microbatches=2:dp=2", "micro_batch": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(4, GPT | {"strategy": "fsdp:tp=2"}, marks=pytest.mark.slow),
    ],
)
def test_steps_after_the_timed_ones_are_checked_in_every_run(whole_runs, size, fields) -> None:
    first = whole_runs(size, fields, proved_by=None if size == 1 else "before")[0]
    assert first["reason"] is None
    assert first["proof"].method == ("serial-simulation" if size == 1 else "earlier-run")
    assert first["proof"].late_steps >= 1
    assert first["proof"].late_first >= 13
    assert "after the timed blocks step" in first["proof"].detail
    left_out = len(first["steps"].loss) - first["work"].updates
    assert 0 <= left_out <= (1 if fields.get("precision") == "fp16" else 0)


def _from_step_8(change: Callable[[Trainer], object]) -> Planted:
    """Change what lies in the trainer after the gradients of each step from the ninth on are computed."""
    steps = count()
    return after(Trainer, "compute_gradients", lambda self: change(self) if next(steps) >= 8 else None)


def _gradients_doubled_after_step_8(rank: int, size: int) -> Planted:
    return _from_step_8(gradients_times(2))


def _rate_halved_after_step_8(rank: int, size: int) -> Planted:
    return _from_step_8(lambda trainer: trainer.optimizer.param_groups[0].update(lr=0.025))


def _half_of_the_batch_left_out_after_step_8(rank: int, size: int) -> Planted:
    batches = count()

    def wrong(original: Any, self: Draws) -> Any:
        inputs, targets = original(self)
        half = len(inputs) // (2 if next(batches) >= 8 else 1)
        return inputs[:half], targets[:half]

    return wrapped(Draws, "__next__", wrong)


def _half_of_a_batch_left_out_by_the_strategy(rank: int, size: int) -> Planted:
    """In every tenth step."""
    steps = count()

    def wrong(original: Any, self: ParallelModel, batches: Any, task: GradientTask) -> Tensor:
        if next(steps) % 10 == 9:
            whole = task.loss
            task = replace(task, loss=lambda y, t: whole(y[: len(y) // 2], t[: len(t) // 2]))
        return original(self, batches, task)

    return wrapped(ParallelModel, "compute_gradients", wrong)


def _same_data_for_all_after_step_8(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Draws) -> Any:
        batch = original(self)
        drawn = torch.Generator().manual_seed(self.drawn)
        for part in batch if self.drawn > 8 else ():
            part.copy_(torch.rand(part.shape, generator=drawn))
        return batch

    return wrapped(Draws, "__next__", wrong)


def _every_tenth_update(wrong: Callable[[Any, Trainer], object]) -> Planted:
    """Replace every tenth update by `wrong`, which is given the right one."""
    steps = count()
    return wrapped(
        Trainer,
        "update",
        lambda original, self: wrong(original, self) if next(steps) % 10 == 9 else original(self),
    )


def _update_left_out_in_every_tenth_step(rank: int, size: int) -> Planted:
    return _every_tenth_update(lambda original, trainer: trainer.optimizer.zero_grad())


def _update_twice_in_every_tenth_step(rank: int, size: int) -> Planted:
    return _every_tenth_update(lambda original, trainer: (trainer.optimizer.step(), original(trainer)))


def _timed_steps_seeded_alike(rank: int, size: int) -> Planted:
    """All replicas draw the same dropout in the timed steps."""
    return wrapped(run_module, "seed_step", lambda original, seed, step, replica: original(seed, step, 0))


@contextmanager
def _momentum_moved_after_step_8(rank: int, size: int) -> Iterator[None]:
    """It is halved after every update on all ranks; one late step is checked, which no step follows."""
    steps = count()

    def halve(trainer: Trainer) -> None:
        for state in trainer.optimizer.state.values() if next(steps) >= 8 else ():
            state["momentum_buffer"].mul_(0.5)

    with after(Trainer, "update", halve), patch.object(run_module, "LATE_SHARE", 0.0):
        yield


def _average_left_out_after_step_8(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: LocalSgdModel) -> None:
        """Exchange as often as before, and keep what this rank had."""
        late, own = self._steps >= 8, [parameter.detach().clone() for parameter in self.parameters()]
        original(self)
        for parameter, value in zip(self.parameters(), own, strict=True):
            if late:
                parameter.data.copy_(value)

    return wrapped(LocalSgdModel, "updated", wrong)


def _outer_momentum_dropped_after_step_8(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: LocalSgdModel) -> None:
        for _, momentum in self.named_outer_state() if self._steps >= 8 and self._alone else ():
            momentum.zero_()
        original(self)

    return wrapped(LocalSgdModel, "settle", wrong)


def _nothing_is_wrong(rank: int, size: int) -> Planted:
    return ExitStack()


FP16: Fields = {"micro_batch": 4, "optimizer": "sgd:lr=0.001", "precision": "fp16"}
AFTER = "in a step after the timed blocks, from step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "fields", "reason"),
    [
        (
            _gradients_doubled_after_step_8,
            MLP,
            f"{GRADIENT} by .*; {AFTER}",
        ),
        (_gradients_doubled_after_step_8, TOPK, f"with its residual differs .*{AFTER}"),
        (_rate_halved_after_step_8, MLP, f"{UPDATE} .*{AFTER}"),
        (_momentum_moved_after_step_8, MLP, f"optimizer state of .* in momentum_buffer.*{AFTER}"),
        (
            _half_of_the_batch_left_out_after_step_8,
            MLP,
            "rank 0 used 20 samples in 10 measured steps, and its replica's batches hold 40",
        ),
        (_half_of_a_batch_left_out_by_the_strategy, MLP, "rank 0 used 38 samples in 10 measured steps"),
        (_same_data_for_all_after_step_8, MLP, f"replicas 0 and 1 have the same micro-batches.*{AFTER}"),
        (_update_left_out_in_every_tenth_step, MLP, "rank 0 made 9 updates in 10 measured steps"),
        (_update_twice_in_every_tenth_step, MLP, "rank 0 made 11 updates in 10 measured steps"),
        (_timed_steps_seeded_alike, MLP, "replicas 0 and 1 have the same random state"),
        (
            _average_left_out_after_step_8,
            NORMED | {"strategy": "local-sgd:4"},
            f"(average of .* differs|replicas differ after the update).*{AFTER}",
        ),
        (
            _outer_momentum_dropped_after_step_8,
            NORMED | {"strategy": "local-sgd:4:outer=nesterov"},
            f"outer (step|momentum) of .* differs.*{AFTER}",
        ),
        (
            _nothing_is_wrong,
            FP16 | {"workload": "py:proof_models:deafening_for_ever"},
            "none of 10 measured steps made an update",
        ),
    ],
)
def test_what_goes_wrong_later_ends_the_run_on_all_ranks(whole_runs, mutation, fields, reason) -> None:
    """Also in a run that leans on the proof of an earlier one."""
    records = whole_runs(2, fields, broken=mutation, proved_by="before")
    for record in records:
        assert record["outcome"] == "proof_failed"
        assert record["reason"] == record["proof"].detail
        assert not record["proof"].passed
    assert re.search(reason, records[0]["proof"].detail), records[0]["proof"].detail


def _feedback_dropped(period: int) -> Planted:
    exchange, compensate = GradientExchange.sum_shares, Compressor.compensate
    exchanges = count()

    def number(self: GradientExchange, bucket: Any) -> None:
        # One bucket a step is enough.
        getattr(self.compressor, "inner", self.compressor).dropped = (
            bucket.index == 0 and next(exchanges) % period == 5
        )
        exchange(self, bucket)

    def wrong(self: Any, bucket: Any, residual: Tensor) -> None:
        if not self.dropped:
            compensate(self, bucket, residual)

    stack = ExitStack()
    stack.enter_context(patch.object(GradientExchange, "sum_shares", number))
    stack.enter_context(patch.object(Compressor, "compensate", wrong))
    return stack


@contextmanager
def _feedback_dropped_in_every_tenth_step(rank: int, size: int) -> Iterator[None]:
    """A check of ten steps."""
    with _feedback_dropped(10), patch.object(run_module, "LATE_SHARE", 1e6):
        yield


def _one_step_at(place: int) -> Iterator[None]:
    with (
        _feedback_dropped(10),
        patch.object(run_module, "LATE_SHARE", 0.0),
        patch.object(proof.secrets, "randbelow", lambda places: place),
    ):
        yield


@contextmanager
def _one_step_at_the_place(rank: int, size: int) -> Iterator[None]:
    """39 steps are proven, timed and recorded before; the defect is in the steps 5, 15, ..., 45."""
    yield from _one_step_at(6)


@contextmanager
def _one_step_before_the_place(rank: int, size: int) -> Iterator[None]:
    yield from _one_step_at(5)


@pytest.mark.slow
def test_a_defect_of_every_tenth_step_is_met_by_ten_steps_and_by_one_with_probability_a_tenth(
    whole_runs,
) -> None:
    for broken, caught in (
        (_feedback_dropped_in_every_tenth_step, True),
        (_one_step_at_the_place, True),
        (_one_step_before_the_place, False),
    ):
        record = whole_runs(2, TOPK, broken=broken, proved_by="before")[0]
        assert (record["reason"] is not None) == caught, record["proof"].detail
        if caught:
            assert "with its residual differs" in record["proof"].detail
        else:
            assert record["proof"].late_steps == 1


def _other_time_on_each_rank(rank: int, size: int) -> Planted:
    """Rank 0 has time for all steps, the others for one."""
    return patch.object(run_module, "LATE_SHARE", 0.0 if rank else 1e6)


@pytest.mark.parametrize(("strategy", "steps"), [("ddp", LATE_STEPS), ("local-sgd:4", 8)])
def test_ranks_that_timed_their_steps_otherwise_check_as_many_late_steps(whole_runs, strategy, steps) -> None:
    """The steps of whole periods are checked, because replicas differ within a period."""
    fields = MLP | {"strategy": strategy}
    for record in whole_runs(2, fields, broken=_other_time_on_each_rank, proved_by="before"):
        assert record["reason"] is None
        assert (record["outcome"], record["proof"].late_steps) == ("ok", steps)


def _simulated_in(seconds: float) -> Planted:
    """Set the time of a simulation by its clock."""
    clock = count(step=seconds)
    return patch.object(reference, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def _simulated_in_1200_ms(rank: int, size: int) -> Planted:
    """A twentieth of the timed steps is far less."""
    return _simulated_in(1.2)


def _simulated_in_100_s(rank: int, size: int) -> Planted:
    return _simulated_in(100)


def test_one_step_may_take_up_to_a_minute_and_a_record_says_that_none_was_checked(whole_runs) -> None:
    slow = whole_runs(1, MLP, broken=_simulated_in_1200_ms, proved_by="before")[0]
    assert slow["proof"].late_steps >= 1
    too_slow = whole_runs(2, MLP, broken=_simulated_in_100_s)[0]
    assert (too_slow["outcome"], too_slow["proof"].method) == ("ok", "sampled-gradients")
    assert too_slow["proof"].late_steps == 1
    why = "a serial simulation of a step would take about 100 s"
    assert re.search(rf"; after the timed blocks step \d+, sampled: {why}$", too_slow["proof"].detail)
    alone = whole_runs(1, MLP, broken=_simulated_in_100_s)[0]["proof"]
    assert (alone.method, alone.late_steps) == ("replica-agreement", 0)
    assert alone.detail.endswith(f"; no step after the timed blocks: {why}")


def _little_memory_on_the_last_rank(rank: int, size: int) -> Planted:
    left = 2.0**30 if rank < size - 1 else 2.0**15
    return patch.object(simulation, "available_bytes", lambda: left)


@pytest.mark.parametrize(
    ("fields", "steps", "words"),
    [
        (MLP, 1, r"after the timed blocks step \d+, sampled: "),
        (TOPK, 0, "no step after the timed blocks: "),
    ],
)
def test_a_measured_run_is_kept_where_a_late_step_does_not_fit_in_memory(
    whole_runs, fields, steps, words
) -> None:
    """All ranks leave the simulation out, and not only the one whose host has little memory left."""
    for record in whole_runs(2, fields, broken=_little_memory_on_the_last_rank, proved_by="before"):
        assert (record["outcome"], record["proof"].late_steps) == ("ok", steps)
        told = rf"{words}to recompute a step takes .*\(ranks on the host: 2\)"
        assert re.search(told, record["proof"].detail)


@contextmanager
def _little_memory_and_gradients_doubled_after_step_8(rank: int, size: int) -> Iterator[None]:
    with _little_memory_on_the_last_rank(rank, size), _gradients_doubled_after_step_8(rank, size):
        yield


def test_a_sampled_step_after_the_timed_ones_finds_what_went_wrong_in_them(whole_runs) -> None:
    record = whole_runs(2, MLP, broken=_little_memory_and_gradients_doubled_after_step_8, proved_by="before")[
        0
    ]
    assert "is not the mean of the replicas'" in record["reason"]
    assert "in a step after the timed blocks" in record["reason"]
    assert record["proof"].method == "sampled-gradients"


class _OneBlock(Turns):
    """Turns of a driver that wants a later pair, of one block."""

    def __init__(self) -> None:
        self.only_timed = True

    def wait(self, at: str, **told: object) -> int:
        assert at != "begin" or told["only_timed"]
        return 5 if at == "measure" else 0

    def close(self) -> None:
        """Do nothing: it has no socket."""


def _only_timed(rank: int, size: int) -> Planted:
    return patch.object(Turns, "of_driver", lambda beat: _OneBlock())


def test_a_later_pair_says_that_no_late_step_was_checked(whole_runs) -> None:
    for record in whole_runs(2, MLP, broken=_only_timed, proved_by="before"):
        assert (record["outcome"], record["proof"].late_steps) == ("ok", 0)
        assert record["proof"].detail.endswith(
            "no step after the timed blocks: a later pair of a paired comparison: only its blocks are timed"
        )


def _once_after_step_8(change: Callable[[Trainer], object]) -> Planted:
    """After the update of step 10, on all ranks alike."""
    steps = count()
    return after(Trainer, "update", lambda self: change(self) if next(steps) == 10 else None)


def _momentum_lost_once(rank: int, size: int) -> Planted:
    return _once_after_step_8(lambda trainer: trainer.optimizer.state.clear())


@torch.no_grad()
def _double_parameters(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.mul_(2)


def _parameters_doubled_once_on_all_ranks(rank: int, size: int) -> Planted:
    return _once_after_step_8(_double_parameters)


def _feedback_dropped_once(rank: int, size: int) -> Planted:
    """In step 5."""
    return _feedback_dropped(10**6)


@pytest.mark.parametrize(
    ("mutation", "fields"),
    [
        (_momentum_lost_once, MLP),
        (_parameters_doubled_once_on_all_ranks, MLP),
        (_feedback_dropped_once, TOPK),
    ],
)
def test_what_happens_once_in_a_timed_step_and_leaves_a_right_state_escapes(
    whole_runs, mutation, fields
) -> None:
    assert whole_runs(2, fields, broken=mutation, proved_by="before")[0]["reason"] is None
