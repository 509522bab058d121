"""Defects that projections of the gradients find, where no step is simulated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
from planting import GPT, Planted, after, gradients_times, no_time, wrapped
from planting import MLP as DDP
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup
from harness.worker.proof import sampled
from harness.worker.proof.sampled import Sampling
from strategies.trainer import Trainer

SCRATCH = DDP | {"strategy": "scratch-ddp:bucket_mb=0.1"}
FSDP = GPT | {"strategy": "fsdp"}
SCRATCH_FSDP = GPT | {"strategy": "scratch-fsdp"}


def _sampling(*planted: Planted) -> Planted:
    """Plant defects where no step is simulated."""
    stack = ExitStack()
    for each in (no_time(0, 0), *planted):
        stack.enter_context(each)
    return stack


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        DDP | {"accumulation": 3, "clip_norm": 0.1},
        DDP | {"precision": "fp16"},
        SCRATCH,
        GPT | {"strategy": "zero1"},
        FSDP | {"accumulation": 2},
        FSDP | {"precision": "bf16", "activation_checkpointing": True},
        SCRATCH_FSDP | {"accumulation": 2},
        FSDP | {"strategy": "fsdp:params=bf16", "precision": "bf16"},
        SCRATCH_FSDP | {"strategy": "scratch-fsdp:params=bf16", "precision": "bf16"},
        FSDP | {"workload": "py:proof_models:spoken", "micro_batch": 4},
    ],
)
def test_what_is_right_passes(proofs, fields) -> None:
    for found in proofs(2, fields, broken=no_time):
        assert (found["passed"], found["method"]) == (True, "sampled-gradients"), found["detail"]
        assert "2 steps of 2 replicas: 4 projections" in found["detail"]


def _nothing_is_watched(rank: int, size: int) -> Planted:
    return _sampling(patch.object(Sampling, "watching", lambda self: nullcontext()))


def test_what_was_not_watched_is_not_called_sampled(proofs) -> None:
    found = proofs(2, DDP, broken=_nothing_is_watched)[0]
    assert (found["passed"], found["method"]) == (True, "replica-agreement"), found["detail"]


def _another_generator_on_the_last_rank(rank: int, size: int) -> Planted:
    """Draw as a GPU with more processors does, which gives other elements of the same numbers."""
    return _sampling(wrapped(sampled, "_normal", lambda original, *drawn: original(*drawn).roll(rank)))


def test_ranks_that_draw_other_vectors_from_one_seed_compare_none(proofs) -> None:
    found = proofs(2, DDP, broken=_another_generator_on_the_last_rank)[0]
    assert (found["passed"], found["method"]) == (True, "replica-agreement"), found["detail"]


def _beats_are_counted(rank: int, size: int) -> Planted:
    beats = count()

    def compared(original: Any, self: Any) -> Any:
        before = next(beats)
        found = original(self)
        # Of each parameter at least.
        assert next(beats) - before - 1 >= len(list(self._model.bare.parameters()))
        return found

    def listening(original: Any, self: Any, *arguments: Any, beat: Any, **named: Any) -> None:
        original(self, *arguments, beat=lambda: (next(beats), beat()), **named)

    return _sampling(wrapped(Sampling, "compare", compared), wrapped(Sampling, "__init__", listening))


def test_a_step_that_is_sampled_says_that_it_goes_on(proofs) -> None:
    assert proofs(2, DDP, broken=_beats_are_counted)[0]["method"] == "sampled-gradients"


def _changed(change: Callable[[str, Tensor], object]) -> Planted:
    """`change` may write to the gradients that a rank hands to a sum, by its name, before they are moved."""

    def wrong(original: Any, self: Any, name: str, sent: list[Tensor], *others: Any) -> Any:
        if name in _SUMS and sent[0].is_floating_point():
            change(name, sent[0])
        return original(self, name, sent, *others)

    return _sampling(wrapped(ExchangeGroup, "_run", wrong))


_SUMS = ("allreduce", "_reduce_scatter_base", "alltoall_base")


def _a_wrong_divisor(rank: int, size: int) -> Planted:
    return _sampling(after(Trainer, "compute_gradients", gradients_times(size / (size + 1))))


def _a_rank_left_out_of_the_sums(rank: int, size: int) -> Planted:
    return _changed(lambda _, values: values.zero_() if rank == size - 1 else None)


def _a_bucket_skipped(rank: int, size: int) -> Planted:
    """Every third sum gives nothing, on all ranks alike."""
    sums = count()
    return _changed(lambda _, values: values.zero_() if next(sums) % 3 == 1 else None)


def _a_stale_buffer(rank: int, size: int) -> Planted:
    """A rank sends what it sent the last time."""
    sent: dict[int, Tensor] = {}

    def stale(_: str, values: Tensor) -> None:
        now, before = values.clone(), sent.get(values.numel())
        sent[values.numel()] = now
        if before is not None and rank == 0:
            values.copy_(before)

    return _changed(stale)


def _a_shard_at_the_wrong_place(rank: int, size: int) -> Planted:
    """Each rank gets the sum of another one's shard."""

    def rolled(name: str, values: Tensor) -> None:
        if name != "allreduce":
            values.copy_(values.view(size, -1).roll(1, dims=0).view(values.shape))

    return _changed(rolled)


def _half_a_millionth_too_much(rank: int, size: int) -> Planted:
    """Scale every element by more than its rounding, and less than a projection shows."""
    return _changed(lambda _, values: values.mul_(1 + 5e-7))


@pytest.mark.parametrize(
    ("mutation", "fields"),
    [
        (_a_wrong_divisor, DDP),
        (_a_wrong_divisor, SCRATCH_FSDP),
        (_a_rank_left_out_of_the_sums, SCRATCH),
        (_a_rank_left_out_of_the_sums, FSDP),
        (_a_bucket_skipped, SCRATCH),
        (_a_stale_buffer, DDP | {"strategy": "ddp:bucket_mb=0.1"}),
        (_a_stale_buffer, SCRATCH_FSDP),
        (_a_shard_at_the_wrong_place, FSDP),
        (_a_shard_at_the_wrong_place, SCRATCH_FSDP),
        (_half_a_millionth_too_much, SCRATCH),
    ],
)
def test_a_planted_defect_is_found(proofs, mutation, fields) -> None:
    found = proofs(2, fields, broken=mutation)[0]
    assert (found["passed"], found["method"]) == (False, "sampled-gradients"), found["detail"]
    assert "is not the mean of the replicas'" in found["detail"]
