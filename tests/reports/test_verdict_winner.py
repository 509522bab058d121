"""The verdict on a winner: its certainty, whether it trains alike, and the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from reports.analysis.verdict.scalability import Dominant
from reports.analysis.verdict.verdict import verdict
from results.record import Training

MS = 1_000_000


def said(planted) -> tuple[str, ...]:
    return verdict(planted.analysed()).sentences


@pytest.fixture
def compared(planted) -> Callable[..., tuple[str, ...]]:
    """Weak, single on 1 with 10 ms of computation, ddp on 2 with 25 ms, and another on 2 with 12 ms."""

    def made(strategy: str = "ddp", **fields: object) -> tuple[str, ...]:
        timing = {"input_ms": 0.0, "off_step_ns": lambda rank: [10 * MS] * 4}
        planted.points("single", {1: [10.0] * 3}, input_ms=0.0)
        planted.points("ddp", {2: [25.0] * 3}, **timing)
        planted.points("scratch-ddp", {2: [30.0] * 3}, **timing)
        planted.points(strategy, {2: [12.0] * 3}, **timing, **fields)
        planted.plan()
        return said(planted)

    return made


@pytest.mark.parametrize(
    ("axes", "clause"),
    [
        ({"strategy": "local-sgd:4"}, "averages every 4 steps"),
        ({"compression": "topk:0.01"}, "compresses its gradients"),
        (
            {"strategy": "local-sgd:2:warmup=10", "compression": "fp16"},
            "averages every 2 steps and compresses its gradients",
        ),
    ],
)
def test_a_winner_that_trains_differently_says_so_and_has_the_dense_one_beside_it(
    compared, axes, clause
) -> None:
    first, _, dense, *_ = compared(**axes)
    assert first.endswith(f"; it {clause}: compare its convergence too.")
    # 10 / 25; 2 (10 / 25) - 1 = -0.2; lost 15, all of it transfer.
    assert dense == (
        "Of plain data parallelism, ddp on 2 ranks (CPU) has an efficiency of 40.0 % (40.0 to 40.0) against "
        "single on 1; knee between 1 and 2: going from 1 to 2 changes throughput by -20 % (-20 to -20; "
        "100 % would be ideal); at 2 a step loses 60.0 % of its time against single on 1, most of it to "
        "exposed transfer (15.0 ms)."
    )


def test_the_recorded_differences_of_a_strategy_are_stated(planted) -> None:
    alone = Training(differences=("averages with its neighbours",), averages_all_gradients=False)
    planted.points("single", {1: 10.0})
    planted.points("ddp", {2: 25.0}, training=Training())
    planted.points("gossip", {2: 12.0}, training=alone)
    planted.plan(repeats=1)
    first, *others = said(planted)
    assert "; it averages with its neighbours: compare its convergence too" in first
    assert any(other.startswith("Of plain data parallelism, ddp on 2 ranks") for other in others)


def test_the_computation_of_a_compressor_is_called_what_it_is(planted) -> None:
    planted.points("single", {1: 10.0}, input_ms=0.0)
    planted.points(
        "ddp", {2: 20.0}, compression="topk:0.01", input_ms=0.0, off_step_ns=lambda rank: [18 * MS] * 4
    )
    planted.plan(repeats=1)
    # Lost 20 - 10; 18 - 10 of it are computed.
    told = (
        "most of it to computation, encoding and decoding in it, that is slower than the baseline's (8.00 ms)"
    )
    assert told in said(planted)[1]


def test_another_collective_has_the_dense_one_beside_it_but_trains_alike(compared) -> None:
    first, _, dense, *_ = compared(collective="ring")
    assert "convergence" not in first
    assert dense.startswith("Of plain data parallelism, ddp on 2")


def test_parameters_gathered_in_half_precision_train_differently_and_are_dense(compared) -> None:
    sentences = compared(strategy="fsdp:params=bf16")
    assert "; it gathers parameters in bf16: compare its convergence too." in sentences[0]
    assert not any(sentence.startswith("Of plain") for sentence in sentences)


def test_a_reduced_precision_is_told_of_only_beside_a_fuller_one(planted) -> None:
    planted.points("ddp", {2: 10.0, 4: 10.0}, precision="bf16")
    planted.plan(repeats=1)
    assert "convergence" not in said(planted)[0]
    planted.points("ddp", {2: 20.0})
    planted.plan(repeats=1)
    assert said(planted)[0].endswith("; it computes in bf16: compare its convergence too.")


def test_three_runs_of_each_make_it_the_fastest_and_fewer_of_any_only_seem_to(planted) -> None:
    planted.points("ddp", {2: [10.0] * 3})
    [other] = planted.points("fsdp", {2: [20.0] * 2})
    planted.plan()
    assert "ddp on 2 ranks (CPU) seems the fastest (2 runs) with" in said(planted)[0]
    planted.runs(other, [20.0])
    assert "ddp on 2 ranks (CPU) is the fastest with" in said(planted)[0]


def test_a_dense_exchange_that_is_its_own_baseline_has_no_sentence(planted) -> None:
    planted.points("ddp", {2: [10.0] * 3})
    planted.points("local-sgd:4", {2: [10.0] * 3, 4: [10.0] * 3})
    planted.plan()
    assert not any(sentence.startswith("Of plain") for sentence in said(planted))


def test_a_part_is_blamed_up_to_five_percent_of_the_step_whatever_its_size() -> None:
    dominant = Dominant(
        cell_id="a",
        gpus=2,
        step_ns=100.0,
        lost_ns=12.0,
        part="wait",
        part_ns=6.0,
        shown=True,
        contenders=(),
        other_ns=5.0,
        method="on-off",
        against="single on 1",
    )
    assert dominant.blames
    assert not replace(dominant, other_ns=5.1).blames
    assert not replace(dominant, other_ns=-5.1).blames
    # Exactly half is not more than half.
    assert replace(dominant, other_ns=5.1, part_ns=10.2).blames
