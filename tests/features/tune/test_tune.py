"""`bench tune` as a user has it: it ends with an answer, continues after a kill, and explains errors."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from launching import until

from harness.features.tune.records import TUNING, Tuning, read_record
from results import schemas
from results.files import is_busy
from results.outcome import Outcome
from results.store import Study

pytestmark = pytest.mark.slow
SMALL = (
    *("tune", "--workload", "mlp", "--gpus", "2", "--device", "cpu", "--global-batch-size", "64"),
    *("--strategy", "ddp:bucket_mb=5,ddp:bucket_mb=50,ddp:bucket_view=true", "--accumulation", "1"),
    *("--activation-checkpointing", "false", "--compile", "false"),
    *("--budget", "0", "--quads", "0", "--repeats", "2", "--name", "small"),
)
"""Three settings, of which the first is the default."""


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("bench")), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"})


def tuning() -> Tuning:
    found = read_record(Path("runs/small"))
    assert found is not None
    return found


def trial_runs() -> Counter[str]:
    """The good runs of each cell of the trials."""
    runs = Study(Path("runs/small/trials")).results()
    return Counter(run.cell_id for run in runs if run.outcome is Outcome.OK)


def test_a_killed_tune_goes_on_and_ends_with_an_answer_whose_commands_run() -> None:
    command = [str(Path(sys.executable).with_name("bench")), *SMALL]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    trials = Path("runs/small/trials")
    until(lambda: len(list(trials.glob("cells/*/*/rank-00001.json"))) >= 2 or first.poll() is not None)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    # Its workers hold the lock until they have noticed.
    until(lambda: not is_busy(trials))
    done = bench(*SMALL)
    assert done.returncode == 0, done.stderr
    found = tuning()
    assert found.answer.sentence in done.stdout
    assert 'id="tuning"' in Path("runs/small/report.html").read_text()
    assert {trial.setting for trial in found.trials} == {one.id for one in found.settings}
    planned = {
        cell.id: plan.request.repeats
        for plan in Study(Path("runs/small/trials")).plans()
        for cell in plan.cells
    }
    assert trial_runs() == planned, "no trial ran twice, and none is missing"
    orders = [plan.request.seed for plan in Study(Path("runs/small/trials")).plans()]
    assert len({*orders}) == len(orders), "each rung has another order"
    # It is over: the same command runs nothing more, and says the same.
    again = bench(*SMALL)
    assert again.returncode == 0
    assert found.answer.sentence in again.stdout
    assert trial_runs() == planned
    quick = ("--budget", "0", "--quads", "0", "--repeats", "1", "--no-report", "--dry-run")
    # A default that nothing beats needs no command.
    assert len(found.answer.commands) == (0 if found.answer.setting == found.default else 2)
    for words in found.answer.commands:
        call = shlex.split(words)[1:]
        if "--steps" in call:
            call[call.index("--steps") + 1] = "3"
        more = quick if call[0] == "matrix" else ("--name", "trained", "--no-report")
        ran = bench(*call, *more)
        assert ran.returncode == 0, ran.stderr
    assert "another space" in bench(*SMALL, "--strategy", "ddp").stderr
    # A device that changed between two calls.
    study = Study(Path("runs/small/trials"))
    for path in study.root.glob("cells/*/*/run.json"):
        run = schemas.RUN_RESULT.read(path)
        if run.environment is None:
            # It was under way when the tune was killed, and left no record.
            continue
        other = msgspec.structs.replace(run.environment, device_name="Another CPU")
        path.write_bytes(schemas.RUN_RESULT.encode(msgspec.structs.replace(run, environment=other)))
    unfinished = msgspec.structs.replace(found, final=(), answer=None)
    Path("runs/small/tuning.json").write_bytes(TUNING.encode(unfinished))
    refused = bench(*SMALL)
    assert refused.returncode == 2
    assert "Another CPU" in refused.stderr


def test_a_workload_that_fails_in_each_trial_ends_the_tune_with_a_sentence() -> None:
    Path("broken.py").write_text("def build():\n    raise RuntimeError('it never works')\n")
    two = ("--strategy", "ddp:bucket_mb=5,ddp:bucket_mb=50")
    done = bench(*SMALL[:1], "--workload", "py:broken:build", *SMALL[3:], *two, "--repeats", "1")
    assert done.returncode == 1
    assert "it never works" in done.stderr.splitlines()[-1]
    assert "bench check py:broken:build" in done.stderr.splitlines()[-1]
