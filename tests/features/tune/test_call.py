"""A call of `bench tune`: the options that it takes, its limits, and how it reads its trials."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness.features.tune.call import Tune
from harness.features.tune.race import BLOCKS, GROWTH
from harness.features.tune.records import TunedTrial, read_record
from harness.matrix import Matrix
from harness.plan.study_file import StudyFile
from results.errors import MachineError, UsageError
from results.outcome import Evidence, Outcome
from results.rebuild import rebuilt_plan
from results.run import RunResult
from results.statistics import Metric
from results.store import Study

OPTIONS = {"workload": "mlp", "gpus": "2", "device": "cpu", "strategy": "ddp", "compile": "false"}
FIXED = {"global_batch_size": "64", "activation_checkpointing": "false"}


def tune_of(space_file: Path | None = None, **options: Any) -> Tune:
    return Tune(StudyFile(**OPTIONS | options), space_file=space_file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workload": "mlp,gpt-nano"}, "one value of --workload"),
        ({"workload": None}, "one workload"),
        ({"gpus": "1..2"}, "one value of --gpus"),
        ({"dataset": "digits,synthetic"}, "one value of --dataset"),
        ({"seed": "0,1"}, "one value of --seed"),
        ({"global_batch_size": "64,128"}, "one value of --global-batch-size"),
        ({"global_batch_size": "64", "batch_size": "32"}, "follows from the other"),
        ({"batch_size": "auto"}, "--global-batch-size N"),
        ({"batch_size": "AUTO"}, "--global-batch-size N"),
    ],
)
def test_options_of_several_cells_or_of_an_unknown_batch_are_refused(options, said) -> None:
    with pytest.raises(UsageError, match=said):
        tune_of(**options)


def test_a_space_file_cannot_have_an_unknown_batch() -> None:
    path = Path("space.yaml")
    path.write_text("batch_size: auto\n")
    with pytest.raises(UsageError, match="--global-batch-size N"):
        tune_of(path)


@pytest.mark.parametrize("limit", [{"max_gpu_hours": 0.05}, {"max_time": "90s"}])
def test_both_limits_hold_for_the_search_and_the_final(limit) -> None:
    tune = tune_of(**FIXED | limit)
    assert 0 < tune._final[1] <= 0.4 * 90
    assert 0 < tune._left_s(0.9) < tune._left_s() <= 90 - tune._final[1]
    assert tune._worst_device_s() <= 2 * 90


def test_a_trial_is_as_long_as_its_rung_says() -> None:
    tune = tune_of(**FIXED)
    for level in range(len(BLOCKS)):
        steps = tune._policy(GROWTH**level)
        assert steps.budget_s <= steps.max_blocks * steps.block_steps * 1e-3


def run_of(tune: Tune, cell_id: str, run_id: str) -> RunResult:
    return RunResult(
        cell_id=cell_id,
        run_id=run_id,
        launch_id="launch",
        repeat=1,
        outcome=Outcome.OK,
        reason=None,
        evidence=Evidence.MEASURED,
        started_at=None,
        ranks_expected=2,
        ranks_present=2,
        step_ns=Metric(value=1e6, unit="ns", low=None, high=None, samples=1, interval=None),
        spent_ns={"measure": 10**9},
    )


def test_a_run_is_the_trial_of_one_rung(monkeypatch) -> None:
    """Two rungs have its cell, as conditions changed between them."""
    tune = tune_of(**FIXED)
    cell = msgspec.structs.replace(tune._space.default.cell, steps=tune._policy(1.0))
    for number in range(2):
        plan = rebuilt_plan("trials", [cell], ())
        tune._trials.add_plan(msgspec.structs.replace(plan, created_at=f"2026-11-27T00:00:0{number}.000Z"))
    run = run_of(tune, cell.id, "run")
    monkeypatch.setattr(Study, "results", lambda *_, **__: [run])
    (trial,) = tune._read_trials()
    assert (trial.setting, trial.rung, trial.device_s) == (tune._space.default.setting.id, 1, 2.0)


def test_the_last_rung_resets_each_choice_of_the_fastest() -> None:
    tune = tune_of(**FIXED | {"accumulation": "1"})
    by_strategy = {one.cell.strategy: one for one in tune._space.candidates}
    fastest = by_strategy["ddp:bucket_mb=5.0:bucket_view=true"].setting
    first, *others = sorted(tune._space.candidates, key=lambda one: one.setting.id != fastest.id)
    Path("runs").mkdir()
    trial = TunedTrial(setting=first.setting.id, rung=0, block=1, outcome=Outcome.OK, rate=1.0, device_s=1.0)
    tune._read_trials = lambda: [trial]
    tune._root.mkdir()
    tune._update()
    found = {tune._space.by_id[one].cell.strategy for one in tune._around_the_first()}
    assert found == {first.cell.strategy, "ddp:bucket_mb=5.0", "ddp:bucket_view=true"}
    assert others


def test_trials_that_all_ran_out_of_memory_name_the_nearest_setting() -> None:
    tune = tune_of(**FIXED)
    failed = (
        TunedTrial(setting=one.id, rung=0, block=1, outcome=Outcome.OUT_OF_MEMORY)
        for one in tune._space.settings
    )
    tune._tuning = msgspec.structs.replace(tune._tuning, trials=tuple(failed))
    with pytest.raises(UsageError, match="no setting of the space fits: the nearest"):
        tune._require_rates()


@pytest.mark.parametrize("rates", [[], [2.0, 3.0]])
def test_a_search_that_the_cluster_cuts_short_says_what_it_measured_and_what_it_did_not(
    monkeypatch, rates
) -> None:
    """The launches of a rung are not created: its error ends the call."""
    tune = tune_of(**FIXED)
    settings = [one.setting.id for one in tune._space.candidates]
    kept = [
        TunedTrial(setting=one, rung=0, block=1, outcome=Outcome.OK, rate=rate, device_s=1.0)
        for one, rate in zip(settings, rates, strict=False)
    ]

    def refused(*_: object, **__: object) -> int:
        raise MachineError("3 launches in a row ended, the last one because Requested nodes are busy")

    call = SimpleNamespace(check=lambda *_: None, run=refused)
    monkeypatch.setattr(tune, "_limited", lambda *_, **__: call)
    monkeypatch.setattr(tune, "_read_trials", lambda: kept)
    tune._root.mkdir(parents=True)
    with pytest.raises(MachineError, match="Requested nodes are busy") as found:
        tune._race(0)
    said, fastest = str(found.value), tune._space.by_id[settings[1]].words
    assert (f"measured 2 of {len(settings)} settings" in said) == bool(rates)
    assert (f"3.00 samples/s: {fastest}" in said) == bool(rates)
    record = read_record(tune._root)
    assert list(record.trials) == kept
    if rates:
        tune._update(ended="the race was over", final=(settings[1],))
        monkeypatch.setattr(Matrix, "run", refused)
        with pytest.raises(MachineError, match=f"measured 2 of {len(settings)} settings"):
            tune.run(report=False)


def test_a_folder_whose_record_was_deleted_is_the_folder_of_the_tune() -> None:
    tune = tune_of(**FIXED)
    tune._trials.add_plan(rebuilt_plan("trials", [tune._space.default.cell], ()))
    assert not Study.for_planning(tune._root).is_there
