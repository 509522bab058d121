"""Change points: planted steps are found at their night, quiet histories have no change point."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.text import step_sentence
from harness.features.gate.trends import Step, change_points, closest_range, place_likelihoods, trends


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
    # docs/evidence.md: 98.5 %. Fewer than 35 of 40 would be seen in 1 of 100 such tests.
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


def nights_of(*cells: np.ndarray, lacking: tuple[tuple[int, int], ...] = ()) -> list[Baseline]:
    """A night a day, each at another commit; `lacking`: the cells and the nights that lack a figure."""
    return [
        Baseline(
            name="night",
            measured_at=(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=night)).isoformat(),
            commit=f"{night}",
            subjects=tuple(
                Subject(key=str(cell), label=str(cell), timed={"step_time": (float(values[night]),)})
                for cell, values in enumerate(cells)
                if (cell, night) not in lacking
            ),
        )
        for night in range(len(cells[0]))
    ]


def steps_of(nights: list[Baseline]) -> list[Step]:
    return [step for trend in trends({"here": nights}, ("step_time",)) for step in trend.steps]


def ends(step: Step) -> tuple[int, int]:
    return int(step.range.before.commit), int(step.range.after.commit)


def step_at(place: int, seed: int, size: float, nights: int = 60) -> np.ndarray:
    values = history(seed, nights, disturbed=0)
    values[place:] *= size
    return values


def test_a_likelihood_of_two_nights_a_level_is_the_exact_one() -> None:
    """Normal noise of 1: m nights of a level, integrated over it, have exp(-squares / 2) / sqrt(m)."""
    logs = np.array([0.0, 1.2, 2.4, 3.0])
    odds = np.exp(place_likelihoods(logs, 1.0))
    squares = [sum((part - part.mean()) ** 2) for part in (logs[:1], logs[1:], logs[:2], logs[2:])]
    exact = (
        np.exp(-(squares[0] + squares[1]) / 2)
        / np.sqrt(1 * 3)
        / (np.exp(-(squares[2] + squares[3]) / 2) / np.sqrt(2 * 2))
    )
    assert odds[0] == 0
    # A night in twenty is disturbed, and may be anywhere.
    assert odds[1] / odds[2] == pytest.approx(exact, rel=0.1)


def test_the_shortest_range_with_enough_odds_is_named() -> None:
    assert closest_range(np.array([0.02, 0.05, 0.5, 0.41, 0.02])) == (2, 3)
    assert closest_range(np.array([0.02, 0.95, 0.03])) == (1, 1)
    assert closest_range(np.array([0.3, 0.3, 0.4])) == (0, 2)


def test_a_night_between_both_levels_may_belong_to_either() -> None:
    values = step_at(40, 3, 1.12)
    [clear] = steps_of(nights_of(values))
    assert (ends(clear), clear.range) == ((39, 40), clear.likeliest)
    assert clear.range.odds > 0.95
    values[40] = np.sqrt(np.median(values[20:40]) * np.median(values[41:]))
    [open_] = steps_of(nights_of(values))
    assert ends(open_) == (39, 41)
    assert open_.range.odds > 0.95
    assert 0.45 <= open_.likeliest.odds < 0.75
    assert int(open_.likeliest.before.commit) + 1 == int(open_.likeliest.after.commit)


def test_series_of_one_night_have_one_range_that_is_closer_than_their_own() -> None:
    cells = [step_at(40, seed, 1.05) for seed in (3, 11, 12)]
    alone = [step for cell in cells for step in steps_of(nights_of(cell))]
    together = steps_of(nights_of(*cells, lacking=((1, 40),)))
    assert len(together) == len(alone) == 3
    assert {step.series for step in together} == {3}
    assert len({step.range.odds for step in together}) == 1
    # The cell that lacks the night has the one after it as its first night of the new level.
    assert [ends(step) for step in together] == [(39, 40), (39, 41), (39, 40)]
    assert any(ends(step) != (39, 40) for step in alone)


def test_two_changes_are_not_pooled() -> None:
    found = steps_of(nights_of(step_at(25, 5, 1.2), step_at(40, 6, 1.2)))
    assert [(ends(step), step.series) for step in found] == [((24, 25), 1), ((39, 40), 1)]


def test_a_series_told_twice_is_no_surer() -> None:
    values = step_at(40, 3, 1.045)
    [alone], twice = steps_of(nights_of(values)), steps_of(nights_of(values, values))
    assert [step.series for step in twice] == [2, 2]
    assert [step.range.odds for step in twice] == pytest.approx([alone.range.odds] * 2)


@pytest.mark.parametrize(
    ("begin", "end", "most", "share"),
    [(0, 60, 1.3, (0.8, 1)), (20, 40, 1.15, (0.6, 1)), (39, 40, 1.1, (0, 0.1))],
    ids=["a slope", "a ramp of 20 nights", "a step"],
)
def test_a_drift_names_no_commit(begin, end, most, share) -> None:
    slope = np.interp(np.arange(60), [begin, end], [0.0, np.log(most)])
    nights = [nights_of(history(seed) * np.exp(slope)) for seed in range(20)]
    found = [
        (trend, step)
        for one in nights
        for trend in trends({"here": one}, ["step_time"])
        for step in trend.steps
    ]
    assert len(found) >= 15
    drifts = [(trend, step) for trend, step in found if step.drift]
    assert share[0] <= len(drifts) / len(found) <= share[1]
    for trend, step in drifts:
        assert "commits" not in step_sentence(trend, step)
        assert step.range.before.measured_at < step.range.after.measured_at == step.seen.measured_at
