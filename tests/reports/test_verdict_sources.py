"""The sources of the verdict, and its clause on cost."""

from __future__ import annotations

import pytest

from reports.analysis.assumptions import Assumptions
from reports.analysis.verdict.verdict import verdict
from results.catalogue.prices import Price
from results.outcome import Evidence, Outcome


def said(planted) -> tuple[str, ...]:
    return verdict(planted.analysed()).sentences


def made(planted) -> str:
    [sentence] = [one for one in said(planted) if one.startswith("Made from")]
    return sentence


def test_the_runs_that_it_is_made_from_are_counted(planted) -> None:
    single = planted.points("single", {1: 10.0})[0]
    ddp = planted.points("ddp", {2: 10.0})[0]
    planted.plan()
    assert made(planted) == "Made from 2 runs (1 of 3 runs a cell)."
    planted.runs(ddp, [10.0], foreign_cpu_cores=1.0)
    assert made(planted) == "Made from 3 of 6 planned runs, 1 disturbed."
    planted.runs(ddp, [10.0])
    planted.runs(single, [10.0] * 2, foreign_cpu_cores=1.0)
    # Two runs of ddp are undisturbed, so that its disturbed one does not count; of single only one is.
    assert made(planted) == (
        "Made from 5 of 6 planned runs, 2 disturbed (some of the baseline); not counted: 1 disturbed run."
    )


def test_runs_of_both_scalings_are_said_to_be_of_both(planted) -> None:
    for kind, batch in (("weak", 8), ("strong", 16)):
        planted.points("single", {1: [10.0] * 3}, kind=kind, batch=batch)
    planted.plan()
    assert made(planted) == "Made from 6 runs of weak and strong scaling."


def test_a_failed_run_of_a_cell_that_succeeded_is_named(planted) -> None:
    ddp = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan(repeats=1)
    planted.runs(ddp, [1.0], outcome=Outcome.UNKNOWN)
    planted.runs(ddp, [1.0], outcome=Outcome.OUT_OF_MEMORY)
    planted.runs(ddp, [10.0])
    assert made(planted) == (
        "Made from 1 run; not counted: 2 failed runs (ddp on 2: unreadable or unfinished record and ddp on "
        "2: out of memory)."
    )


def test_a_cell_of_unknown_outcome_says_what_was_found(planted) -> None:
    planted.points("ddp", {2: 10.0})
    planted.points("ddp", {4: 1.0}, outcome=Outcome.UNKNOWN)
    planted.plan(repeats=1)
    assert "failed: ddp on 4 (unreadable or unfinished record);" in said(planted)[-1]


def test_emulated_runs_are_not_what_it_is_made_from(planted) -> None:
    planted.points("ddp", {2: 10.0})
    planted.points("ddp", {4: 10.0}, evidence=Evidence.EMULATED, foreign_cpu_cores=1.0)
    planted.plan(repeats=1)
    assert made(planted) == "Made from 1 run."


def priced(planted, **told: object) -> list[str]:
    price = Price(usd_per_gpu_hour=3.6, source="given")
    study = planted.analysed(assumptions=Assumptions(price=price, **told))
    return [one for one in verdict(study).sentences if "cheapest" in one or "epoch" in one or "cost" in one]


@pytest.fixture
def dear(planted) -> object:
    """Single on 1 with 8 samples in 10 ms, and local-sgd on 2 with 16 in 12.5 ms."""
    planted.points("single", {1: 10.0})
    planted.points("local-sgd:4", {2: 12.5})
    planted.plan(repeats=1)
    return planted


def test_with_a_price_the_cheapest_and_the_fastest_are_named(dear) -> None:
    # 1,250 s at 3.6 USD an hour; 781.25 s at twice that.
    assert priced(dear) == [
        "The cheapest is single on 1 rank (CPU), batch 8 per replica, at 1.25 USD and 20 min 50 s a million "
        "samples; the fastest, local-sgd:4 on 2 ranks (CPU), batch 8 per replica, is at 1.56 USD and "
        "13 min 01 s."
    ]


def test_the_question_of_an_epoch_is_answered(dear) -> None:
    # 100,000 samples: 125 s and 0.125 USD on one, 78.1 s and 0.156 USD on two.
    assert priced(dear, within_s=100.0, epoch_samples=100_000)[1] == (
        "An epoch of 100,000 samples within 1 min 40 s: the cheapest is local-sgd:4 on 2 ranks (CPU), "
        "batch 8 per replica, at 0.156 USD and 78.1 s."
    )
    assert priced(dear, within_s=60.0)[1].startswith("Which cell finishes an epoch within 60.0 s is open: ")


def test_the_cheapest_may_train_differently_and_be_the_fastest(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("local-sgd:4", {2: 8.0})
    planted.plan(repeats=1)
    # 500 s at 7.2 USD an hour.
    assert priced(planted) == [
        "The cheapest is local-sgd:4 on 2 ranks (CPU), batch 8 per replica, at 1.00 USD and 8 min 20 s a "
        "million samples, and no cell is faster; it averages every 4 steps: compare its convergence too."
    ]
