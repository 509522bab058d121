"""`--trace` and `--tensorboard`: from the call to the ranks, and a real run with both."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness import matrix
from harness.cli import run
from harness.jobs.documents import JobMaker
from harness.jobs.planned import planned_jobs
from harness.plan.schedule import schedule
from harness.plan.study_file import BY_NAME, StudyFile
from harness.plan.surroundings import Devices
from harness.terminal.console import Console
from harness.worker.rank.context import allocation
from results.environment import CodeVersion
from results.job import RunOptions
from results.launch import JobVariables
from results.store import Study
from slurm.site import SiteProfile

CODE = CodeVersion(code_hash="c0de")
BOTH = RunOptions(trace=(0, 3), tensorboard=True)
MLP = ("--workload", "mlp", "--device", "cpu", "--batch-size", "32", "--strategy", "ddp", "--out", "study")
# Warm-up cannot end early, so that each run takes the same steps.
FIXED = ("--budget", "0", "--block-steps", "2", "--warmup-steps", "2", "--quads", "1")


# The options, on their way


plan_of = partial(
    builders.plan_of, workload="mlp", gpus=2, batch_size=8, device="cpu", strategy="ddp", repeats=1
)


@pytest.mark.parametrize("given", [[0, 3], "0,3", ["0", 3]])
def test_ranks_come_from_a_file_or_a_flag(given) -> None:
    BY_NAME["trace"].check(given, "--trace")
    options = matrix.run_options(StudyFile(trace=given, tensorboard=True))
    assert (options.trace, options.tensorboard) == ((0, 3), True)


@pytest.mark.parametrize(
    ("variables", "recorded"),
    [
        ({"SLURM_JOB_ID": "17"}, "slurm 17"),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "0"}, "slurm 17"),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, "slurm 17, restart 2"),
        ({"SLURM_RESTART_COUNT": "2"}, None),
    ],
)
def test_a_rank_of_any_launch_records_the_job_that_it_runs_in(variables, recorded) -> None:
    names = JobVariables(scheduler="slurm", job="SLURM_JOB_ID", restarts="SLURM_RESTART_COUNT")
    assert allocation([names], variables) == recorded


def test_a_job_carries_them_to_its_launches(tmp_path) -> None:
    plan = plan_of()
    jobs = planned_jobs(plan, schedule(plan.cells, repeats=1), per_cell=False, earlier={}, hardware=Devices())
    maker = JobMaker(Study(tmp_path / "s"), plan, "elsewhere", BOTH, CODE, SiteProfile())
    assert maker.run(jobs[0]).options == BOTH


# What a call is told


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Console, "width", 300)


def test_a_rank_that_no_cell_has_is_noted(own_folder, capsys) -> None:
    assert run(["matrix", *MLP, "--gpus", "2,4", "--oversubscribe", "--dry-run", "--trace", "1,2"]) == 0
    words = capsys.readouterr().err
    assert "--trace 2: cells of fewer than 3 workers have no such rank" in words
    assert "--trace 1" not in words


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_without_the_package_the_call_is_refused_with_the_command_that_installs_it(
    more, no_tensorboard, capsys
) -> None:
    assert run(["matrix", *MLP, "--gpus", "2", "--tensorboard", *more]) == 1
    assert "install it with: pip install tensorboard" in capsys.readouterr().err
    assert not Path("study").exists()


# A real run


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """The folder of a study of one run on two ranks that kept everything."""
    folder = tmp_path_factory.mktemp("extras")
    done = called(folder, "--repeats", "1", "--trace", "1", "--tensorboard")
    assert done.returncode == 0, done.stderr
    return folder / "study"


def called(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("bench")), "matrix", *MLP, "--gpus", "2", *FIXED, *options]
    return subprocess.run([*command, "--no-report"], cwd=folder, capture_output=True, text=True)


def records(study: Path) -> list[list[dict[str, Any]]]:
    """Rank files by run, read by plain JSON."""
    runs = sorted(study.glob("cells/*/*/"))
    return [[json.loads(path.read_text()) for path in sorted(run.glob("rank-*.json"))] for run in runs]


@pytest.mark.slow
def test_the_chosen_rank_alone_has_a_trace_beside_its_record(study, capsys) -> None:
    [path] = study.glob("cells/*/*/trace-*.json.gz")
    assert run(["show", str(study), path.parts[-3]]) == 0
    assert f"    trace: {path}" in capsys.readouterr().out.splitlines()
    assert path.name == "trace-00001.json.gz"
    assert (path.parent / "rank-00001.json").exists()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    steps = [event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")]
    assert len(steps) == 3


@pytest.mark.slow
def test_scalars_are_those_of_the_rank_records(study) -> None:
    [ranks] = records(study)
    for number, record in enumerate(ranks):
        [folder] = study.glob(f"launches/*/tensorboard/rank-{number:05d}/{record['cell_id']}")
        reader = EventAccumulator(str(folder))
        reader.Reload()
        for tag, column, unit in (
            ("loss", "loss", 1),
            *((f"time/{name}_ms", f"{name}_ns", 1e6) for name in ("step", "data", "forward", "backward")),
            ("time/optimizer_ms", "optimizer_ns", 1e6),
        ):
            first = 0 if tag == "loss" else len(record["warmup_loss"])
            values = record["warmup_loss"][first:] + record["steps"][column]
            expected = [(i, float(np.float32(value / unit))) for i, value in enumerate(values, start=first)]
            assert [(event.step, event.value) for event in reader.Scalars(tag)[first:]] == expected


@pytest.mark.slow
def test_the_record_has_samples_of_the_time_in_which_it_was_measured(study) -> None:
    [ranks] = records(study)
    for record in ranks:
        telemetry = record["telemetry"]
        measured_ms = sum(record["blocks_ns"]) / 1e6
        assert telemetry["at_ms"][-1] >= measured_ms - 1
        assert telemetry["series"]["cpu_cores"][-1] > 0
        assert telemetry["series"]["rss_bytes"][-1] <= record["memory"]["rss_peak_bytes"]
        assert telemetry["energy_j"] is None
        assert record["absent"]["energy_j"] == "no energy counter is read on this device"
    network = "network_sent_bytes_per_s"
    assert [network in record["telemetry"]["series"] for record in ranks] == [True, False]
