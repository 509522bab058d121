"""Right cells pass the proof on any CPU: gradients that are only rounding, sums in another order."""

from __future__ import annotations

import pytest
from planting import Fields

# Of four keys' and BatchNorms' biases the gradients are zero but for rounding.
CELL: Fields = {"workload": "py:proof_models:cancelling", "micro_batch": 8, "optimizer": "adamw:lr=0.01"}
NANO: Fields = {"workload": "llama-nano:seq=16", "micro_batch": 4, "optimizer": "adamw:lr=0.001"}
PIPELINE: Fields = CELL | {"strategy": "pipeline:1f1b:microbatches=2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, CELL | {"strategy": "tp", "clip_norm": 0.1}),
        (2, CELL | {"strategy": "tp", "precision": "bf16"}),
        pytest.param(4, CELL | {"strategy": "fsdp:tp=2"}, marks=pytest.mark.slow),
        (2, PIPELINE | {"accumulation": 2, "clip_norm": 0.1}),
        (2, PIPELINE | {"precision": "bf16"}),
        pytest.param(2, PIPELINE | {"precision": "fp16", "clip_norm": 0.1}, marks=pytest.mark.slow),
        (2, CELL | {"strategy": "ddp", "precision": "bf16"}),
        (2, NANO | {"strategy": "pipeline:1f1b", "precision": "float8"}),
    ],
)
def test_what_is_compared_within_a_tolerance_may_be_summed_in_another_order(
    proofs, other_rounding, size, fields
) -> None:
    for found in proofs(size, fields, broken=other_rounding.trainer_sums_otherwise):
        assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, CELL | {"strategy": "fsdp", "clip_norm": 0.1}),
        (3, CELL | {"strategy": "ddp"}),
        pytest.param(
            3,
            CELL | {"strategy": "scratch-fsdp:stage=3", "accumulation": 2, "clip_norm": 0.1},
            marks=pytest.mark.slow,
        ),
        (3, CELL | {"strategy": "scratch-ddp", "compression": "fp16"}),
        pytest.param(
            3, CELL | {"strategy": "scratch-ddp", "compression": "powersgd:2"}, marks=pytest.mark.slow
        ),
        pytest.param(3, CELL | {"strategy": "local-sgd:2"}, marks=pytest.mark.slow),
    ],
)
def test_bits_are_compared_of_two_computations_on_one_cpu_whichever_it_is(
    proofs, other_rounding, size, fields
) -> None:
    for found in proofs(size, fields, broken=other_rounding.all_sum_otherwise):
        assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
    assert not proofs(size, fields, broken=other_rounding.trainer_sums_otherwise)[0]["passed"]


def test_a_product_with_one_sample_rounds_by_where_its_matrix_begins(proofs) -> None:
    """zero1 lays parameters one behind another, which MKL's kernels for AMD's CPUs are sensitive to."""
    odd: Fields = {"workload": "py:proof_models:odd", "micro_batch": 1, "optimizer": "sgd:lr=0.05"}
    found = proofs(2, odd | {"strategy": "zero1"})[0]
    assert found["passed"], found["detail"]
    assert (found["max_difference"], found["max_bound"]) == (0.0, 0.0)


RESIDUAL: Fields = {
    "workload": "py:proof_models:residual",
    "micro_batch": 8,
    "optimizer": "sgd:lr=0.002",
    "precision": "bf16",
    "strategy": "ddp",
}


@pytest.mark.slow
def test_where_rounding_alone_makes_another_gradient_it_is_sampled(proofs, other_rounding) -> None:
    """A compiled ResNet in half precision has such gradients: BatchNorm of few samples amplifies rounding."""
    first, second = proofs(2, RESIDUAL, broken=other_rounding.trainer_norms_round_later)
    assert (first["passed"], first["method"]) == (True, "sampled-gradients"), first["detail"]
    assert "where parameters are off by one rounding of bf16" in first["detail"]
    assert second["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "size"), [("trainer_doubles", 1), ("trainer_climbs", 2)])
def test_what_is_more_than_rounding_is_a_defect_in_such_a_model_too(
    proofs, other_rounding, defect, size
) -> None:
    cell = RESIDUAL | {"strategy": "single" if size == 1 else "ddp"}
    found = proofs(size, cell, broken=getattr(other_rounding, defect))[0]
    assert not found["passed"]
    assert "gradient differs from the serial simulation" in found["detail"]


@pytest.mark.slow
def test_one_device_has_the_weakest_proof_where_rounding_alone_makes_another_gradient(
    proofs, other_rounding
) -> None:
    alone = RESIDUAL | {"strategy": "single"}
    [found] = proofs(1, alone, broken=other_rounding.trainer_norms_round_later)
    assert (found["passed"], found["method"]) == (True, "replica-agreement"), found["detail"]
    assert "the norm itself differs by 0.0" in found["detail"], found["detail"]


@pytest.mark.slow
def test_a_compressed_exchange_has_no_exception_for_rounding(proofs, other_rounding) -> None:
    cell = RESIDUAL | {"strategy": "scratch-ddp", "compression": "bf16"}
    assert not proofs(2, cell, broken=other_rounding.trainer_norms_round_later)[0]["passed"]
