"""The answer of a tune, from planted runs of its final and planted trials; and its section of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from generated_study import large_study
from launching import a_result

from harness.features.tune.answer import answer_of
from harness.features.tune.call import Tune
from harness.features.tune.records import TunedSetting, TunedTrial, Tuning, TuningAnswer
from harness.features.tune.space import Space
from harness.plan.study_file import StudyFile
from reports.page.render import render_figures
from results.outcome import Evidence, Outcome
from results.rebuild import rebuilt_plan
from results.run import RunResult
from results.statistics import Metric

PLAIN, VIEW, LARGE = "ddp", "ddp:bucket_view=true", "ddp:bucket_mb=100.0"
RATES: Mapping[str, Sequence[float]] = {
    PLAIN: (100.0, 101.0, 99.0),
    VIEW: (130.0, 131.0, 129.0),
    LARGE: (130.5, 129.5, 130.0),
}


@pytest.fixture
def space() -> Space:
    options = {"workload": "mlp", "gpus": "2", "device": "cpu", "strategy": "ddp", "global_batch_size": "64"}
    fixed = {"accumulation": "1", "compile": "false", "activation_checkpointing": "false"}
    return Tune(StudyFile(**options | fixed))._space


def ids(space: Space) -> dict[str, str]:
    return {one.cell.strategy: one.setting.id for one in space.candidates}


def answered(
    space: Space,
    rates: Mapping[str, Sequence[float]],
    trials: Sequence[TunedTrial] = (),
    lost: Sequence[RunResult] = (),
    **fields: Any,
) -> TuningAnswer | None:
    """The answer to a final in which the strategies have these samples/s, a value a run."""
    names = ids(space)
    tuning = Tuning(
        command="bench tune",
        default=names[PLAIN],
        settings=tuple(
            TunedSetting(id=one.setting.id, choices=dict(one.setting.choices)) for one in space.candidates
        ),
        trials=tuple(trials),
        final=tuple(names[strategy] for strategy in RATES),
    )
    cells = {one.cell.strategy: one.cell for one in space.candidates if one.cell.strategy in RATES}
    runs = [
        RunResult(
            cell_id=cells[strategy].id,
            run_id=f"{strategy}-{repeat}",
            launch_id="launch",
            repeat=repeat,
            outcome=Outcome.OK if rate else Outcome.OUT_OF_MEMORY,
            reason=None,
            evidence=Evidence.MEASURED,
            started_at=None,
            ranks_expected=2,
            ranks_present=2,
            step_ns=None
            if not rate
            else Metric(value=64 / rate * 1e9, unit="ns", low=None, high=None, samples=1, interval=None),
        )
        for strategy, each in rates.items()
        for repeat, rate in enumerate(each, 1)
    ]
    tuning = msgspec.structs.replace(tuning, **fields)
    plan = rebuilt_plan("final", list(cells.values()), ())
    plan = msgspec.structs.replace(plan, request=msgspec.structs.replace(plan.request, repeats=3))
    return answer_of(tuning, space, plan, runs, trains=True, lost=lost)


def test_the_fastest_is_the_answer_with_its_gain_over_the_default(space) -> None:
    found = answered(space, {PLAIN: RATES[PLAIN], VIEW: RATES[VIEW], LARGE: (120.0, 121.0, 119.0)})
    assert found.setting == ids(space)[VIEW]
    assert found.gain.value == pytest.approx(1.3, rel=0.01)
    assert found.gain.low is not None
    assert 1.2 < found.gain.low < found.gain.value
    assert found.commands[0].startswith("bench matrix --workload mlp")
    assert "--strategy ddp:bucket_view=true" in found.commands[0]
    assert found.commands[1].endswith("--steps 1000")


def test_of_settings_without_a_difference_the_simplest_is_the_answer(space) -> None:
    # Equal distance from the default: then the faster one.
    found = answered(space, RATES)
    assert found.setting == ids(space)[max(VIEW, LARGE, key=lambda one: sum(RATES[one]))]
    assert "do not differ from it significantly" in found.sentence
    assert any("Not significantly different" in remark for remark in found.remarks)


def test_a_default_that_nothing_beats_is_best(space) -> None:
    slower = answered(space, {PLAIN: (100.0, 99.0, 101.0), VIEW: (50.0, 49.5, 50.5)})
    equal = answered(space, {PLAIN: (100.0, 99.0, 101.0), VIEW: (100.5, 101.5, 99.5)})
    for found in (slower, equal):
        assert found.setting == ids(space)[PLAIN]
        assert (found.gain, found.commands) == (None, ())
        assert found.sentence.startswith("The default is best") == (found is slower)


def test_what_may_be_faster_than_the_default_is_named_with_its_ratio(space) -> None:
    found = answered(space, {PLAIN: (100.0, 60.0, 140.0), VIEW: (123.0, 80.0, 166.0)})
    assert found.setting == ids(space)[PLAIN]
    assert "bucket_view true, has 1.23" in found.sentence
    assert "(0.57" in found.sentence


def test_one_setting_is_the_answer_without_a_comparison(space) -> None:
    found = answered(space, {PLAIN: (100.0, 101.0, 99.0)})
    assert found.gain is None
    assert "only setting" in found.sentence


def test_an_answer_is_shown_to_be_faster_than_the_default(space) -> None:
    """The simpler setting differs from neither."""
    rates = {PLAIN: (100.0, 101.0, 99.0), VIEW: (80.0, 160.0, 120.0), LARGE: (130.0, 131.0, 129.0)}
    found = answered(space, rates)
    assert found.setting == ids(space)[LARGE]
    assert (found.gain.low or 0) > 1


def test_runs_that_the_final_lacks_are_said(space) -> None:
    found = answered(space, {PLAIN: RATES[PLAIN], VIEW: RATES[VIEW][:2]})
    # One run of a setting, and all of another.
    assert any("lacks 4 runs" in remark for remark in found.remarks)
    assert not any("lacks" in remark for remark in (answered(space, RATES) or found).remarks)


def test_a_default_without_a_figure_has_no_gain_stated_over_it(space) -> None:
    found = answered(space, {PLAIN: (0.0,), VIEW: RATES[VIEW]})
    assert (found.setting, found.gain) == (ids(space)[VIEW], None)
    assert any("no gain" in remark for remark in found.remarks)
    assert answered(space, {PLAIN: (0.0,)}) is None


def test_settings_that_the_cluster_took_away_are_in_the_answer(space) -> None:
    """One setting has only a trial whose step was not created, and the time was over before the next one."""
    names, rates = ids(space), {PLAIN: RATES[PLAIN]}
    reason = "the scheduler started no process within 120 s: Requested nodes are busy"
    lost = TunedTrial(setting=names[VIEW], rung=0, block=1, outcome=Outcome.NODE_FAILED, reason=reason)
    run = a_result(outcome=Outcome.NODE_FAILED, reason=reason)
    found, fine = answered(space, rates, [lost], lost=[run]), answered(space, rates)
    assert (found.taken, fine.taken) == (len(space.settings) - 1, 0)
    assert reason in found.remarks[0]
    assert not any("took away" in remark for remark in fine.remarks)


def test_a_choice_contributes_what_interleaved_trials_show(space) -> None:
    names = ids(space)

    def trial(strategy: str, rung: int, block: int, rate: float) -> TunedTrial:
        return TunedTrial(setting=names[strategy], rung=rung, block=block, outcome=Outcome.OK, rate=rate)

    trials = [
        trial(VIEW, 1, 1, 130.0),
        trial(PLAIN, 1, 1, 100.0),
        trial(VIEW, 1, 2, 150.0),
        trial(PLAIN, 1, 2, 120.0),
        # In another rung the machine was slower: not compared.
        trial(PLAIN, 0, 1, 10.0),
        # Two choices away: no single one brought it.
        trial(LARGE, 1, 1, 110.0),
    ]
    found = answered(space, {PLAIN: RATES[PLAIN], VIEW: RATES[VIEW]}, trials)
    [one] = found.contributions
    assert (one.choice, one.value, one.instead) == ("bucket_view", "true", "default")
    assert one.ratio.value == pytest.approx((1.3 + 1.25) / 2)


def test_the_page_has_the_answer_and_every_trial_with_its_end(space) -> None:
    names = ids(space)
    trials = [
        TunedTrial(
            setting=names[strategy],
            rung=0,
            block=1,
            outcome=outcome,
            reason=reason,
            rate=rate,
            memory_bytes=2**26 + number * 2**20,
            device_s=2.0,
        )
        for number, (strategy, outcome, reason, rate) in enumerate(
            [
                (PLAIN, Outcome.OK, None, 100.0),
                (VIEW, Outcome.OK, None, 130.0),
                (LARGE, Outcome.OUT_OF_MEMORY, "the kernel killed rank 1", None),
            ]
        )
    ]
    tuning = Tuning(
        command="bench tune",
        default=names[PLAIN],
        settings=(TunedSetting(id=names[VIEW], choices={"strategy": "ddp", "bucket_view": "true"}),),
        trials=tuple(trials),
        ended="the race is over",
        answer=answered(space, RATES, trials),
    )
    figures = large_study(sizes=(2, 4))
    assert 'id="tuning"' not in render_figures(figures)
    page = render_figures(replace(figures, added={"tuning": tuning}))
    for told in (
        "do not differ from it significantly",
        "the kernel killed rank 1",
        "figure-tuning-course",
        "figure-tuning-frontier",
    ):
        assert told in page
    assert "no answer yet" in render_figures(
        replace(figures, added={"tuning": msgspec.structs.replace(tuning, answer=None)})
    )
