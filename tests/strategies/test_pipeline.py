"""Pipelines over real ranks, against a serial loop over replicas and microbatches, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pipelines
import pytest
import serial_pipelines
import torch

from strategies.pipeline.model import _own_errors
from workloads.gpt.model import token_loss

Ranks = Callable[..., list[Any]]
FIRST = ["tied, clipped, accumulated", "BatchNorm, checkpointed", "one parameter a block"]
SECOND = ["tied, checkpointed, AdamW", "BatchNorm, accumulated", "frozen, clipped"]
SCHEDULES = [
    (2, "gpipe", [*SECOND, "found, accumulated"]),
    (2, "1f1b", [*FIRST, *SECOND]),
    (2, "interleaved", [*FIRST, *SECOND]),
    (4, "1f1b", FIRST),
    (4, "1f1b:dp=2", SECOND),
]
MORE_SCHEDULES = [
    *((3, schedule) for schedule in ("gpipe", "1f1b", "interleaved")),
    *((4, schedule) for schedule in ("gpipe", "interleaved", "gpipe:dp=2", "interleaved:dp=2")),
]
MICROBATCHES = {2: 4, 3: 6, 4: 4}


@pytest.mark.parametrize(
    ("size", "schedule", "cases"),
    [
        *SCHEDULES,
        *(pytest.param(*case, [*FIRST, *SECOND], marks=pytest.mark.slow) for case in MORE_SCHEDULES),
    ],
)
def test_every_schedule_trains_as_the_model_does_in_one_piece(
    ranks: Ranks,
    size: int,
    schedule: str,
    cases: list[str],
) -> None:
    strategy = f"pipeline:{schedule}:microbatches={MICROBATCHES[size]}"
    results = ranks(size, pipelines.train, strategy, cases)
    for case in cases:
        serial_pipelines.assert_as_serial(results, case, strategy)


def test_sums_in_another_order_train_alike(ranks: Ranks, other_rounding: ModuleType) -> None:
    strategy = "pipeline:1f1b:dp=2:microbatches=4"
    results = ranks(4, other_rounding.otherwise, pipelines.__file__, "train", strategy, SECOND)
    for case in SECOND:
        serial_pipelines.assert_as_serial(results, case, strategy)


def test_a_gradient_that_is_left_out_is_seen_unless_it_is_rounding_alone() -> None:
    strategy = "pipeline:1f1b:microbatches=4"
    gradients = serial_pipelines.Serial("BatchNorm, accumulated", strategy, 2).step(0)["gradients"]
    left_out = {name: gradients | {name: torch.zeros_like(value)} for name, value in gradients.items()}
    unseen = [name for name, ours in left_out.items() if not serial_pipelines.apart(ours, gradients)]
    # A BatchNorm takes the mean away, and with it what a bias adds that only a linear layer parts from it.
    biases = ["first.0.bias", "first.1.bias", *(f"body.{block}.0.bias" for block in range(8))]
    assert unseen == biases


def test_a_gpt_trains_as_it_does_in_one_piece(ranks: Ranks) -> None:
    serial_pipelines.assert_as_serial(
        ranks(2, pipelines.train, "pipeline:1f1b", ["GPT"]), "GPT", "pipeline:1f1b"
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_has_the_parameters_of_its_stages_and_the_ends_a_copy_of_what_they_share(
    ranks: Ranks, size: int
) -> None:
    strategy = f"pipeline:interleaved:microbatches={MICROBATCHES[size]}"
    results = ranks(size, pipelines.train, strategy, ["tied, checkpointed, AdamW", "one parameter a block"])
    for case, shared in (("tied, checkpointed, AdamW", ["wte.weight"]), ("one parameter a block", [])):
        own = [name for result in results for name in result[case][-1]["own"]]
        whole = [name for name, _ in pipelines.build(pipelines.CASES[case][0]).named_parameters()]
        assert sorted(own) == sorted([*whole, *shared])
        assert all(len(result[case][-1]["own"]) < len(whole) for result in results)


def test_bf16_and_fp16_train_as_the_model_does_in_one_piece(ranks: Ranks) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = ranks(2, pipelines.precise_step, precision)
        module = pipelines.build("tied")
        for at in range(4):
            inputs, targets = (part.chunk(4)[at] for part in pipelines.batch("tied", 0, 0, 0))
            with torch.autocast("cpu", dtype=dtype):
                loss = token_loss(module(inputs), targets) / 4
            (loss * found[0]["scale"]).backward()
        for result in found:
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                difference = (result["gradients"][name] - parameter.grad).norm()
                # A tied table is rounded once more or less.
                assert difference <= 1e-3 * parameter.grad.norm(), name


def test_micro_batches_may_be_of_another_size_than_the_one_before(ranks: Ranks) -> None:
    expected = serial_pipelines.Serial("BatchNorm, checkpointed", "pipeline:1f1b", 2).step(0)["gradients"]
    for gradients in ranks(2, pipelines.resized):
        serial_pipelines.assert_near(gradients, expected)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_overflow_in_one_stage_is_one_of_all(ranks: Ranks, where: int) -> None:
    # The scaler begins with 2^16, and halves it where a step is left out.
    assert ranks(3, pipelines.overflowing_step, where) == [[(2.0**15, False), (2.0**15, True)]] * 3


@pytest.mark.parametrize("strategy", ["pipeline:gpipe", "pipeline:1f1b", "pipeline:interleaved:dp=2"])
def test_steps_without_the_exchange_end_and_can_be_undone(ranks: Ranks, strategy: str) -> None:
    for losses, differing in ranks(4 if "dp" in strategy else 2, pipelines.with_off_steps, strategy):
        assert all(torch.tensor(losses).isfinite())
        assert differing == []


def test_a_model_is_freed_when_nobody_has_it(ranks: Ranks) -> None:
    assert ranks(2, pipelines.forgotten) == [(True, True)] * 2


def test_a_micro_batch_that_does_not_divide_is_refused(ranks: Ranks) -> None:
    told = "UsageError: the micro-batch (10 samples) must be a multiple of microbatches (4)"
    assert ranks(2, pipelines.complaint, 10, 4) == [told] * 2


def test_what_a_stage_raises_is_raised(ranks: Ranks) -> None:
    assert ranks(2, pipelines.raising) == ["OutOfMemoryError: no memory for (3, 8)"] * 2
    with pytest.raises(RuntimeError, match="another"), _own_errors():
        raise RuntimeError("another")
