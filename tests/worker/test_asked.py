"""A run ends if its steps did not do what its cell asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from planting import GPT as ONE_SAMPLE
from planting import Fields, Planted, wrapped

from harness.worker.cell.setup import CellSetup
from results.outcome import Outcome
from strategies import gradient_exchange, trainer
from strategies.pipeline import model as pipeline
from workloads.workload import Workload

GPT: Fields = ONE_SAMPLE | {"micro_batch": 4, "optimizer": "sgd:lr=0.05"}
WIDE: Fields = GPT | {"workload": "py:proof_models:wide", "strategy": "scratch-ddp"}
NODES: Fields = WIDE | {"collective": "hierarchical", "node_size": 2}


def _parameters_of_seed_0(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: CellSetup, **how: bool) -> Workload:
        return original(replace(self, cell=msgspec.structs.replace(self.cell, seed=0)), **how)

    return wrapped(CellSetup, "workload", wrong)


def _gpipe_in_its_place(rank: int, size: int) -> Planted:
    return patch.dict(pipeline._KINDS, {"1f1b": pipeline._KINDS["gpipe"]})


def _one_f_one_b_in_its_place(rank: int, size: int) -> Planted:
    return patch.dict(pipeline._KINDS, {"gpipe": pipeline._KINDS["1f1b"]})


def _all_activations_kept(rank: int, size: int) -> Planted:
    return patch.object(trainer, "checkpoint_blocks", lambda *_, **named: None)


def _the_default_collective(rank: int, size: int) -> Planted:
    def wrong(original: Any, text: str, *arguments: Any, **named: Any) -> object:
        return original("default", *arguments, **named)

    return wrapped(gradient_exchange, "build_route", wrong)


def _plain_ddp(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: CellSetup, *arguments: Any) -> object:
        return original(replace(self, cell=msgspec.structs.replace(self.cell, strategy="ddp")), *arguments)

    return wrapped(CellSetup, "trainer", wrong)


MLP: Fields = GPT | {"workload": "mlp", "optimizer": "adamw:lr=0.001"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields", "broken", "reason"),
    [
        (2, MLP | {"strategy": "ddp:bucket_mb=0.01"}, _plain_ddp, "operations of a step, and its steps sent"),
        (2, MLP | {"strategy": "zero1"}, _plain_ddp, "operations of a step, and its steps sent"),
        pytest.param(
            2,
            MLP | {"strategy": "zero1", "precision": "bf16"},
            _plain_ddp,
            "bytes of optimizer state",
            marks=pytest.mark.slow,
        ),
        (2, WIDE | {"seed": 3}, _parameters_of_seed_0, "seed 3 gives other initial parameters: 0.weight"),
        (
            2,
            GPT | {"seed": 3, "strategy": "fsdp"},
            _parameters_of_seed_0,
            "seed 3 gives other initial parameters",
        ),
        (2, GPT | {"strategy": "pipeline:1f1b"}, _gpipe_in_its_place, "up to 2 microbatches in flight"),
        pytest.param(
            2,
            GPT | {"strategy": "pipeline:gpipe"},
            _one_f_one_b_in_its_place,
            "and its steps had 2",
            marks=pytest.mark.slow,
        ),
        (2, GPT | {"activation_checkpointing": True}, _all_activations_kept, "computed no activation again"),
        (1, GPT | {"activation_checkpointing": "selective"}, _all_activations_kept, "no activation again"),
        (2, WIDE | {"collective": "ring"}, _the_default_collective, "ring sends messages between two ranks"),
        (2, WIDE | {"collective": "tree"}, _the_default_collective, "tree sends messages between two ranks"),
        (4, NODES, _the_default_collective, "hierarchical exchanges within nodes"),
    ],
)
def test_what_is_silently_not_done_ends_the_run(whole_runs, size, fields, broken, reason) -> None:
    found = whole_runs(size, fields, broken=broken)
    assert Outcome.OK not in {rank["outcome"] for rank in found}
    assert reason in found[0]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, GPT | {"seed": 3, "strategy": "scratch-fsdp", "activation_checkpointing": True}),
        (2, GPT | {"workload": "py:proof_models:attending", "activation_checkpointing": True}),
        pytest.param(2, GPT | {"strategy": "pipeline:1f1b", "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param(
            2,
            GPT | {"strategy": "pipeline:gpipe", "activation_checkpointing": "selective"},
            marks=pytest.mark.slow,
        ),
        pytest.param(3, GPT | {"strategy": "pipeline:1f1b"}, marks=pytest.mark.slow),
        pytest.param(
            2, GPT | {"workload": "gpt-nano", "strategy": "pipeline:interleaved"}, marks=pytest.mark.slow
        ),
        (2, WIDE | {"collective": "ring", "compression": "topk:0.1"}),
        (2, WIDE | {"collective": "tree"}),
        (2, MLP | {"strategy": "zero1"}),
        (4, NODES),
    ],
)
def test_what_is_done_as_asked_is_not_refused(whole_runs, size, fields) -> None:
    for rank in whole_runs(size, fields):
        assert rank["outcome"] is Outcome.OK, rank["reason"]
