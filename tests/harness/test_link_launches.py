"""Launches on virtual nodes, really run: what they record, and how each of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.code import checkout, code_version
from harness.console import Console
from harness.device import usable_cores
from harness.launch.campaign import Campaign, CampaignContext
from harness.launch.starter import LocalStarter
from harness.matrix import Matrix
from harness.plan.study_file import StudyFile
from results.job import RunOptions
from results.lock import study_lock
from results.outcome import Evidence, Outcome
from results.store import Study

MODELS = """
import os, time
import torch
from torch import nn
from workloads import Workload


class Faulty(nn.Linear):
    calls = 0

    def __init__(self, fault):
        super().__init__(4, 1)
        self.fault = fault

    def forward(self, x):
        self.calls += 1
        if self.calls == 8:
            self.fault(os.environ["RANK"])
        return super().forward(x)


def _workload(fault):
    def synthetic(generator, samples):
        return torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)

    return Workload(module=Faulty(fault), loss=nn.functional.mse_loss, synthetic=synthetic)


def hangs():
    return _workload(lambda rank: time.sleep(600) if rank == "1" else None)


def dies():
    # Rank 0 is busy for long, and does not miss it.
    return _workload(lambda rank: os.kill(os.getpid(), 9) if rank == "1" else time.sleep(600))
"""
LINK = "100mbit"


def _bench(folder: Path, *arguments: str) -> list[str]:
    return [
        *(str(Path(sys.executable).with_name("bench")), "matrix", "--gpus", "2", "--strategy", "ddp"),
        *(
            "--link",
            LINK,
            "--repeats",
            "1",
            "--device",
            "cpu",
            "--quads",
            "1",
            "--out",
            str(folder / "study"),
        ),
        *arguments,
    ]


@pytest.mark.slow
def test_a_launch_over_a_link_is_recorded_as_what_it_is(links: None, tmp_path: Path) -> None:
    short = ("--workload", "mlp", "--batch-size", "16", "--budget", "0", "--block-steps", "2")
    done = subprocess.run(_bench(tmp_path, *short), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    study = Study(tmp_path / "study")
    [result] = study.results()
    assert (result.outcome, result.evidence) == (Outcome.OK, Evidence.EMULATED)
    assert result.proof is not None
    assert result.proof.passed
    records = study.rank_records(result.cell_id, result.run_id)
    host = os.uname().nodename
    assert [record.environment.host for record in records] == [f"node0.{host}", f"node1.{host}"]
    assert [(record.node_rank, record.local_rank) for record in records] == [(0, 0), (1, 0)]
    pinned = [core for record in records for core in record.environment.pinned_cores]
    assert len(set(pinned)) == len(pinned) == (2 if len(usable_cores()) > 1 else 0)
    # The gradients of 2 ranks go over the link once each way, for every step.
    assert records[0].work is not None
    assert result.step_ns is not None
    assert result.step_ns.value / 1e9 > records[0].work.exchange_payload_bytes * 8 / 100e6
    [log] = study.root.glob("launches/*/torchrun.log")
    assert log.read_text().startswith("2 virtual nodes, 100mbit each way\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("dies", Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
        ("hangs", Outcome.HUNG, "no rank said anything for"),
    ],
)
def test_a_rank_that_is_lost_or_hangs_ends_the_launch_on_all_nodes(
    links: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, outcome: Outcome, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    options = StudyFile(
        workload=f"py:models:{name}", gpus=2, strategy="ddp", link=LINK, repeats=1, device="cpu", budget=0,
        out="study",
    )  # fmt: skip
    matrix, study = Matrix(options, study_file=None), Study(tmp_path / "study")
    before = _children()  # of this very process: other tests keep living ranks in it
    with study_lock(study.root) as lock:
        campaign = Campaign(study, matrix._kept_plan(study), RunOptions(silence_s=20), Console())
        campaign.run(
            CampaignContext(starter=LocalStarter(), checkout=checkout(), code=code_version(), lock=lock)
        )
    [result] = study.collect()
    assert result.outcome is outcome
    assert str(result.reason).startswith(reason)
    assert _children() <= before
    [attempt] = study.attempts().values()
    assert attempt.exit_code != 0
    stacks = "".join(path.read_text() for path in study.root.glob("launches/*/torchrun/*/*/0/stderr.log"))
    assert ("models.py" in stacks) == (outcome is Outcome.HUNG)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def started(links: None, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A study whose one launch has begun to measure."""
    process = subprocess.Popen(
        _bench(tmp_path, *LONG), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait(lambda: '"measure"' in _log(tmp_path), "the measuring")
        yield process
    finally:
        process.kill()
        process.communicate()


LONG = ("--workload", "mlp", "--batch-size", "16", "--budget", "8s")


def _log(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("study/launches/*/rank-00000.jsonl"))


def _wait(condition: Callable[[], object], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def _programs(process: subprocess.Popen[str]) -> tuple[psutil.Process, list[psutil.Process]]:
    """The program that keeps the nodes, and all that runs on them: two torchruns and two ranks."""
    [program] = psutil.Process(process.pid).children()
    assert "harness.launch.nodes" in program.cmdline()
    inhabitants = program.children(recursive=True)
    assert len([one for one in inhabitants if "harness.worker" in one.cmdline()]) == 4
    return program, inhabitants


def _networks() -> dict[str, list[int]]:
    """The network namespaces that some process is in, and which."""
    found: dict[str, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.setdefault(str(path.readlink()), []).append(int(path.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_program_that_keeps_the_nodes(
    started: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    program, inhabitants = _programs(started)
    theirs = {str(Path(f"/proc/{one.pid}/ns/net").readlink()) for one in [program, *inhabitants]}
    assert len(theirs) == 3, "a switch and two nodes"
    assert len({tuple(one.cpu_affinity()) for one in inhabitants}) in (1, 2)
    program.send_signal(number)
    _wait(lambda: not any(one.is_running() for one in [program, *inhabitants]), "their end", 10)
    assert not theirs & _networks().keys()
    started.communicate(timeout=60)
    assert started.returncode == 1
    [result] = Study(tmp_path / "study").results()
    # A program that is asked to end says so through its torchruns; one that is killed says nothing.
    allowed = {signal.SIGTERM: {Outcome.CANCELLED}, signal.SIGKILL: {Outcome.UNKNOWN, Outcome.CRASHED}}
    assert result.outcome in allowed[number]


@pytest.mark.slow
def test_ctrl_c_ends_what_runs_on_the_nodes(started: subprocess.Popen[str], tmp_path: Path) -> None:
    program, inhabitants = _programs(started)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130, errors
    assert not any(one.is_running() for one in [program, *inhabitants])
    [result] = Study(tmp_path / "study").results()
    assert result.outcome is Outcome.CANCELLED


@pytest.mark.slow
def test_a_killed_bench_leaves_the_nodes_to_finish_and_the_study_locked(
    started: subprocess.Popen[str], tmp_path: Path
) -> None:
    program, inhabitants = _programs(started)
    started.send_signal(signal.SIGKILL)
    started.wait()
    busy = subprocess.run(_bench(tmp_path, *LONG), capture_output=True, text=True, timeout=60)
    assert busy.returncode == 1
    assert "is in use by another bench" in busy.stderr
    _wait(lambda: not any(one.is_running() for one in [program, *inhabitants]), "their end")
    [result] = Study(tmp_path / "study").results()
    assert result.outcome is Outcome.OK
