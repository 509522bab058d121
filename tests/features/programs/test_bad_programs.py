"""Programs with faults: the reason of each run names the fault, and all processes end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest
from command_fixtures import command

from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

pytestmark = pytest.mark.slow
FOREIGN = Path(__file__).parent / "foreign"
FAULTS = {
    "short": (Outcome.CRASHED, "ended after 8 steps"),
    "no steps": (Outcome.CRASHED, "0 steps were seen; call bench_step()"),
    "uneven": (Outcome.CRASHED, "stepped unequally often"),
    "batch changes": (Outcome.CRASHED, "keep the batch"),
    "fails": (Outcome.CRASHED, "the data are damaged"),
    "port taken": (Outcome.CANCELLED, "the port of the program's ranks was taken"),
    "diverges": (Outcome.DIVERGED, "not a finite number"),
    "launches": (Outcome.SKIPPED, "torch.distributed.run"),
    "catches": (Outcome.OK, None),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, RunResult]:
    """The run of each fault, of one study."""
    folder = tmp_path_factory.mktemp("badly")
    lines = {fault.replace(" ", "-"): f"'{fault}' {{batch_size}}" for fault in FAULTS}
    (folder / "badly.yaml").write_text(
        json.dumps({"script": str(FOREIGN / "badly.py"), "batch": 4, "strategies": lines}), encoding="utf-8"
    )
    brief = ("--gpus", "2", "--repeats", "1", "--budget", "0", "--oversubscribe", "--out", "study")
    done = subprocess.run(
        command("matrix", "--workload", "program:badly.yaml", *brief),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    study = Study(folder / "study")
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(folder) in line]
    strategies = {cell_id: study.cell(cell_id).strategy for cell_id in study.cell_ids()}
    return {strategies[run.cell_id].split(":")[1].split("@")[0]: run for run in study.results()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_program_is_named(runs, fault) -> None:
    outcome, words = FAULTS[fault]
    run = runs[fault.replace(" ", "-")]
    assert run.outcome is outcome, run.reason
    assert words is None or words in str(run.reason)
    assert run.step_ns is None or outcome is Outcome.OK
