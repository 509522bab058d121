"""The noise of a machine: margins worked out by hand, their file, and how `bench compare` uses them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.cli import run
from harness.features.gate.baselines import save_thresholds
from harness.features.gate.noise import LARGEST, margin, margins, noise
from harness.features.gate.records.baseline import (
    BASELINE,
    THRESHOLDS,
    MetricNoise,
    Thresholds,
    thresholds_path,
)


def known(between: float, runs: int = 11) -> MetricNoise:
    return MetricNoise(runs=runs, between=between)


def test_the_margin_of_ten_runs_a_side_by_hand() -> None:
    # Chi-square with 10 degrees of freedom is above 6.179 with 80 %; Student's t with 18 at 1 - 0.01 / 1 is
    # 2.552; the half-width 2.552 x 1.2721 % x sqrt(2 / 10) = 1.452 % has to be 0.3 of the margin.
    assert margin(known(0.01), 10, 1) == pytest.approx(0.0484, abs=0.0001)


def test_margins_are_whole_percents_and_neither_below_the_metrics_own_nor_useless() -> None:
    found = {"step_time": known(0.001), "peak_memory": known(0.02), "startup": known(0.2)}
    written = margins(found | {"throughput": known(0.01)})
    assert written.keys() == {"step_time", "peak_memory"}, "startup needs more than the largest margin"
    assert written["step_time"] == 0.05
    assert 0.05 < written["peak_memory"] <= LARGEST
    assert round(100 * written["peak_memory"], 9) % 1 == 0


def test_noise_is_between_launches_and_the_steps_own_error_is_apart(tmp_path, new_study) -> None:
    made = new_study(tmp_path)
    made.points("ddp", {2: [10.0, 11.0, 12.1]})
    made.plan()
    found = noise(made.study.results())
    # Logarithms 0, ln 1.1 and 2 ln 1.1 apart: their standard deviation is ln 1.1.
    assert found["step_time"].between == pytest.approx(0.09531, abs=1e-4)
    assert found["step_time"].runs == 3
    assert found["throughput"].between == pytest.approx(0.09531, abs=1e-4)
    assert found["throughput"].within is None
    assert noise(made.study.results()[:2]) == {}


def test_compare_takes_the_margins_of_its_machine_below_the_baselines_and_the_calls(
    tmp_path, new_study, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, times in (("before", [10.0, 10.05, 10.1]), ("after", [11.0, 11.05, 11.1])):
        made = new_study(tmp_path / name)
        made.points("ddp", {2: times})
        made.plan()
    assert run(["compare", "before", "after"]) == 1
    assert run(["baseline", "save", "main", "before"]) == 0
    kept = BASELINE.read(Path("baselines/main.json"))
    facts = kept.subjects[0].facts
    machine = facts.get("device_name") or facts["cpu_model"]
    path = save_thresholds(
        Thresholds(
            machine=machine, measured_at="", seconds=1, cell="", noise={}, fail_above={"step_time": 0.2}
        )
    )
    assert path == thresholds_path(machine, Path("baselines"))
    capsys.readouterr()
    assert run(["compare", "before", "after"]) == 0
    assert f"margins of this machine's noise: {path}" in capsys.readouterr().err
    assert run(["compare", "before", "after", "--fail-above", "step_time=5%"]) == 1
    own = msgspec.structs.replace(kept, fail_above={"step_time": 0.05})
    Path("baselines/main.json").write_bytes(BASELINE.encode(own))
    assert run(["compare", "main", "after"]) == 1
    assert run(["baseline", "list"]) == 0, "thresholds are no baseline"
    path.write_text('{"schema": "bench/thresholds", ')
    assert run(["compare", "before", "after"]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_budget_that_is_too_short_is_refused(capsys) -> None:
    assert run(["doctor", "--noise", "--budget", "10s"]) == 2
    assert "--budget 10s is too short: 3 launches take 30s or more" in capsys.readouterr().err


@pytest.mark.slow
def test_the_noise_of_this_machine_is_measured_in_fresh_launches(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--noise", "--budget", "30s"]) == 0
    (path,) = Path("baselines/thresholds").glob("*.json")
    assert str(path) in capsys.readouterr().out
    measured = THRESHOLDS.read(path)
    assert measured.noise["step_time"].runs >= 3
    assert measured.noise["step_time"].between > 0
    assert measured.noise["step_time"].within is not None
    assert {"peak_memory", "startup"} <= measured.noise.keys()
    assert all(0.05 <= share <= LARGEST for name, share in measured.fail_above.items() if name != "startup")
