"""The rule by which a study grows, on generated step times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packages import module_at

from harness.features.until.growth import LEAST_RUNS, Ladder, next_step
from reports.analysis.knee import Size, knee_of, odds_of

BANDS = module_at(Path(__file__).parent / "bands.py")
FULL = BANDS.REPEATS * sum(BANDS.GPUS)


def _size(gpus: int, *steps: float, rounds: tuple[int, ...] = ()) -> Size:
    return Size(gpus=gpus, batch=8 * gpus, steps=steps, left_out=0, rounds=rounds or tuple(range(len(steps))))


def _ladder(*measured: Size, **fields: object) -> Ladder:
    return Ladder(sizes=(1, 2, 4, 8), measured=measured, **fields)


def test_a_study_begins_with_its_two_smallest_sizes_that_can_run() -> None:
    assert next_step(_ladder(), 0.95).sizes == (1, 2)
    assert next_step(_ladder(lost=frozenset({2})), 0.95).sizes == (1, 4)
    assert next_step(_ladder(lost=frozenset({2, 4, 8})), 0.95).end == "no sizes"


def test_a_growth_that_pays_brings_the_next_size_with_the_baseline_and_the_size_before_it() -> None:
    step = next_step(_ladder(_size(1, 1.0), _size(2, 1.05)), 0.95)
    assert (step.sizes, step.end) == ((1, 2, 4), None)


def test_a_growth_that_does_not_pay_brings_the_size_and_both_neighbours_again() -> None:
    step = next_step(_ladder(_size(1, 1.0), _size(2, 1.05), _size(4, 1.9)), 0.95)
    assert (step.sizes, step.end) == ((1, 2, 4), None)
    assert step.knee is not None
    assert step.knee.size == 2


def test_a_size_is_certain_only_with_three_runs_of_each_deciding_size() -> None:
    sharp = [(1.0, 1.001, 0.999), (1.05, 1.051, 1.049), (1.9, 1.901, 1.899)]
    two = next_step(_ladder(*(_size(g, *t[:2]) for g, t in zip((1, 2, 4), sharp, strict=True))), 0.95)
    three = next_step(_ladder(*(_size(g, *t) for g, t in zip((1, 2, 4), sharp, strict=True))), 0.95)
    assert two.end is None
    assert three.end == "certain"
    assert LEAST_RUNS == 3


def test_a_failed_size_at_which_the_knee_may_lie_is_not_certain() -> None:
    sharp = [_size(1, 1.0, 1.001, 0.999), _size(2, 1.05, 1.051, 1.049), _size(8, 2.9, 2.901, 2.899)]
    lost = frozenset({4})
    assert next_step(_ladder(*sharp, lost=lost, holes=lost), 0.95).end == "hole"
    assert next_step(_ladder(*sharp, lost=lost), 0.95).end == "certain", "another run would not help"


def test_drift_from_round_to_round_does_not_look_like_scaling() -> None:
    """The later a round, the slower it is: sizes that ran late would look slow."""
    rounds = {1: (1, 2, 3, 4, 5), 2: (1, 2), 4: (2, 3), 8: (3, 4, 5)}
    pace = {1: 1.0, 2: 1.2, 3: 1.45, 4: 1.7, 5: 2.1}
    own = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3}
    wiggle = {(1, 2): 1.001, (2, 1): 0.999, (8, 4): 1.002}
    sizes = [
        _size(g, *(own[g] * pace[r] * wiggle.get((g, r), 1) for r in rs), rounds=rs)
        for g, rs in rounds.items()
    ]
    found = knee_of(sizes)
    assert found.at is None
    assert found.odds is not None
    assert found.odds[8] > 0.99
    apart = odds_of([replace(one, rounds=()) for one in sizes])
    assert apart is not None
    assert apart[8] < 0.9


@pytest.mark.parametrize("family", BANDS.FAMILIES, ids=lambda family: family.name)
def test_no_study_takes_a_tenth_more_gpu_hours_than_the_full_matrix(family) -> None:
    found, _, _ = BANDS.family_of(family, 12)
    assert max(one.gpu_runs for one in found) <= 1.1 * FULL


@pytest.mark.slow
@pytest.mark.parametrize("family", BANDS.FAMILIES, ids=lambda family: family.name)
def test_a_certain_size_is_the_true_one(family) -> None:
    _, share, _ = BANDS.family_of(family, 400)
    assert share >= 0.93


def test_a_clear_knee_at_a_small_size_takes_a_small_part_of_the_matrix() -> None:
    found, share, _ = BANDS.family_of(BANDS.Family(name="quiet", noise=0.005), 30)
    small = [one for one in found if one.true <= 8]
    assert share == 1
    assert max(one.gpu_runs for one in small) < 0.2 * FULL
