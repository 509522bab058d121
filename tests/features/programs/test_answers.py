"""The page of programs names the size to buy, and says that nobody proved it."""

from __future__ import annotations

import pytest

from reports.analysis.size_to_buy import sizes_to_buy
from results.plan import Order
from results.record import Training

PROGRAM = {"workload": "program:train.yaml", "dataset": "own"}


@pytest.fixture
def figures(tmp_path, new_study):
    """Curves of two strategies of a program on GPUs."""
    study = new_study(tmp_path / "study", device="cuda")
    study.points(
        "program:ddp@123456",
        {1: [10.0] * 6, 2: [10.5] * 6, 4: [11.0] * 6, 8: [30.0] * 6},
        proof=None,
        **PROGRAM,
    )
    study.points("program:fsdp@123456", {2: [12.0] * 6, 4: [13.0] * 6, 8: [33.0] * 6}, proof=None, **PROGRAM)
    study.plan(repeats=6, order=Order(kind="program"))
    return study.analysed(proof=None, training=Training(), absent={"proof": "bench did not train it"})


def test_the_size_to_buy_is_named_with_the_clause_that_it_is_not_proven(figures) -> None:
    [found] = sizes_to_buy(figures)
    assert found.choice is not None, found.absent
    assert (found.choice.gpus, found.choice.proven) == (4, False)
    assert "not proven" in found.text
