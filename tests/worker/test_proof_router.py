"""The proof of what trains the router of a mixture of experts in addition to the loss of its model."""

from __future__ import annotations

import re

import pytest
from planting import GRADIENT, Fields, Planted, after

from strategies.trainer import Trainer

MIXTURE: Fields = {"micro_batch": 4, "optimizer": "adamw:lr=0.001"}
AUXILIARY: Fields = MIXTURE | {"workload": "moe-nano:aux=0.1:seq=16"}
FULL: Fields = MIXTURE | {"workload": "moe-nano:capacity=1:routing=skewed:seq=16:skew=3"}
PIPELINE: Fields = {"strategy": "pipeline:1f1b:microbatches=2"}


def _an_auxiliary_loss_is_not_divided_by_the_passes_of_a_step(rank: int, size: int) -> Planted:
    return after(Trainer, "__init__", lambda self: setattr(self, "_passes", 1))


@pytest.mark.parametrize(
    "fields",
    [
        AUXILIARY | {"strategy": "fsdp", "accumulation": 3},
        AUXILIARY | PIPELINE | {"accumulation": 2},
        AUXILIARY | {"strategy": "pipeline:zbv"},
        FULL | {"accumulation": 2, "activation_checkpointing": True},
        FULL | PIPELINE,
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
    ],
)
def test_a_router_that_is_trained_wrongly_is_caught(proofs, mutation, fields, detail) -> None:
    results = proofs(2, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results[0]["detail"]
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]
