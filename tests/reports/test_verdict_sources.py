"""The counts of runs, which the terminal, the page and `bench status` share, and the records on cost."""

from __future__ import annotations

import pytest

from harness.cli import run
from reports.analysis.assumptions import Assumptions
from reports.analysis.verdict.verdict import verdict
from reports.page.render import render_figures
from results.catalogue.prices import Price
from results.outcome import Outcome


def test_failed_cancelled_and_disturbed_runs_are_counted_alike_on_terminal_page_and_status(
    planted, capsys, monkeypatch
) -> None:
    [ddp, lost] = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    planted.runs(ddp, [10.0] * 3)
    planted.runs(ddp, [10.0] * 2, foreign_cpu_cores=1.0)
    planted.runs(ddp, [1.0], outcome=Outcome.CANCELLED)
    planted.runs(lost, [1.0] * 2, outcome=Outcome.CRASHED)
    monkeypatch.setenv("COLUMNS", "200")
    words = "8 runs: 5 ok, 2 of them disturbed; 2 crashed, 1 cancelled"
    assert words in render_figures(planted.analysed())
    root = str(planted.study.root)
    for call in (["status", root], ["report", root], ["status", root]):
        run(call)
        assert words in capsys.readouterr().out


def priced(planted, **told: object) -> list[str]:
    price = Price(usd_per_gpu_hour=3.6, source="given")
    study = planted.analysed(assumptions=Assumptions(price=price, **told))
    [found] = verdict(study).workloads
    return [one.told for one in found.records if one.what in ("cost", "an epoch in time")]


@pytest.fixture
def dear(planted) -> object:
    """Single on 1 with 8 samples in 10 ms, and local-sgd on 2 with 16 in 12.5 ms."""
    planted.points("single", {1: 10.0})
    planted.points("local-sgd:4", {2: 12.5})
    planted.plan(repeats=1)
    return planted


def test_with_a_price_the_cheapest_and_the_fastest_are_named(dear) -> None:
    # 1,250 s at 3.6 USD an hour; 781.25 s at twice that.
    [said] = priced(dear)
    assert "single on 1 rank (CPU), batch 8 per replica, is the cheapest at 1.25 USD and 20 min 50 s" in said
    assert "local-sgd:4 on 2 ranks (CPU), batch 8 per replica, is the fastest at 1.56 USD and 13 min" in said


def test_the_question_of_an_epoch_is_answered(dear) -> None:
    # 100,000 samples: 125 s and 0.125 USD on one, 78.1 s and 0.156 USD on two.
    said = priced(dear, within_s=100.0, epoch_samples=100_000)[1]
    assert (
        "the cheapest is local-sgd:4 on 2 ranks (CPU), batch 8 per replica, at 0.156 USD and 78.1 s" in said
    )
    assert "which cell finishes an epoch within 60.0 s is open: " in priced(dear, within_s=60.0)[1]


def test_the_cheapest_may_train_differently_and_be_the_fastest(planted) -> None:
    planted.points("single", {1: 10.0})
    planted.points("local-sgd:4", {2: 8.0})
    # 500 s at 7.2 USD an hour.
    [said] = priced(planted)
    assert "local-sgd:4 on 2 ranks (CPU), batch 8 per replica, is the cheapest at 1.00 USD and 8 min" in said
    assert "no cell is faster; it averages every 4 steps: compare its loss too" in said
