"""A tune that has not measured its final is a study to all commands, and a wrong call leaves no folder."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import cell_of
from launching import a_job

from harness.cli import run
from harness.features.tune.batches import BATCH_RUNS
from harness.features.tune.call import Tune
from harness.features.tune.records import TRIALS, TUNING, TUNING_FILE, TunedSetting, TunedTrial, Tuning
from harness.plan.study_file import StudyFile
from results.errors import UsageError
from results.job_store import JobStore
from results.outcome import Outcome
from results.rebuild import rebuilt_plan
from results.store import Study

ROOT = Path("study")
SEARCHED = Tuning(
    command="bench tune",
    default="a",
    settings=(
        TunedSetting(id="a", choices={"strategy": "ddp"}, state="racing", rate=3.0),
        TunedSetting(id="b", choices={"strategy": "zero1"}),
    ),
    trials=(TunedTrial(setting="a", rung=0, block=1, outcome=Outcome.OK, rate=3.0, device_s=4.0),),
)
OPTIONS = {"workload": "mlp", "gpus": "2", "device": "cpu", "global_batch_size": "64"}


@pytest.mark.parametrize("nested", [BATCH_RUNS, TRIALS])
@pytest.mark.parametrize("of", [TUNING_FILE, "jobs"])
def test_status_is_of_the_study_and_names_the_short_runs_in_it(nested, of, capsys) -> None:
    Study(ROOT / nested).add_plan(rebuilt_plan(nested, [cell_of()], ()))
    if of == "jobs":
        JobStore(ROOT).add(a_job(cells=()), document="", name="script.sh")
        assert run(["cancel", "study", "--forget"]) == 0
    else:
        (ROOT / TUNING_FILE).write_bytes(TUNING.encode(SEARCHED))
    capsys.readouterr()
    assert run(["status", "study", "--watch"]) == 0
    said = capsys.readouterr()
    assert f"bench status study/{nested}" in said.err
    assert cell_of().id not in said.out
    assert ("0001-1x1" in said.out) == (of == "jobs")
    # A folder of studies lists it, and not what is in it.
    assert run(["status", "."]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["study", "study"]


def test_the_page_of_a_search_has_its_trials(capsys) -> None:
    ROOT.mkdir()
    (ROOT / TUNING_FILE).write_bytes(TUNING.encode(SEARCHED))
    assert run(["report", "study"]) == 0
    page = (ROOT / "report.html").read_text()
    assert re.findall(r'<section[^>]* id="([^"]+)"', page)[0] == "tuning"
    assert ">ddp<" in page


def test_a_redacted_site_leaves_out_a_tune_without_a_final_and_keeps_the_others(capsys) -> None:
    Study(Path("runs/measured")).add_plan(rebuilt_plan("measured", [cell_of()], ()))
    Path("runs/searched").mkdir()
    Path("runs/searched", TUNING_FILE).write_bytes(TUNING.encode(SEARCHED))
    assert run(["site", "runs", "--redact"]) == 0
    assert "runs/searched is left out" in capsys.readouterr().err
    assert [path.name for path in Path("public/studies").iterdir()] == ["1.html"]


@pytest.mark.needs("slurm", "kubernetes")
@pytest.mark.parametrize("words", [("slurm",), ("kubernetes", "--site", "site.yaml")])
def test_a_launcher_of_jobs_is_refused_before_anything_is_written(words, capsys) -> None:
    sites = Path(__file__).parents[3] / "docs/sites"
    Path("site.yaml").write_text((sites / "kubernetes.yaml").read_text())
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    assert run(["tune", *options, "--max-time", "1h", "--out", "study", "--launcher", *words]) == 2
    assert "give --launcher local on a node that the cluster has given you" in capsys.readouterr().err
    assert not ROOT.exists()


def test_a_device_other_than_before_is_refused(monkeypatch) -> None:
    tune = Tune(StudyFile(**OPTIONS, out="study", max_time="1h"))
    before = SimpleNamespace(device_name="another device")
    ROOT.mkdir()
    monkeypatch.setattr(Study, "is_there", True)
    monkeypatch.setattr(Study, "results", lambda *_, **__: [SimpleNamespace(environment=before)])
    with pytest.raises(UsageError, match="another device"):
        tune._require_one_device()


def test_a_record_that_names_a_setting_which_the_space_lacks_is_refused(capsys) -> None:
    ROOT.mkdir()
    edited = Tuning(command="bench tune", default="a", final=("gone",))
    (ROOT / TUNING_FILE).write_bytes(TUNING.encode(edited))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    assert run(["tune", *options, "--max-time", "1m", "--out", "study"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "study/tuning.json names the setting 'gone', which the space lacks" in said
