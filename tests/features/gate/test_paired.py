"""Pairs of launches: the value of a pair, the interval over pairs, and how often four looks are right."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from scipy import stats

from harness.features.gate.comparison import Rules, compare
from harness.features.gate.effect import (
    ALPHA,
    FEWEST_PAIRS,
    FEWEST_QUADS,
    LOOKS,
    PAIRS_A_LOOK,
    Effect,
    PairedSample,
    Verdict,
    judge,
    pair_log,
    paired_effect,
    paired_sample,
    runs_that_tell,
)
from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.records.paired import Pair, PairedBlock, PairedCell, Side
from harness.features.gate.reduce import merged_side

MARGIN = 0.05
PAIR_SD = 0.022
"""Pairs with identical code on a quiet machine of two cores vary a little less: 2.0 %, docs/evidence.md."""


def block(side: Side, ns: float, foreign: float | None = 0.0) -> PairedBlock:
    return PairedBlock(side=side, steps=10, ns=round(ns), foreign=foreign)


def quad(base: float, new: float, *, drift: float = 0.0, foreign: float = 0.0) -> tuple[PairedBlock, ...]:
    """A B B A, in which each block takes `drift` longer than the one before it."""
    times = [base, new + drift, new + 2 * drift, base + 3 * drift]
    sides: list[Side] = ["base", "new", "new", "base"]
    return tuple(block(side, ns, foreign) for side, ns in zip(sides, times, strict=True))


def cell(*quads: tuple[PairedBlock, ...]) -> PairedCell:
    blocks = tuple(block for quad in quads for block in quad)
    return PairedCell(base_cell="c", base_run="r", new_cell="c", new_run="s", blocks=blocks)


def pair(number: int, paired: PairedCell) -> tuple[Pair, PairedCell]:
    at = "2026-01-02T03:04:05.000Z"
    whole = Pair(
        number=number, first="base", alternation="blocks", started_at=at, ended_at=at, cells=(paired,)
    )
    return whole, paired


def test_a_linear_drift_cancels_in_a_quad() -> None:
    drifting = cell(*(quad(1e9, 1e9, drift=2e6) for _ in range(FEWEST_QUADS)))
    found = pair_log(drifting, "blocks")
    # What the logarithm leaves, with d = 0.2 %: (3 d)^2 / 2 less (d^2 + (2 d)^2) / 2, over two.
    assert found == pytest.approx((9 - 5) / 4 * 0.002**2, rel=0.02)


def test_a_stall_in_few_of_the_quads_counts() -> None:
    stall = (block("base", 1e9), block("new", 3e9), block("new", 1e9), block("base", 1e9))
    found = pair_log(cell(stall, *[quad(1e9, 1.1e9)] * 9), "blocks")
    assert found == pytest.approx((math.log(3) / 2 + 9 * math.log(1.1)) / 10)


def test_quads_that_others_spoiled_are_left_out_and_too_few_leave_no_value() -> None:
    spoiled = quad(1e9, 2e9, foreign=0.3)
    enough = cell(spoiled, *[quad(1e9, 1.1e9)] * FEWEST_QUADS)
    assert pair_log(enough, "blocks") == pytest.approx(math.log(1.1))
    few = cell(spoiled, *[quad(1e9, 1.1e9)] * (FEWEST_QUADS - 1))
    assert pair_log(few, "blocks") is None
    failed = cell()
    sample = paired_sample([pair(1, enough), pair(2, few), pair(3, failed)], of=4)
    assert (len(sample.logs), sample.spoiled, sample.failed) == (1, 1, 2)


def test_the_step_times_that_are_shown_are_those_of_the_quads_that_count() -> None:
    enough = cell(quad(1e9, 3e9, foreign=0.3), *[quad(1e9, 1.1e9)] * FEWEST_QUADS)
    few = cell(quad(1e9, 5e9))
    sample = paired_sample([pair(1, enough), pair(2, few)], of=2)
    assert sample.means == pytest.approx((1e8, 1.1e8))
    alone = paired_sample([pair(2, few)], of=1)
    assert alone.means == pytest.approx((1e8, 5e8))


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    logs = [0.01, 0.03, 0.02, 0.05]
    effect = paired_effect(logs, 0.0025)
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(1 - 2 * 0.0025)
    assert (math.log1p(effect.low), math.log1p(effect.high)) == pytest.approx((expected.low, expected.high))
    assert paired_effect(logs[: FEWEST_PAIRS - 1], 0.0025) is None


def test_a_clear_non_regression_needs_no_further_pair() -> None:
    def found(low: float, high: float) -> Verdict:
        middle = (low + high) / 2
        return judge(Effect(value=middle, low=low, high=high, error=0.01, runs=(4, 4)), MARGIN, paired=True)

    assert found(-0.07, -0.01) is Verdict.UNCHANGED
    assert found(-0.07, -0.03) is Verdict.IMPROVED
    # A throughput is worse where it is lower.
    more = Effect(value=0.04, low=0.01, high=0.07, error=0.01, runs=(4, 4))
    assert judge(more, MARGIN, lower_is_better=False, paired=True) is Verdict.UNCHANGED
    assert found(0.01, 0.07) is Verdict.INCONCLUSIVE
    assert found(0.03, 0.07) is Verdict.REGRESSED


def test_an_open_comparison_says_how_many_pairs_would_tell() -> None:
    effect = Effect(value=0.04, low=0.0, high=0.08, error=0.02, runs=(6, 6))
    wanted = runs_that_tell(effect, MARGIN, 0.0025, paired=True)
    assert wanted is not None

    def half(pairs: int) -> float:
        """Half the interval of a paired t test of values with a deviation of 2 %."""
        return stats.t.ppf(1 - 0.0025, pairs - 1) * 0.02 / math.sqrt(pairs)

    # Between 0.4 of the margin and the margin lie 3 %.
    assert half(wanted) <= 0.015 < half(wanted - 1)
    lost = Effect(value=0.04, low=0.0, high=0.08, error=0.9, runs=(6, 6))
    assert runs_that_tell(lost, MARGIN, 0.0025, paired=True) is None


def decision(draw: np.random.Generator, effect: float, sd: float, freedom: float) -> tuple[Verdict, int]:
    """Simulate a comparison of one cell; return its verdict and the number of its pairs."""
    scale = sd * math.sqrt((freedom - 2) / freedom)
    logs = math.log1p(effect) + scale * draw.standard_t(freedom, LOOKS * PAIRS_A_LOOK)
    for look in range(1, LOOKS + 1):
        seen = logs[: look * PAIRS_A_LOOK]
        change = judge(paired_effect(list(seen), ALPHA / LOOKS), MARGIN, paired=True)
        if change is not Verdict.INCONCLUSIVE:
            return change, len(seen)
    return Verdict.INCONCLUSIVE, len(logs)


@pytest.mark.parametrize("freedom", [200.0, 3.0], ids=["normal", "heavy tails"])
def test_four_looks_seldom_cry_wolf_and_find_five_percent(freedom) -> None:
    draw = np.random.default_rng(14)
    trials = 1000
    quiet = [decision(draw, 0.0, PAIR_SD, freedom)[0] for _ in range(trials)]
    slowed = [decision(draw, 0.05, PAIR_SD, freedom)[0] for _ in range(trials)]
    # One-sided bound of 95 % for no alarm in 1,000: 0.3 %.
    assert quiet.count(Verdict.REGRESSED) == 0
    assert slowed.count(Verdict.REGRESSED) >= 0.95 * trials
    assert slowed.count(Verdict.UNCHANGED) <= 0.01 * trials


def test_each_look_rejects_at_its_share_of_the_error_rate() -> None:
    """An interval that excludes 0 at any of four looks: at most ALPHA on each side."""
    draw = np.random.default_rng(4)
    trials, wrong = 4000, 0
    for _ in range(trials):
        logs = list(0.02 * draw.standard_normal(LOOKS * PAIRS_A_LOOK))
        effects = [paired_effect(logs[: look * PAIRS_A_LOOK], ALPHA / LOOKS) for look in range(1, LOOKS + 1)]
        wrong += any(effect is not None and effect.low > 0 for effect in effects)
    # Three standard errors above 1 %.
    assert wrong <= trials * (ALPHA + 3 * math.sqrt(ALPHA / trials))


def side(name: str, *subjects: Subject) -> Baseline:
    return Baseline(name=name, measured_at="2026-01-01T00:00:00Z", subjects=subjects)


def test_step_times_are_judged_by_pairs_and_counters_by_records() -> None:
    one = Subject(
        key="k",
        label="mlp",
        timed={"step_time": (1e6,)},
        exact={"operations": (2.0,)},
        collectives=("allreduce 0-1 4 B",) * 2,
        runs=1,
    )
    # A later pair, which records no collectives.
    later = msgspec.structs.replace(one, collectives=())
    base = merged_side("base", [side("1", one), side("2", later)], any_failure=False)
    other = Subject(key="k", label="mlp", timed={"step_time": (9e6,)}, exact={"operations": (3.0,)}, runs=1)
    new = merged_side("new", [side("1", other), side("2", other)], any_failure=True)
    sample = PairedSample(logs=(0.001, -0.001, 0.0005, 0.0), means=(1e6, 1e6))
    found = compare(base, new, Rules(margins={}, paired={"k": sample}, looks=LOOKS))
    verdicts = {finding.metric: finding.verdict for finding in found.findings}
    assert verdicts["step_time"] is Verdict.UNCHANGED
    assert verdicts["operations"] is Verdict.REGRESSED
    assert base.subjects[0].runs == 2
    assert base.subjects[0].collectives == one.collectives
    # One row is judged, at four looks.
    assert found.confidence == pytest.approx(1 - 2 * ALPHA / 4)


def test_memory_that_is_not_more_for_certain_is_unchanged_in_pairs_alone() -> None:
    """3 % less in the mean, give or take 4.6 %: the interval reaches beyond the margin on the better side."""
    before = (100.0, 104.0, 96.0, 102.0, 98.0, 100.0)
    after = tuple(0.97 * value for value in before)
    base = side("base", Subject(key="k", label="mlp", timed={"peak_memory": before}, runs=6))
    new = side("new", Subject(key="k", label="mlp", timed={"peak_memory": after}, runs=6))
    sample = PairedSample(logs=(0.0,) * 6, means=(1e6, 1e6))
    paired = compare(base, new, Rules(margins={}, paired={"k": sample})).findings[-1]
    [alone] = compare(base, new, Rules(margins={})).findings
    assert paired.metric == "peak_memory"
    assert (paired.verdict, alone.verdict) == (Verdict.UNCHANGED, Verdict.INCONCLUSIVE)
    assert "runs on each side" in alone.reason
    more = side("new", Subject(key="k", label="mlp", timed={"peak_memory": (103.0, 95.0, 111.0)}, runs=3))
    unclear = compare(base, more, Rules(margins={}, paired={"k": sample})).findings[0]
    assert (unclear.metric, unclear.verdict) == ("peak_memory", Verdict.INCONCLUSIVE)
    assert "pairs would be enough" in unclear.reason


def test_one_failed_run_fails_new_and_all_fail_base() -> None:
    good = Subject(key="k", label="mlp", timed={"step_time": (1e6,)}, runs=1)
    bad = Subject(key="k", label="mlp", failed="crashed")
    parts = [side("1", good), side("2", bad)]
    assert merged_side("new", parts, any_failure=True).subjects[0].failed == "crashed"
    assert merged_side("base", parts, any_failure=False).subjects[0].failed is None
    assert merged_side("base", parts[1:], any_failure=False).subjects[0].failed == "crashed"


def test_a_cell_that_is_planned_no_more_is_accepted_with_its_reason_and_a_failed_one_is_not() -> None:
    both = side("base", *(Subject(key=key, label=key, exact={"parameters": (5,)}) for key in "ab"))
    one = msgspec.structs.replace(both, subjects=both.subjects[:1])
    crashed = msgspec.structs.replace(both.subjects[0], failed="crashed")
    rules = Rules(margins={}, accepted={"missing": "b is measured elsewhere"})
    assert compare(both, one, Rules(margins={})).exit_code == 1
    assert compare(both, one, rules).exit_code == 0
    assert compare(both, msgspec.structs.replace(one, subjects=(crashed,)), rules).exit_code == 1


def test_a_change_that_is_accepted_with_its_reason_does_not_fail() -> None:
    one = side("base", Subject(key="k", label="mlp", exact={"operations": (2.0,), "parameters": (5,)}))
    other = side("new", Subject(key="k", label="mlp", exact={"operations": (3.0,), "parameters": (6,)}))
    found = compare(one, other, Rules(margins={}, accepted={"operations": "a second bucket"}))
    verdicts = {finding.metric: finding for finding in found.findings}
    assert verdicts["operations"].verdict is Verdict.ACCEPTED
    assert verdicts["operations"].reason.endswith("accepted: a second bucket")
    assert verdicts["parameters"].verdict is Verdict.CHANGED
    assert found.exit_code == 1
    assert (
        compare(one, other, Rules(margins={}, accepted={"operations": "a", "parameters": "b"})).exit_code == 0
    )
