"""Unmodified programs, measured by real ranks from the command to the page."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_fixtures import command

from harness.features.programs.records import PROGRAM_RUN
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

pytestmark = pytest.mark.slow
FOREIGN = Path(__file__).parent / "foreign"
LOG = r"step (?P<step>\d+) loss (?P<loss>\S+)"
PLAIN = {
    "script": str(FOREIGN / "plain_ddp.py"),
    "arguments": "--batch {batch_size}",
    "batch": 16,
    "unit": "images",
    "log": LOG,
    "strategies": {"ddp": "", "slow": "--slow-rank 1 --slow-ms 30"},
}
BRIEF = ("--gpus", "2", "--repeats", "1", "--budget", "1s", "--oversubscribe")


def write(folder: Path, name: str, **fields: object) -> str:
    """Write a program's file, and return the text of its workload."""
    (folder / f"{name}.yaml").write_text(json.dumps(PLAIN | fields), encoding="utf-8")
    return f"program:{name}.yaml"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the study of a plain script."""
    found = tmp_path_factory.mktemp("programs")
    workload = write(found, "plain")
    done = run(found, "matrix", "--workload", workload, *BRIEF, "--trace", "0,1", "--out", "study")
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def runs(folder) -> dict[str, RunResult]:
    """The runs of the study, by strategy."""
    study = Study(folder / "study")
    return {study.cell(one.cell_id).strategy.split("@")[0]: one for one in study.results()}


def test_a_run_has_times_work_losses_and_memory(runs) -> None:
    one = runs["program:ddp"]
    assert one.outcome is Outcome.OK, one.reason
    # Each of two replicas takes a batch of 16.
    assert one.step_ns is not None
    assert one.samples_per_s == pytest.approx(32e9 / one.step_ns.value)
    assert one.unit == "images"
    # The loss of ten classes by chance is 2.3.
    assert one.loss_last == pytest.approx(2.3, abs=0.5)
    assert (one.rss_over_idle_bytes or 0) > 0


def test_what_is_not_known_is_said(runs) -> None:
    one = runs["program:ddp"]
    assert one.proof is None
    assert "did not train" in one.absent["proof"]
    assert (one.flops_per_step, one.budget, one.parameters) == (None, None, None)


def test_the_slow_rank_is_the_one_that_waits_least(folder, runs) -> None:
    assert runs["program:slow"].step_ns.value >= 30e6
    page = (folder / "study" / "report.html").read_text(encoding="utf-8")
    assert "rank 1" in page[page.index('id="program"') :]


def test_traces_show_that_one_rank_idles_while_the_other_communicates(folder, runs) -> None:
    slow, study = runs["program:slow"], Study(folder / "study")
    kept = sorted(study.run_folder(slow.cell_id, slow.run_id).glob("program-*.json"))
    first, second = (PROGRAM_RUN.read(path).traced for path in kept)
    # It sleeps for 30 ms in each step. The other parts depend on what else runs on the machine.
    assert second.idle_ns >= 29e6
    assert first.exposed_ns > second.exposed_ns
    assert second.idle_ns > first.idle_ns
    assert len(study.trace_paths(slow.cell_id, slow.run_id)) == 2
    page = (folder / "study" / "report.html").read_text(encoding="utf-8")
    assert "exposed communication" in page[page.index('id="program"') :]


def test_the_same_command_runs_nothing_anew_and_a_changed_line_is_another_cell(folder, runs) -> None:
    call = ("matrix", "--workload", "program:plain.yaml", *BRIEF, "--out", "study")
    assert run(folder, *call).returncode == 0
    assert len(Study(folder / "study").results()) == len(runs)
    write(folder, "plain", strategies={"ddp": "--width 128"})
    done = run(folder, *call, "--dry-run")
    assert "1 of 1 run to do" in done.stdout + done.stderr
    write(folder, "plain")


def test_steps_are_taken_from_the_output(tmp_path) -> None:
    workload = write(tmp_path, "logged", steps="log", strategies={"ddp": "--print-every 4"})
    done = run(tmp_path, "matrix", "--workload", workload, *BRIEF, "--out", "study")
    [one] = Study(tmp_path / "study").results()
    assert one.outcome is Outcome.OK, f"{one.reason}{done.stderr}"
    assert one.loss_last is not None
    # Four steps have the time of one line together, so that blocks of at least five have eight.
    assert one.steps % 8 == 0
    assert one.step_ns.low < one.step_ns.high


def test_a_program_is_checked(folder) -> None:
    done = run(folder, "program", "check", "plain.yaml", "--strategy", "slow")
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stdout


def test_a_study_whose_processes_are_all_killed_is_finished_by_the_same_command(tmp_path) -> None:
    workload = write(tmp_path, "plain", strategies={"ddp": ""})
    # A later value of a flag replaces that of BRIEF.
    call = ("matrix", "--workload", workload, *BRIEF, "--repeats", "2", "--out", "study")
    with subprocess.Popen(command(*call), cwd=tmp_path, stderr=subprocess.DEVNULL) as first:
        pattern = "study/cells/*/*/program-00001/steps.jsonl"
        while not any("steps" in path.read_text() for path in tmp_path.glob(pattern)):
            assert first.poll() is None
            time.sleep(0.1)
        children = psutil.Process(first.pid).children(recursive=True)
        for one in (first, *children):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    psutil.wait_procs(children)
    done = run(tmp_path, *call)
    study = Study(tmp_path / "study")
    assert done.returncode == 0, done.stderr
    assert [one.outcome for one in study.results()].count(Outcome.OK) == 2


@pytest.mark.needs("slurm")
def test_a_scheduler_starts_the_ranks_of_a_program_on_two_nodes(lab, bench_in, tmp_path) -> None:
    bench = bench_in(tmp_path, lab)
    workload = write(bench.folder, "plain", strategies={"ddp": ""})
    where = ("--gpus-per-node", "1", "--launcher", "slurm", "--device", "cpu", "--time", "10m")
    brief = ("--gpus", "2", "--repeats", "1", "--budget", "1s", "--out", "study")
    done = bench("matrix", "--workload", workload, *brief, *where)
    assert done.code == 0, done.stderr
    bench.settle()
    [one] = bench.study().results()
    assert one.outcome is Outcome.OK, one.reason
    assert one.ranks_present == 2
