"""What goes wrong while workers run: every end has its name, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from results.outcome import Outcome
from results.store import Study

MODELS = '''
import os
import torch
from torch import nn
from workloads import Workload


class Faulty(nn.Module):
    """A linear model whose forward does something at its 10th call."""

    def __init__(self, fault):
        super().__init__()
        self.layer, self.fault, self.calls = nn.Linear(16, 1), fault, 0

    def forward(self, x):
        self.calls += 1
        return self.fault(self.layer(x)) if self.calls >= 10 else self.layer(x)


def _workload(fault):
    def synthetic(generator, samples):
        return torch.randn(samples, 16, generator=generator), torch.randn(samples, 1, generator=generator)

    return Workload(module=Faulty(fault), loss=nn.functional.mse_loss, synthetic=synthetic)


def good():
    return _workload(lambda y: y)


def diverges():
    return _workload(lambda y: y * float("nan"))


def exhausts_memory():
    return _workload(lambda y: y + torch.empty(10**14))


def raises():
    raise ValueError("this model\\nis broken")


def dies():
    return _workload(lambda y: os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else y)
'''
FAULTY = ("diverges", "exhausts_memory", "raises", "dies")
ARGUMENTS = (
    "matrix", "--gpus", "2", "--strategy", "ddp", "--repeats", "1", "--batch-size", "4", "--device", "cpu",
    "--budget", "0", "--block-steps", "2", "--quads", "1", "--out", "study",
)  # fmt: skip


@pytest.fixture(scope="module")
def faulty_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, str]:
    """One study with a model for every fault and a good one, run once."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "models.py").write_text(MODELS)
    names = ",".join(f"py:models:{name}" for name in (*FAULTY, "good"))
    done = _bench(folder, *ARGUMENTS, "--workload", names)
    assert done.returncode == 1, done.stderr
    return Study(folder / "study"), done.stdout


def _bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*arguments), cwd=folder, capture_output=True, text=True, timeout=300)


def _command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("bench")), *arguments]


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("diverges", Outcome.DIVERGED, "not a finite number"),
        ("exhausts-memory", Outcome.OUT_OF_MEMORY, "can't allocate memory"),
        ("raises", Outcome.CRASHED, "ValueError: this model is broken"),
        ("dies", Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
    ],
)
def test_each_fault_has_its_outcome_and_its_reason(
    faulty_study: tuple[Study, str], name: str, outcome: Outcome, words: str
) -> None:
    study, _ = faulty_study
    found = [result for result in study.results() if f"models-{name}" in result.cell_id]
    assert [result.outcome for result in found] == [outcome]
    assert words in str(found[0].reason)


def test_the_good_cell_beside_them_is_measured_and_reported(faulty_study: tuple[Study, str]) -> None:
    study, printed = faulty_study
    found = [result for result in study.results() if "models-good" in result.cell_id]
    assert [result.outcome for result in found] == [Outcome.OK]
    assert "py:models:good" in printed
    assert "SIGKILL" in (study.root / "report.html").read_text()


def test_what_failed_by_its_own_fault_is_not_tried_again_unless_asked(
    faulty_study: tuple[Study, str],
) -> None:
    study, _ = faulty_study
    folder = study.root.parent
    names = ",".join(f"py:models:{name}" for name in (*FAULTY, "good"))
    again = _bench(folder, *ARGUMENTS, "--workload", names)
    assert again.returncode == 1
    assert "0 of 5 runs to do" in again.stderr
    shown = _bench(folder, *ARGUMENTS, "--workload", names, "--rerun", "failed", "--dry-run")
    assert "4 of 5 runs to do" in shown.stdout


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A study of six runs whose first launch has begun its first cell."""
    process = subprocess.Popen(
        _command(*INTERRUPTED), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait(lambda: list(tmp_path.glob("study/cells/*/*/")), "the first run")
    yield process
    process.kill()
    process.communicate()


INTERRUPTED = (
    "matrix", "--workload", "mlp", "--gpus", "2", "--strategy", "ddp", "--repeats", "2", "--batch-size",
    "16,32", "--device", "cpu", "--budget", "1s", "--quads", "1", "--out", "study",
)  # fmt: skip


def _wait(condition: object, what: str, seconds: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def _workers(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ()) or _in(process, folder)
    ]


def _in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and "harness.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _finishes(folder: Path) -> None:
    """The same command goes on where it stopped, and nothing that was there is lost."""
    before = {path: path.read_bytes() for path in folder.glob("study/cells/*/*/rank-*.json")}
    again = _bench(folder, *INTERRUPTED)
    assert again.returncode == 0, again.stderr
    assert all(path.read_bytes() == data for path, data in before.items())
    ok = [result.cell_id for result in Study(folder / "study").results() if result.outcome is Outcome.OK]
    assert sorted(ok.count(cell_id) for cell_id in set(ok)) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_workers_and_the_same_command_goes_on(
    number: signal.Signals, started: subprocess.Popen[str], tmp_path: Path
) -> None:
    started.send_signal(number)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "the same command goes on from here" in errors
    assert _workers(tmp_path) == []
    results = Study(tmp_path / "study").results()
    assert {result.outcome for result in results} <= {Outcome.OK, Outcome.CANCELLED}
    _finishes(tmp_path)


@pytest.mark.slow
def test_a_killed_bench_leaves_its_workers_to_finish_the_cell_and_to_stop(
    started: subprocess.Popen[str], tmp_path: Path
) -> None:
    started.send_signal(signal.SIGKILL)
    started.wait()
    busy = _bench(tmp_path, *INTERRUPTED)
    assert busy.returncode == 1
    assert "is in use by another bench" in busy.stderr
    _wait(lambda: not _workers(tmp_path), "the workers' end")
    _finishes(tmp_path)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_one_run(started: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = [p for p in _workers(tmp_path) if "harness.worker" in p.cmdline() and "-u" in p.cmdline()]
    os.kill(max(process.pid for process in ranks), signal.SIGKILL)
    started.communicate(timeout=120)
    assert started.returncode == 1
    results = Study(tmp_path / "study").results()
    failed = [result for result in results if result.outcome is not Outcome.OK]
    assert [result.outcome for result in failed] == [Outcome.CRASHED]
    assert "SIGKILL" in str(failed[0].reason)
    attempts = [json.loads(path.read_text()) for path in tmp_path.glob("study/launches/*/attempt.json")]
    assert any(rank["signal"] == "SIGKILL" for attempt in attempts for rank in attempt["ranks"])


@pytest.mark.slow
def test_the_time_limit_stops_the_study_and_says_so(tmp_path: Path) -> None:
    done = _bench(tmp_path, *INTERRUPTED, "--max-time", "7s")
    assert done.returncode == 1
    results = Study(tmp_path / "study").results()
    assert {result.outcome for result in results} <= {Outcome.OK, Outcome.TIMED_OUT}
    _finishes(tmp_path)
