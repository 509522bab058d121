"""A tune that has not measured its final is a study to all commands, and a wrong call leaves no folder."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import cell_of
from launching import CODE, EMPTY_PLAN, a_job, a_launch

from harness.cli import run
from harness.features.tune.batches import BATCH_RUNS
from harness.features.tune.call import Tune
from harness.features.tune.records import TRIALS, TUNING, TUNING_FILE, TunedSetting, TunedTrial, Tuning
from harness.launchers.campaign_call import CampaignCall, JobCampaignCall
from harness.plan.study_file import StudyFile
from results.errors import UsageError
from results.files import study_lock
from results.job_store import JobStore
from results.launch import Slot
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


def test_the_job_of_a_tune_can_be_cancelled_while_it_holds_the_lock() -> None:
    JobStore(ROOT).add(a_job(cells=()), document="", name="script.sh")
    with study_lock(ROOT):
        assert run(["cancel", "study", "--forget"]) == 0
    ended = JobStore(ROOT).ended(a_job().job_id)
    assert ended.outcome is Outcome.CANCELLED


def test_a_tune_whose_job_has_not_begun_has_no_page(capsys) -> None:
    JobStore(ROOT).add(a_job(cells=()), document="", name="script.sh")
    assert run(["report", "study"]) == 2
    assert "bench status study" in capsys.readouterr().err


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
def test_a_job_of_less_time_than_the_call_is_refused_before_anything_is_written(words, capsys) -> None:
    sites = Path(__file__).parents[3] / "docs/sites"
    Path("site.yaml").write_text((sites / "kubernetes.yaml").read_text())
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    limits = ("--max-time", "1h", "--time", "30m", "--out", "study")
    assert run(["tune", *options, *limits, "--launcher", *words]) == 2
    assert "--max-time" in capsys.readouterr().err
    assert not ROOT.exists()


def in_a_job(monkeypatch: pytest.MonkeyPatch, **site: object) -> Tune:
    """The call of a tune's job, in its allocation."""
    job = a_job(cells=(), site={"gpu_request": "none", **site})
    JobStore(ROOT).add(job, document="", name="script.sh")
    allocation = {"ID": "17", "NAME": job.name, "NODELIST": "n1"}
    for name, value in allocation.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    return Tune(StudyFile(**OPTIONS, launcher="slurm", out="study", max_time="1h"))


@pytest.mark.needs("slurm")
def test_the_rungs_of_a_job_share_its_ports(monkeypatch) -> None:
    tune, ports = in_a_job(monkeypatch), list[str]()
    for _ in range(3):
        call = tune._limited(math.inf)
        assert isinstance(call, JobCampaignCall)
        ports.append(call.starter().command(a_launch(gpus_per_node=2), ROOT / "launch.json")[-1])
    assert len(set(ports)) == 3


@pytest.mark.needs("slurm")
def test_a_job_whose_nodes_have_another_device_than_before_is_refused(monkeypatch) -> None:
    tune, before = in_a_job(monkeypatch), SimpleNamespace(device_name="another device")
    monkeypatch.setattr(Study, "results", lambda *_, **__: [SimpleNamespace(environment=before)])
    with pytest.raises(UsageError, match="another device"):
        tune._require_one_device()


@pytest.mark.needs("slurm")
def test_runs_in_a_container_are_compared_by_their_code_alone(monkeypatch) -> None:
    tune = in_a_job(monkeypatch, container={"image": "a.sqsh"})
    assert tune._call.conditions(CODE).torch is None


@pytest.mark.needs("slurm")
def test_a_start_closes_the_launches_of_calls_before_it_alone(monkeypatch) -> None:
    tune, study = in_a_job(monkeypatch), Study(ROOT)
    JobStore(ROOT).add(a_job("0002-1x1"), document="", name="script.sh")
    launches = {job_id: a_launch(launch_id=job_id, job_id=job_id) for job_id in ("0001-1x1", "0002-1x1")}
    for launch in launches.values():
        study.add_launch(launch)
    monkeypatch.setattr(CampaignCall, "run", lambda *_: None)
    assert isinstance(tune._call, JobCampaignCall)
    tune._call.run(study, EMPTY_PLAN, CODE, 0)
    assert [study.has_attempt(job_id) for job_id in launches] == [True, False]


def test_status_shows_the_cell_that_the_call_of_a_job_runs(capsys) -> None:
    job, cell, study = a_job(cells=()), cell_of(), Study(ROOT)
    study.add_plan(rebuilt_plan("study", [cell], ()))
    JobStore(ROOT).add(job, document="", name="script.sh")
    slot = Slot(cell_id=cell.id, run_id="r", repeat=1)
    study.add_launch(a_launch(job_id=job.job_id, slots=(slot,)))
    for lock in (nullcontext(), study_lock(ROOT)):
        with lock as busy:
            run(["status", "study", "--json"])
            [found] = json.loads(capsys.readouterr().out)["cells"]
            assert found["state"] == ("to do" if busy is None else "running")


def test_a_record_that_names_a_setting_which_the_space_lacks_is_refused(capsys) -> None:
    ROOT.mkdir()
    edited = Tuning(command="bench tune", default="a", final=("gone",))
    (ROOT / TUNING_FILE).write_bytes(TUNING.encode(edited))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    assert run(["tune", *options, "--max-time", "1m", "--out", "study"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "study/tuning.json names the setting 'gone', which the space lacks" in said
