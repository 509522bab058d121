"""The proof of what trains the router of a mixture of experts in addition to the loss of its model."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from planting import GRADIENT, Fields, Planted, after
from torch import Tensor

from strategies.trainer import Trainer
from strategies.training.tallies import Tallies
from workloads.moe.model import Balance

MIXTURE: Fields = {"micro_batch": 4, "optimizer": "adamw:lr=0.001"}
AUXILIARY: Fields = MIXTURE | {"workload": "moe-nano:aux=0.1:seq=16"}
FULL: Fields = MIXTURE | {"workload": "moe-nano:capacity=1:routing=skewed:seq=16:skew=3"}
BIASED: Fields = MIXTURE | {"workload": "moe-nano:bias=0.001:seq=16"}
MOVED = "bias after the update is not what the counts of all replicas make of it"
BUFFERS = "buffers differs from the serial simulation"
PIPELINE: Fields = {"strategy": "pipeline:1f1b:microbatches=2"}


def _an_auxiliary_loss_is_not_divided_by_the_passes_of_a_step(rank: int, size: int) -> Planted:
    return after(Trainer, "__init__", lambda self: setattr(self, "_passes", 1))


def _a_bias_is_not_moved(rank: int, size: int) -> Planted:
    return patch.object(Tallies, "settle", lambda self, module: None)


def _a_bias_is_moved_by_the_counts_of_one_replica(rank: int, size: int) -> Planted:
    return after(Tallies, "__init__", lambda self: setattr(self, "_link", None))


def _choices_that_backward_repeats_are_counted(rank: int, size: int) -> Planted:
    def count(self: Balance, chosen: Tensor) -> None:
        self.tally += chosen

    return patch.object(Balance, "count", count)


@pytest.mark.parametrize(
    "fields",
    [
        AUXILIARY | {"strategy": "fsdp", "accumulation": 3},
        AUXILIARY | PIPELINE | {"accumulation": 2},
        AUXILIARY | {"strategy": "pipeline:zbv"},
        FULL | {"accumulation": 2, "activation_checkpointing": True},
        FULL | PIPELINE,
        BIASED | {"accumulation": 2, "activation_checkpointing": True},
        BIASED | PIPELINE | {"accumulation": 2},
        pytest.param(BIASED | {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(BIASED | {"strategy": "scratch-fsdp", "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(BIASED | {"strategy": "scratch-ddp"}, marks=pytest.mark.slow),
        pytest.param(BIASED | {"strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param(BIASED | {"strategy": "tp"}, marks=pytest.mark.slow),
        pytest.param(BIASED | {"strategy": "pipeline:zbv"}, marks=pytest.mark.slow),
        pytest.param(FULL | {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(FULL | {"strategy": "zero1", "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param(FULL | {"strategy": "tp"}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | {"precision": "fp16", "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | {"strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | {"strategy": "scratch-fsdp"}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | {"strategy": "tp"}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | {"strategy": "local-sgd:2"}, marks=pytest.mark.slow),
        pytest.param(AUXILIARY | PIPELINE | {"precision": "fp16"}, marks=pytest.mark.slow),
    ],
)
def test_a_router_that_is_trained_rightly_is_proven(proofs, fields) -> None:
    found = proofs(2, fields)[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]


@pytest.mark.parametrize(
    ("mutation", "fields", "detail"),
    [
        (
            _an_auxiliary_loss_is_not_divided_by_the_passes_of_a_step,
            AUXILIARY | {"accumulation": 2},
            GRADIENT,
        ),
        (_an_auxiliary_loss_is_not_divided_by_the_passes_of_a_step, AUXILIARY | PIPELINE, GRADIENT),
        (_a_bias_is_not_moved, BIASED | {"strategy": "fsdp"}, MOVED),
        (_a_bias_is_moved_by_the_counts_of_one_replica, BIASED, MOVED),
        (_choices_that_backward_repeats_are_counted, BIASED | {"activation_checkpointing": True}, BUFFERS),
    ],
)
def test_a_router_that_is_trained_wrongly_is_caught(proofs, mutation, fields, detail) -> None:
    results = proofs(2, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results[0]["detail"]
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]
