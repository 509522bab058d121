"""A run ends if its timed steps send what nobody counts, nothing, or other messages than are stated."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planting import GPT, Fields, Planted, wrapped
from torch.distributed import _functional_collectives as functional

from harness.worker.exchange.group import open_exchange
from harness.worker.measure.clock import StepClock
from harness.worker.measure.uncounted import UncountedTraffic
from results.outcome import Outcome
from strategies.catalog import STRATEGIES
from strategies.compression.base import Compressor
from strategies.gradient_exchange import GradientExchange

MLP: Fields = GPT | {"workload": "mlp", "micro_batch": 4, "optimizer": "sgd:lr=0.05", "strategy": "plain"}
BYTES = 4 * (784 * 512 + 512 + 512 * 256 + 256 + 256 * 10 + 10)
"""The gradients of this model in fp32."""


@contextmanager
def _right(rank: int, size: int) -> Iterator[None]:
    if "plain" not in STRATEGIES:
        sys.path.append(str(Path(__file__).parent))
        from paired import Plain

        STRATEGIES.register(Plain)
    yield


def _sums(wrong: Callable[..., object]) -> Planted:
    """Replace the sum of a bucket by `wrong`, which is given the right one and its arguments."""
    with _right(0, 1):
        from paired import PlainModel

    return wrapped(PlainModel, "sum", wrong)


def _over(group: Callable[[], Any]) -> Planted:
    made: list[Any] = []

    def wrong(right: Any, model: Any, values: Any, task: Any) -> None:
        made[:] = made or [group()]
        dist.all_reduce(values, group=made[0])

    return _sums(wrong)


def _over_a_new_group(rank: int, size: int) -> Planted:
    return _over(dist.new_group)


def _over_the_default_group(rank: int, size: int) -> Planted:
    return _over(lambda: None)


def _in_messages(rank: int, size: int) -> Planted:
    made: list[Any] = []

    def wrong(right: Any, model: Any, values: Any, task: Any) -> None:
        made[:] = made or [dist.new_group()]
        theirs = values.clone()
        sent = dist.isend(values.clone(), 1 - rank, group=made[0])
        dist.recv(theirs, 1 - rank, group=made[0])
        sent.wait()
        values += theirs

    return _sums(wrong)


def _by_a_call_of_c(rank: int, size: int) -> Planted:
    """A functional collective calls the group in C++, as the reducer of DDP does."""
    made: list[Any] = []

    def wrong(right: Any, model: Any, values: Any, task: Any) -> None:
        made[:] = made or [dist.new_group()]
        values.copy_(functional.all_reduce(values, "sum", made[0]))

    return _sums(wrong)


def _not_in_timed_steps(rank: int, size: int) -> Planted:
    def wrong(right: Any, model: Any, values: Any, task: Any) -> None:
        if not isinstance(task.observer, StepClock):
            right(model, values, task)

    return _sums(wrong)


def _not_in_some_timed_steps(rank: int, size: int) -> Planted:
    """The twentieth step and every tenth one before it: one of five in one of two timed blocks."""
    steps = count()

    def wrong(right: Any, model: Any, values: Any, task: Any) -> None:
        if next(steps) % 10 != 9:
            right(model, values, task)

    return _sums(wrong)


def _twice(rank: int, size: int) -> Planted:
    def wrong(right: Any, model: Any, values: Any, task: Any) -> None:
        right(model, values.clone(), task)
        right(model, values, task)

    return _sums(wrong)


def _a_dense_sum_of_the_compressor(rank: int, size: int) -> Planted:
    made: list[Any] = []

    def wrong(right: Any, self: Compressor, bucket: Any) -> None:
        made[:] = made or [dist.new_group()]
        dist.all_reduce(bucket.values.clone(), group=made[0])
        right(self, bucket)

    return wrapped(GradientExchange, "sum_shares", wrong)


TOPK: Fields = MLP | {"strategy": "scratch-ddp", "compression": "topk:0.1"}
SENT = rf"plain sent 1 operations of {BYTES:,} bytes each a step over "


@pytest.mark.parametrize(
    ("broken", "fields", "reason"),
    [
        (_over_a_new_group, MLP, SENT + r"process group \d+ \(ranks 0-1\), .*`setting.exchange.group`"),
        (
            _over_the_default_group,
            MLP,
            r"sent 1 operations a step over the default process group \(ranks 0-1\)",
        ),
        (_by_a_call_of_c, MLP, SENT + r"process group \d+ \(ranks 0-1\)"),
        (_in_messages, MLP, r"plain sent 2 operations a step over process group \d+ \(ranks 0-1\)"),
        (_a_dense_sum_of_the_compressor, TOPK, rf"ddp sent 1 operations of {BYTES:,} bytes each a step over"),
        (
            _not_in_timed_steps,
            MLP,
            "plain promises to average gradients over replicas, .* no rank sent a byte",
        ),
        (
            _not_in_some_timed_steps,
            MLP,
            rf"sends {BYTES:,} bytes in 1 .* in one block {round(BYTES * 4 / 5):,} bytes",
        ),
        (_twice, MLP, rf"by its `terms` plain sends {BYTES:,} bytes in 1 .* {2 * BYTES:,} bytes in 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_timed_steps_are_held_to_what_the_strategy_states(whole_runs, broken, fields, reason) -> None:
    for record in whole_runs(2, fields, broken=broken, proved_by="before"):
        assert record["outcome"] is Outcome.PROOF_FAILED
        assert re.search(reason, record["reason"]), record["reason"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (MLP, None),
        (TOPK, "what topk:0.1 sends depends on the gradients"),
        (MLP | {"workload": "py:proof_models:wide"}, "py:proof_models:wide has no known parts"),
    ],
)
def test_what_is_sent_as_stated_passes_and_what_no_closed_form_says_is_named(
    whole_runs, fields, words
) -> None:
    record = whole_runs(2, fields, broken=_right)[0]
    assert (record["outcome"], record["proof"].passed) == (Outcome.OK, True), record["reason"]
    said = record["proof"].detail.partition("bytes were not compared with a closed form: ")[2]
    assert said.partition(";")[0] == (words or "")


def found_in(rank: int, kind: str) -> str | None:
    """On a rank: what is found in right blocks with something unusual."""
    if kind == "unnumbered":
        import_module("torch.testing._internal.distributed.fake_pg")
        dist.new_group(backend="fake")
    exchange, late = open_exchange(), dist.new_group()
    if kind == "watched":
        # torch then compares the arguments of collectives, over groups without a name.
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    part = exchange.split_into([[0, 1]])
    dist.set_debug_level_from_env()
    uncounted = UncountedTraffic(exchange, period=1)
    operations = {"once": [0, 1], "often, in one block": [0, 6], "once in the only block": [1]}
    for others in operations.get(kind, [0, 0]):
        with uncounted.counting(steps=2):
            for _ in range(2):
                part.allreduce([torch.ones(4)]).wait()
            for _ in range(others):
                dist.barrier(late)
    return uncounted.found("mine")


@pytest.mark.parametrize(
    "kind", ["unnumbered", "watched", "once", "often, in one block", "once in the only block"]
)
def test_right_blocks_are_never_found(ranks, kind) -> None:
    assert ranks(2, found_in, kind) == [None, None]


def _no_count(rank: int, size: int) -> Planted:
    return wrapped(UncountedTraffic, "counting", lambda right, self, steps: 1 / 0)


def test_one_rank_counts_nothing(whole_runs) -> None:
    [record] = whole_runs(1, MLP | {"strategy": "single"}, broken=_no_count)
    assert (record["outcome"], record["reason"]) == (Outcome.OK, None)
