"""Comparisons by worked values: what counts as the same gradient of a parameter, and as the same state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import a_cell

from harness.worker.proof.comparison import (
    ProofFinding,
    ProofSubject,
    compare_history,
    relative,
    relative_each,
)
from harness.worker.proof.examination import Examined
from harness.worker.proof.proof import simulation_verdict
from harness.worker.proof.reference import UPDATE_TOLERANCE, Reference, Replay, clip_plainly, sizes_matter

# Norms of 4 and 3, together 5.
LARGE, OTHER = torch.tensor([0.0, 4.0]), torch.tensor([3.0])


def test_each_parameter_is_held_to_its_own_norm_and_no_less_than_a_share_of_all() -> None:
    reference = {"a": LARGE, "b": OTHER, "zero": torch.zeros(2)}
    ours = {"a": LARGE + torch.tensor([0.03, 0.04]), "b": OTHER - 0.04, "zero": torch.tensor([6e-4, 0.0])}
    each = relative_each(ours, reference, 0.01, 1e-4)
    found = {finding.what.split()[2]: finding for finding in each}
    # |(0.03, 0.04)| = 0.05 > 0.01 * 4; 0.04 > 0.01 * 3; and 6e-4 > 1e-4 * 5.
    assert found["a"].difference == pytest.approx(0.05)
    assert found["a"].bound == pytest.approx(0.04)
    assert found["b"].difference == pytest.approx(0.04)
    assert found["b"].bound == pytest.approx(0.03)
    assert found["zero"].bound == pytest.approx(5e-4)
    assert [found[name].passed for name in ("a", "b", "zero")] == [False] * 3
    wide = relative_each(ours, reference, 0.0134, 1.34e-4)
    assert [finding.passed for finding in wide] == [True] * 3


def test_a_small_gradient_that_is_wrong_is_not_seen_in_the_norm_of_all_but_in_its_own() -> None:
    reference = {"large": torch.full((100,), 10.0), "small": torch.tensor([2.0])}
    ours = reference | {"small": torch.tensor([1.0])}
    # The norm of all is sqrt(100 * 100 + 4), a little more than 100: 1 is less than 0.03 of it.
    assert [finding.passed for finding in relative("gradient", ours, reference, 0.03)] == [True]
    each = relative_each(ours, reference, 0.03, 2**-11)
    assert [finding.passed for finding in each] == [True, False]
    assert each[1].bound == pytest.approx(0.03 * 2.0)


def test_a_gradient_that_is_no_number_is_no_match() -> None:
    found = relative_each({"a": torch.tensor([math.nan])}, {"a": torch.tensor([1.0])}, 0.5, 0.5)
    assert [finding.passed for finding in found] == [False]


STATE = {"w": {"step": torch.tensor(2.0), "exp_avg": torch.tensor([3.0, 4.0]), "mark": 1}}


def differing(tolerance: float, ours: dict[str, Any], kept: dict[str, Any] = STATE) -> list[str]:
    replay = Replay(parameters={}, history=kept, tolerance=tolerance)
    return [finding.what for finding in compare_history(ours, replay) if not finding.passed]


@pytest.mark.parametrize(
    ("ours", "keys"),
    [
        (STATE, []),
        ({}, ["exp_avg", "mark", "step"]),
        ({"w": STATE["w"] | {"step": torch.tensor(1.0)}}, ["step"]),
        ({"w": STATE["w"] | {"exp_avg": torch.tensor([4.0, 3.0])}}, ["exp_avg"]),
        ({"w": STATE["w"] | {"exp_avg": torch.tensor([3.0])}}, ["exp_avg"]),
        ({"w": STATE["w"] | {"exp_avg": None}}, ["exp_avg"]),
        ({"w": STATE["w"] | {"mark": 2}}, ["mark"]),
        ({"w": STATE["w"] | {"other": 1}}, ["other"]),
        # A last place of single precision.
        ({"w": STATE["w"] | {"exp_avg": torch.tensor([3.0, 4.0 + 2**-21])}}, ["exp_avg"]),
    ],
)
def test_every_value_of_the_state_is_compared(ours, keys) -> None:
    expected = [f"optimizer state of w differs from the replayed one in {key}" for key in keys]
    assert differing(0.0, ours) == expected


@pytest.mark.parametrize(("off", "passed"), [(0.0049, True), (0.0051, False)])
def test_where_bits_may_differ_the_state_agrees_within_a_thousandth(off, passed) -> None:
    # Of a norm of 5.
    ours = {"w": STATE["w"] | {"exp_avg": torch.tensor([3.0, 4.0 + off])}}
    assert (not differing(UPDATE_TOLERANCE, ours)) == passed
    assert differing(0.0, ours)


def test_where_bits_may_differ_the_smallest_numbers_may_by_units() -> None:
    # 3 and 4 times 2^-149, the smallest number there is; one of them is more than a thousandth of the norm.
    smallest = 2.0**-149
    squares = torch.tensor([3 * smallest, 4 * smallest])
    kept, other = {"w": {"exp_avg_sq": squares}}, {"w": {"exp_avg_sq": squares + smallest}}
    assert not differing(UPDATE_TOLERANCE, other, kept)
    assert differing(0.0, other, kept)


@pytest.mark.parametrize(
    ("fields", "replicas", "expected"),
    [
        ({}, 2, False),
        ({}, 3, True),
        ({"precision": "bf16"}, 3, False),
        ({"strategy": "pipeline:1f1b:dp=2", "gpus": 6, "model_parallel": 2}, 3, False),
        ({"compression": "topk:0.1"}, 2, True),
        # Micro-batch by micro-batch: two of each of two ranks; at stage 1 whole replicas.
        ({"strategy": "scratch-fsdp:stage=2", "accumulation": 2}, 2, True),
        ({"strategy": "scratch-fsdp:stage=1", "accumulation": 2}, 2, False),
    ],
)
def test_sizes_are_kept_where_a_bound_is_made_of_them(fields, replicas, expected) -> None:
    assert sizes_matter(a_cell(**fields), replicas) == expected


def test_without_rounding_nothing_may_differ_and_with_it_a_part_of_the_sizes() -> None:
    gradients, sizes = {"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[3.0, 4.0]])}
    surroundings: dict[str, Any] = {"buffers": {}, "buffer_hashes": []}
    exact = Reference(gradients=gradients, sizes={}, rounding=0.0, **surroundings)
    assert exact.bounds["w"].tolist() == [[0.0, 0.0]]
    rounded = Reference(gradients=gradients, sizes=sizes, rounding=0.5, **surroundings)
    assert rounded.bounds["w"].tolist() == [[1.5, 2.0]]


def test_of_several_differences_the_first_is_named_whatever_its_size() -> None:
    sizes = {"fine": 0.0, "first": 1.0, "second": 5.0}
    findings = [
        ProofFinding(passed=size == 0, of="gradient", what=f"gradient of {name}", difference=size, bound=0.5)
        for name, size in sizes.items()
    ]
    alike = Examined(findings=findings, agreed=True, failed=True, stale=False)

    def detail(**changes: object) -> str:
        found = simulation_verdict(a_cell(), replace(alike, **changes), steps=3)
        assert not found.passed
        return found.detail

    assert detail() == detail(stale=True) == "gradient of first"
    assert detail(findings=findings[:1]) == "another rank found a difference: its record says which"
    assert (
        detail(findings=findings[:1], stale=True) == "a replica's buffers differ from the serial simulation"
    )
    assert detail(agreed=False) == "replicas differ after the update"


def test_a_proof_tells_of_gradients_alone_and_is_none_without_them() -> None:
    sizes: dict[ProofSubject, float] = {"buffers": 9.0, "gradient": 1.0, "exchange": 5.0}
    findings = [
        ProofFinding(passed=True, of=of, what=f"gradient or {of}", difference=size, bound=2 * size)
        for of, size in sizes.items()
    ]
    found = Examined(findings=findings, agreed=True, failed=False, stale=False)
    proof = simulation_verdict(a_cell(), found, steps=3)
    assert (proof.passed, proof.max_difference, proof.max_bound) == (True, 1.0, 2.0)
    overflowed = simulation_verdict(a_cell(), replace(found, findings=findings[:1]), steps=3)
    assert overflowed.method == "replica-agreement"
    assert "the loss scaler left out every step" in overflowed.detail


def clipped(values: list[float], clip_norm: float, **fields: Any) -> tuple[list[float], bool]:
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    known = clip_plainly(a_cell(strategy="fsdp", clip_norm=clip_norm, **fields), [parameter])
    return parameter.grad.tolist(), known


def test_clipping_is_known_to_the_bit_unless_its_factor_lies_between_two_numbers_in_single_precision() -> (
    None
):
    assert clipped([3.0, 4.0], 10.0) == ([3.0, 4.0], True)
    # A norm of 5, to which clipping adds 1e-6.
    assert clipped([3.0, 4.0], 2.5) == ([pytest.approx(1.5, rel=1e-6), pytest.approx(2.0, rel=1e-6)], True)
    between = 0.5 + 2**-25
    assert clipped([3.0, 4.0], between * (5 + 1e-6))[1] is False


def test_the_norm_of_many_values_is_replayed_as_the_strategy_adds_them_up() -> None:
    # Torch's own norm of so many equal values is off by about 1 % in single precision.
    parameter = torch.nn.Parameter(torch.zeros(2**24))
    parameter.grad = torch.full((2**24,), 1.1)
    norm = 4096 * float(parameter.grad[0])
    clip_plainly(a_cell(strategy="scratch-fsdp:stage=3", clip_norm=1.0), [parameter])
    assert float(parameter.grad[0]) == pytest.approx(1.1 / norm, rel=2**-22)
