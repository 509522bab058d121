"""The gate over final losses: its interval, its verdicts, and its rate of false alarms."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from packages import module_at
from scipy.stats import binom

from harness.features.gate.comparison import Finding, Rules, compare
from harness.features.gate.effect import ALPHA, Verdict
from harness.features.gate.reduce import reduce_study
from results.features import MEASURED
from results.outcome import Outcome

quality = module_at(Path(__file__).with_name("loss_quality.py"))
KEPT = (2.9, 2.95, 3.0, 3.05, 3.1)


def judged(base, new, steps=100, **margins: float) -> Finding:
    sides = quality.side([base]), quality.side([new], steps)
    (found,) = compare(*sides, Rules(margins=margins)).findings
    return found


def test_the_interval_is_the_prediction_of_one_or_several_seeds() -> None:
    """Five seeds of mean 3 and deviation sqrt(0.025 / 4); t(4) at 99 % is 3.747."""
    for new, seeds in (([3.1], 1), ([3.0, 3.1, 3.2], 3)):
        half = 3.747 * math.sqrt(0.025 / 4) * math.sqrt(1 / 5 + 1 / seeds) / 3
        effect = judged(KEPT, new).effect
        assert (effect.value, effect.runs) == (pytest.approx(0.1 / 3), (5, seeds))
        assert effect.high - effect.value == pytest.approx(half, rel=1e-3)
        assert effect.value - effect.low == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize(
    ("base", "new", "verdict"),
    [
        # The interval of one seed reaches from 2.68 to 3.32.
        (KEPT, [3.31], Verdict.UNCHANGED),
        (KEPT, [3.33], Verdict.REGRESSED),
        (KEPT, [2.67], Verdict.IMPROVED),
        (KEPT, [3.0, None], Verdict.REGRESSED),
        (KEPT[:4], [9.0], Verdict.SHOWN),
        ((*KEPT[:4], None), [9.0], Verdict.SHOWN),
        ((*KEPT, None), [3.33], Verdict.REGRESSED),
        ([3.0] * 5, [3.1], Verdict.SHOWN),
        ([-one for one in KEPT], [-2.67], Verdict.REGRESSED),
        ([], [3.0], Verdict.SHOWN),
        (KEPT, [], Verdict.INCOMPARABLE),
    ],
)
def test_each_verdict_of_the_final_loss(base, new, verdict) -> None:
    assert judged(base, new).verdict is verdict


def test_a_given_margin_leaves_smaller_changes_out() -> None:
    assert judged(KEPT, [3.33], final_loss=0.12).verdict is Verdict.UNCHANGED
    assert judged(KEPT, [3.4], final_loss=0.12).verdict is Verdict.REGRESSED


def test_trainings_of_unequal_steps_are_refused_with_both_numbers() -> None:
    found = judged(KEPT, [3.0], steps=200)
    assert found.verdict is Verdict.INCOMPARABLE
    assert "100 in BASE, 200 in NEW" in found.reason


@pytest.mark.parametrize(("seeds", "new", "cells"), [(5, 1, 1), (10, 1, 1), (5, 3, 1), (5, 1, 8)])
def test_normal_losses_raise_a_false_alarm_as_often_as_is_said(seeds, new, cells) -> None:
    """At most ALPHA a call, and of one cell exactly that; 1 in 1,000 calls is beyond each bound."""
    calls = 4000 // cells
    found = quality.alarms("normal", calls, seeds, new, cells)
    assert found <= binom.ppf(0.999, calls, ALPHA)
    assert cells > 1 or found >= binom.ppf(0.001, calls, ALPHA)


def test_skewed_losses_raise_more_and_a_large_change_is_found() -> None:
    assert 0.01 < quality.alarms("exponential", 2000, 5) / 2000 < 0.06
    assert quality.alarms("normal", 500, 5, worse=1.0) > 450


@pytest.fixture
def seeds(planted, monkeypatch):
    """The results of a study of seeds 0 to 5, of a kind with losses: 128 steps and 4 of warm-up."""
    losses = "reports.analysis.losses:final_losses"
    monkeypatch.setattr("results.plan.MEASURED", replace(MEASURED, losses=losses))
    for seed in range(6):
        planted.points("ddp", {1: [10.0]}, seed=seed)
    planted.plan()
    return planted.study.results()


def curve(run, level, **changes):
    """A run of 4 + 132 steps in points of 2, at `level` from the middle on."""
    changes = {"losses": (9.0,) * 34 + (level,) * 34, "losses_every": 2, "loss_last": level, **changes}
    return msgspec.structs.replace(run, steps=132, warmup_steps=4, first_steps=0, **changes)


def test_seeds_of_a_study_are_one_subject_with_losses_by_powers_of_two(planted, seeds) -> None:
    """The last 25.6 of 128 steps lie in the second half, and the last 12.8 of 64 in the first."""
    (one,) = reduce_study(planted.study, [curve(run, 3.0) for run in seeds]).subjects
    assert (one.runs, len(one.timed["step_time"])) == (6, 6)
    assert one.losses == {seed: {16: 9.0, 32: 9.0, 64: 9.0, 128: 3.0} for seed in range(6)}
    paired = reduce_study(planted.study, [curve(run, 3.0) for run in seeds], over_seeds=False)
    assert [list(each.losses) for each in paired.subjects] == [[seed] for seed in range(6)]


def test_a_loss_that_is_lost_on_the_way_is_none_from_there_on(planted, seeds) -> None:
    cut = {"losses": (9.0,) * 20, "loss_last": None}
    lost = [curve(seeds[0], 3.0, outcome=Outcome.DIVERGED, **cut), *(curve(run, 3.0) for run in seeds[1:])]
    (one,) = reduce_study(planted.study, lost).subjects
    of, other = (planted.study.cell(run.cell_id).seed for run in seeds[:2])
    assert one.losses[of] == {16: 9.0, 32: 9.0, 64: None, 128: None, 256: None}
    assert one.losses[other][128] == 3.0


def test_a_training_without_step_times_has_losses_alone(planted, seeds) -> None:
    (one,) = reduce_study(planted.study, [curve(run, 3.0, step_ns=None) for run in seeds]).subjects
    assert (one.failed, one.runs, one.timed, one.exact) == (None, 6, {}, {})
    assert len(one.losses) == 6
