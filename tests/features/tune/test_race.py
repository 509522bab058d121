"""The race of a tune, on surfaces whose truth is written down here."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import pytest

from harness.features.tune.race import BLOCKS, FEWEST, Rung, finalists, next_rung, standings
from harness.features.tune.records import TunedSetting, TunedTrial
from results.outcome import Outcome

Rate = Callable[[Mapping[str, str], float], float | None]
"""Samples/s of a setting in a run of some seconds; None: it runs out of memory."""
VALUES = {"strategy": ("ddp", "zero1", "fsdp"), "micro_batch": ("1", "2", "4", "8"), "bucket_mb": ("1", "25")}
DEFAULT = "ddp,1,1"


def space(predicted: Callable[[Mapping[str, str]], float | None] = lambda _: None) -> list[TunedSetting]:
    found = []
    for values in product(*VALUES.values()):
        choices = dict(zip(VALUES, values, strict=True))
        found.append(TunedSetting(id=",".join(values), choices=choices, predicted_rate=predicted(choices)))
    return found


def trials_of(rung: Rung, settings: Sequence[TunedSetting], rate: Rate) -> Iterator[TunedTrial]:
    """Return the trials of a rung. Each block has its own speed, as moments of a machine do."""
    choices = {setting.id: setting.choices for setting in settings}
    for block in range(rung.blocks):
        drift = 1 + 0.2 * math.sin(3 * rung.number + block)
        for index, name in enumerate(rung.settings):
            noise = 1 + 0.004 * math.sin(7 * index + 5 * block + rung.number)
            found = rate(choices[name], rung.budget_s)
            yield TunedTrial(
                setting=name,
                rung=rung.number,
                block=block,
                rate=found and found * drift * noise,
                outcome=Outcome.OK if found else Outcome.OUT_OF_MEMORY,
                device_s=1 + rung.budget_s if found else 1,
            )


def raced(
    settings: Sequence[TunedSetting], rate: Rate, *, left: float = math.inf
) -> tuple[list[Rung], list[TunedTrial]]:
    """Run the race to completion."""
    rungs: list[Rung] = []
    trials: list[TunedTrial] = []
    while True:
        spent = sum(trial.device_s for trial in trials)
        rung = next_rung(settings, trials, device_s_left=left - spent)
        if rung is None:
            return rungs, trials
        rungs.append(rung)
        trials += trials_of(rung, settings, rate)


def standing(settings: Sequence[TunedSetting], trials: Sequence[TunedTrial]) -> dict[str, TunedSetting]:
    return {one.id: one for one in standings(settings, trials)}


def smooth(choices: Mapping[str, str], budget_s: float = 1.0) -> float:
    """The best is fsdp with micro-batch 8 and buckets of 25."""
    factor = {"ddp": 1.0, "zero1": 0.7, "fsdp": 1.3}[choices["strategy"]]
    return 100 * factor * (int(choices["micro_batch"]) / 8) ** 0.4 * (1 + int(choices["bucket_mb"]) / 250)


def test_the_first_wave_has_the_default_and_each_value() -> None:
    settings = space(smooth)
    rung = next_rung(settings, [])
    assert rung.settings[0] == DEFAULT
    assert rung.number == 0
    assert rung.blocks == 1
    assert len(rung.settings) == FEWEST == len(set(rung.settings))
    tried = {value for name in rung.settings for value in name.split(",")}
    assert tried == {value for values in VALUES.values() for value in values}
    # Beyond one setting for each new value it follows the prediction.
    assert "fsdp,8,25" in rung.settings


@pytest.mark.parametrize("left", [math.inf, 200.0, 60.0])
@pytest.mark.parametrize("predicted", [smooth, lambda _: None, lambda one: 1 / smooth(one)])
def test_the_best_is_first(left, predicted) -> None:
    settings = space(predicted)
    _rungs, trials = raced(settings, smooth, left=left)
    first = standings(settings, trials)[0]
    assert smooth(dict(zip(VALUES, first.id.split(","), strict=True))) >= 0.97 * smooth(
        {"strategy": "fsdp", "micro_batch": "8", "bucket_mb": "25"}
    )
    assert sum(trial.device_s for trial in trials) <= left


def test_no_setting_runs_twice_at_a_budget_and_rungs_have_longer_ones() -> None:
    rungs, _ = raced(space(), smooth)
    assert [rung.number for rung in rungs] == list(range(len(rungs)))
    pairs = [(name, rung.budget_s) for rung in rungs for name in rung.settings]
    assert len(pairs) == len(set(pairs))
    levels = sorted({rung.budget_s for rung in rungs})
    assert len(levels) == len(BLOCKS)
    for rung in rungs:
        level = levels.index(rung.budget_s)
        assert rung.blocks == BLOCKS[level]
        below = {
            one
            for lower in rungs[: rung.number]
            for one in lower.settings
            if level and lower.budget_s == levels[level - 1]
        }
        assert not level or set(rung.settings) <= below


def test_no_time_left_ends_the_race() -> None:
    settings = space(smooth)
    _, trials = raced(settings, smooth)
    for last in range(max(trial.rung for trial in trials)):
        some = [trial for trial in trials if trial.rung <= last]
        assert next_rung(settings, some, device_s_left=0.0) is None


def test_the_order_of_the_trials_is_no_matter() -> None:
    settings = space(smooth)
    _, trials = raced(settings, smooth, left=200.0)
    last = max(trial.rung for trial in trials)
    for until in range(1, last + 1):
        some = [trial for trial in trials if trial.rung < until]
        left = 200.0 - sum(trial.device_s for trial in some)
        rung = next_rung(settings, some, device_s_left=left)
        assert rung == next_rung(settings, some[::-1], device_s_left=left)
        assert rung.number == until
        assert set(rung.settings) == {trial.setting for trial in trials if trial.rung == until}


def test_what_is_fast_only_at_first_falls_back() -> None:
    def decoy(choices: Mapping[str, str], budget_s: float) -> float:
        fast = choices["strategy"] == "zero1" and choices["micro_batch"] == "2"
        return smooth(choices) * (1 + 9 * math.exp(-budget_s) if fast else 1)

    settings = space()
    _, trials = raced(settings, decoy)
    first = max(trials, key=lambda trial: trial.rate or 0)
    assert first.setting.startswith("zero1,2")
    found = standing(settings, trials)
    assert found[first.setting].state == "out"
    assert next(iter(found)) == "fsdp,8,25"


def test_an_interval_separates_the_slow_and_not_the_equal() -> None:
    def equal(choices: Mapping[str, str], budget_s: float) -> float:
        return 50.0 if choices["strategy"] == "zero1" else 100.0

    settings = space()
    wave = tuple(setting.id for setting in settings)[:12]
    rungs = [
        Rung(number=level, settings=wave, blocks=blocks, budget_s=3) for level, blocks in enumerate(BLOCKS)
    ]
    trials = [trial for rung in rungs for trial in trials_of(rung, settings, equal)]
    for name, one in standing(settings, trials).items():
        if one.rate is not None:
            assert one.state == ("out" if name.startswith("zero1") else "racing")
    # Three are the fastest, and no interval lets the second of these into the final.
    there = [one for name, one in standing(settings, trials).items() if one.rate is not None]
    slow = next(one for one in there if one.state == "out")
    assert finalists([there[0], slow, there[1], there[2]]) == (there[0].id, there[1].id)


def test_running_out_of_memory_is_an_answer() -> None:
    def walled(choices: Mapping[str, str], budget_s: float) -> float | None:
        too_large = choices["strategy"] == "ddp" and int(choices["micro_batch"]) > 1
        return None if too_large else smooth(choices)

    settings = space(smooth)
    _, trials = raced(settings, walled)
    found = standing(settings, trials)
    ran = {trial.setting for trial in trials}
    for name, one in found.items():
        if name.startswith("ddp") and ",1," not in name:
            assert one.state in ("failed", "dropped")
            assert one.rate is None
    assert any(one.state == "failed" and "memory" in one.why for one in found.values())
    for bucket in VALUES["bucket_mb"]:
        for low, high in (("2", "4"), ("4", "8"), ("2", "8")):
            smaller, larger = f"ddp,{low},{bucket}", f"ddp,{high},{bucket}"
            if smaller in ran and larger not in ran:
                assert "micro-batch" in found[larger].why
    assert next(iter(found)) == "fsdp,8,25"


def test_of_unequal_accumulation_no_failure_is_inferred() -> None:
    def accumulated(times: str, micro: str) -> TunedSetting:
        choices = {"strategy": "fsdp", "micro_batch": micro, "accumulation": times}
        return TunedSetting(id=f"{times} x {micro}", choices=choices)

    settings = [accumulated("8", "2"), accumulated("4", "4"), accumulated("8", "4")]
    trial = TunedTrial(
        setting="8 x 2", rung=0, block=0, rate=None, outcome=Outcome.OUT_OF_MEMORY, device_s=1.0
    )
    states = {one.id: one.state for one in standings(settings, [trial])}
    # Accumulation takes memory too, and the second has less of it.
    assert states["4 x 4"] == "waiting"
    assert states["8 x 4"] == "dropped"


def test_a_space_in_which_nothing_fits_is_searched_to_its_end() -> None:
    settings = space()
    _, trials = raced(settings, lambda *_: None)
    found = standing(settings, trials)
    assert {one.state for one in found.values()} == {"failed", "dropped"}
    smallest = {name for name in found if ",1," in name}
    assert all(found[name].state == "failed" for name in smallest)


@pytest.mark.parametrize("too_large", [0, 1])
def test_a_worker_that_dies_in_each_trial_ends_the_race(too_large) -> None:
    settings = space()
    outcomes = [Outcome.OUT_OF_MEMORY] * too_large + [Outcome.CRASHED] * FEWEST
    trials = [
        TunedTrial(setting=one.id, rung=0, block=0, outcome=outcome, device_s=1.0)
        for one, outcome in zip(settings, outcomes, strict=False)
    ]
    assert next_rung(settings, trials) is None


def after(names: Sequence[str], settings: Sequence[TunedSetting]) -> dict[str, TunedSetting]:
    """The standings after short trials of these settings."""
    rung = Rung(number=0, settings=tuple(names), blocks=1, budget_s=1)
    return standing(settings, list(trials_of(rung, settings, smooth)))


def test_a_prediction_drops_only_after_enough_trials_of_each_value() -> None:
    settings = space(smooth)
    names = [one.id for one in settings if one.choices["strategy"] != "zero1"]
    few = after(names[: FEWEST - 1], settings)
    assert {one.state for one in few.values()} == {"racing", "waiting"}
    found = after(names, settings)
    # The prediction is right, and `zero1` is predicted to be slow; but no trial has run it.
    assert all(one.state == "waiting" for name, one in found.items() if name.startswith("zero1"))
    seen = after([*names, "zero1,1,1"], settings)
    dropped = {name for name, one in seen.items() if one.state == "dropped"}
    assert "zero1,1,25" in dropped
    assert "zero1,2,1" in dropped
    # A setting without `bucket_mb` has its default there, which no trial has run.
    plain = TunedSetting(id="plain", choices={"strategy": "zero1", "micro_batch": "1"}, predicted_rate=1e-9)
    assert after([*names, "zero1,1,1"], [*settings, plain])["plain"].state == "waiting"


def test_a_prediction_that_the_trials_refute_drops_nothing() -> None:
    def wrong(choices: Mapping[str, str]) -> float:
        return smooth(choices) * math.exp(1.5 * math.sin(97 * hash_of(choices)))

    names = [one.id for one in space()][::2]
    kept = after([*names, "zero1,1,25"], space(wrong))
    assert not [one for one in kept.values() if one.state == "dropped" and one.id.startswith("fsdp,8")]
    exact = after([*names, "zero1,1,25"], space(smooth))
    dropped = [sum(one.state == "dropped" for one in found.values()) for found in (kept, exact)]
    assert dropped[0] < dropped[1]


def hash_of(choices: Mapping[str, str]) -> int:
    return sum(map(ord, "".join(choices.values())))
