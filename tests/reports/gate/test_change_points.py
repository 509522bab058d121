"""Change points: planted steps are found at their night, quiet histories have no change point."""

from __future__ import annotations

import numpy as np
import pytest

from reports.gate.trends import change_points


def history(seed: int, nights: int = 60, *, noise: float = 0.02, disturbed: float = 0.05) -> np.ndarray:
    """Around 1, with nights that others slowed by 30 % in the mean."""
    rng = np.random.default_rng(seed)
    logs = noise * rng.standard_normal(nights)
    hit = rng.random(nights) < disturbed
    logs[hit] += np.log1p(rng.exponential(0.3, int(hit.sum())))
    return np.exp(logs)


def test_a_step_is_found_at_its_night_within_eight_nights() -> None:
    found = 0
    for seed in range(40):
        values = history(seed)
        values[40:] *= 1.10
        changes = [change for change in change_points(values) if abs(change.at - 40) <= 2]
        found += bool(changes) and changes[0].seen_at < 48 and 0.06 < changes[0].effect < 0.14
    # docs/gate.md: 98.5 %. Fewer than 35 of 40 would be seen in 1 of 100 such tests.
    assert found >= 35


@pytest.mark.parametrize("kind", ["quiet", "season", "drift"])
def test_quiet_histories_have_hardly_a_change(kind) -> None:
    nights = np.arange(60)
    trend = {"quiet": 0.0 * nights, "season": 0.01 * np.sin(nights * 2 * np.pi / 7), "drift": 0.0005 * nights}
    called = sum(len(change_points(history(100 + seed) * np.exp(trend[kind]))) for seed in range(40))
    # 2,400 nights at no more than 1 of 1,000: more than 7 would be seen in 1 of 300 such tests.
    assert called <= 7


def test_an_answer_is_never_taken_back() -> None:
    values = history(3, 90)
    values[30:] *= 1.15
    values[60:] /= 1.15
    whole = change_points(values)
    assert len(whole) == 2
    for nights in range(10, 90):
        assert change_points(values[:nights]) == [change for change in whole if change.seen_at < nights]


def test_two_disturbed_nights_in_a_row_are_no_change() -> None:
    values = history(4, disturbed=0)
    values[30:32] *= 3
    assert change_points(values) == []


def test_a_series_without_noise_has_its_step_and_no_other() -> None:
    values = np.array([2.0] * 20 + [2.2] * 10)
    (change,) = change_points(values)
    assert (change.at, change.effect) == (20, pytest.approx(0.1))
    assert change_points([1.0] * 30) == change_points([1.0] * 3) == change_points([]) == []


def test_slow_drift_before_a_step_does_not_turn_its_sign() -> None:
    """10 % worse over 300 nights, of which no window sees 3 %; then 4 % better at once."""
    nights = np.arange(320)
    values = history(5, 320, noise=0.003, disturbed=0) * np.exp(np.log(1.1) * np.minimum(nights, 300) / 300)
    values[300:] *= 0.96
    (change,) = change_points(values)
    assert abs(change.at - 300) <= 1
    # The median of the 30 nights before lies half of them back: 15 / 300 of the drift.
    assert change.effect == pytest.approx(0.96 * 1.1**0.05 - 1, abs=0.005)
