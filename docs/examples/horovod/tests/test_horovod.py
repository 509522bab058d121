"""Horovod's optimizer over real ranks: trained as by a serial loop, proven, and resumed.

They run where Horovod and this package are: `.venv-horovod/bin/python -m pytest docs/examples/horovod/tests`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import data_parallel as replicas
import pytest
import resuming
import torch
from bench_horovod import model as seam
from bench_horovod.facts import Horovod
from packages import module_at
from planting import GPT, GRADIENT, REPLICAS, UPDATE, Fields, Planted, wrapped

from results.cell import StepPolicy
from strategies.catalog import STRATEGIES
from strategies.trainer import Trainer

missing = Horovod.engine.missing if Horovod.engine.python is None else "Horovod is in another interpreter"
if Horovod.name not in STRATEGIES.offered:
    missing = "the package bench-horovod is not installed"
POLICY = StepPolicy(block_steps=2, warmup_max_steps=2, min_blocks=2, max_blocks=2, quads=2)
pytestmark = [
    pytest.mark.skipif(missing is not None, reason=str(missing)),
    pytest.mark.xdist_group("horovod"),
]
WORKER = Path(__file__).parents[4] / "tests" / "worker"
worker = module_at(WORKER / "conftest.py")
SGD, ADAMW = "sgd:lr=0.1:momentum=0.9", "adamw:lr=0.01:weight_decay=0.1"


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        *((model, {}) for model in ("normed", "dropped", "shared", "tied", "mixed", "frozen")),
        ("deep", {"optimizer": ADAMW, "accumulation": 3, "clip_norm": 0.01}),
        ("deep", {"strategy": "horovod:fusion_mb=0.0001:cycle_ms=0.1"}),
    ],
)
def test_two_ranks_train_as_a_serial_loop_does_bit_for_bit(ranks, model, settings) -> None:
    settings = {"strategy": "horovod", "optimizer": SGD, **settings}
    results = ranks(2, replicas.train, model, settings, fresh=":" in settings["strategy"])
    replicas.assert_as_serial(results, model, settings)


def test_three_ranks_train_as_a_loop_does_within_rounding(ranks) -> None:
    settings = {"strategy": "horovod", "optimizer": SGD}
    replicas.assert_near_serial(ranks(3, replicas.train, "normed", settings), "normed", settings)


SAME_BITS = "gradients, buffers and updates are equal bit for bit"
ROUNDED = "gradients agree within the rounding of a sum in another order; updates are equal bit for bit"


@pytest.mark.parametrize(
    ("size", "strategy", "fields", "rule"),
    [
        (2, "horovod", {"accumulation": 2, "clip_norm": 0.1}, SAME_BITS),
        (3, "horovod", {}, ROUNDED),
        (2, "horovod", {"activation_checkpointing": True}, SAME_BITS),
        (2, "horovod", {"precision": "bf16"}, "gradients agree within 0.03 of their L2 norm"),
        (2, "horovod:compression=fp16", {}, "gradients agree within 0.01 of their L2 norm"),
    ],
)
def test_a_cell_is_proven_as_far_as_arithmetic_allows(proofs, size, strategy, fields, rule) -> None:
    results = proofs(size, GPT | {"strategy": strategy} | fields)
    assert {(found["passed"], found["method"]) for found in results} == {(True, "serial-simulation")}, results
    assert results[0]["detail"] == f"3 steps of {size} replicas recomputed on one device; {rule}"


def _summed_and_not_averaged(rank: int, size: int) -> Planted:
    import horovod.torch

    return patch.object(horovod.torch, "Average", horovod.torch.Sum)


def _group_of_this_rank_alone(rank: int, size: int) -> Planted:
    import horovod.torch

    alone = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}

    def wrong(original: Callable[[], None]) -> None:
        with patch.dict(os.environ, alone):
            original()

    return wrapped(horovod.torch, "init", wrong)


def _scaled_by_the_accumulation_twice(rank: int, size: int) -> Planted:
    @contextmanager
    def wrong(original: Any, self: seam.HorovodModel) -> Iterator[None]:
        with original(self):
            yield
        for value in self.parameters():
            value.grad.div_(self.settings.accumulation)

    return wrapped(seam.HorovodModel, "_exchanging", wrong)


def _gradients_of_the_step_before(rank: int, size: int) -> Planted:
    """The update takes them, after the right ones were shown."""
    kept: list[Any] = []

    def wrong(original: Any, self: Trainer) -> Any:
        parameters = list(self.model.parameters())
        kept.append([value.grad.clone() for value in parameters])
        for value, before in zip(parameters, kept[max(0, len(kept) - 2)], strict=True):
            value.grad.copy_(before)
        return original(self)

    return wrapped(Trainer, "update", wrong)


@pytest.mark.parametrize(
    ("mutation", "fields", "detail"),
    [
        (_summed_and_not_averaged, {}, GRADIENT),
        (_summed_and_not_averaged, {"strategy": "horovod:compression=fp16"}, "gradient"),
        (_scaled_by_the_accumulation_twice, {"accumulation": 2}, GRADIENT),
        (_gradients_of_the_step_before, {}, UPDATE),
    ],
)
def test_an_engine_that_trains_wrongly_is_caught_on_all_ranks(proofs, mutation, fields, detail) -> None:
    results = proofs(2, GPT | {"strategy": "horovod"} | fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results[0]["detail"]
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]


def proved_alone(rank: int, folder: str) -> Fields:
    """On a rank: the proof of a cell whose Horovod connects no ranks."""
    place = (__file__, _group_of_this_rank_alone.__name__)
    found: Fields = worker.prove(rank, folder, GPT | {"strategy": "horovod"}, place)
    return found


def test_a_group_of_one_rank_is_caught(ranks) -> None:
    # A process connects its ranks once.
    for found in ranks(2, proved_alone, str(WORKER), fresh=True):
        assert not found["passed"]
        assert re.search(f"{GRADIENT}|{REPLICAS}", found["detail"]), found["detail"]


@pytest.mark.parametrize("strategy", ["horovod", "horovod:compression=fp16"])
def test_a_whole_run_records_computed_bytes_and_why_no_exposure(whole_runs, strategy) -> None:
    """The run also compares the bytes with the closed form (`conformance.py`)."""
    fields = {"workload": "gpt-nano", "micro_batch": 1, "optimizer": "adamw:lr=0.001", "steps": POLICY}
    for record in whole_runs(2, fields | {"strategy": strategy}):
        assert (record["outcome"], record["reason"]) == ("ok", None)
        assert record["proof"] is None or record["proof"].passed
        width = 2 if "fp16" in strategy else 4
        assert record["work"].exchange_payload_bytes == width * record["work"].parameters
        assert (record["quads"], record["recorded"]) == (None, None)
        assert "separate connections" in record["absent"]["quads"]


def test_a_resumed_run_goes_on_bit_for_bit(ranks, tmp_path) -> None:
    cases = [("horovod", {}), ("horovod", {"accumulation": 2, "optimizer": ADAMW, "clip_norm": 0.1})]
    assert ranks(2, resuming.broken, cases, tmp_path) == [[], []]


def refused(rank: int, model: str, dtype: str) -> str:
    def built(original: Callable[[str], Any], name: str) -> Any:
        return original(name).to(getattr(torch, dtype))

    with wrapped(replicas, "build", built), pytest.raises(seam.UsageError) as raised:
        replicas.train(rank, model, {"strategy": "horovod", "optimizer": SGD})
    return str(raised.value)


@pytest.mark.parametrize(
    ("model", "dtype", "word"), [("embedded", "float32", "sparse"), ("deep", "bfloat16", "bfloat16")]
)
def test_gradients_that_horovod_does_not_average_are_refused(ranks, model, dtype, word) -> None:
    assert all(word in said for said in ranks(2, refused, model, dtype))
