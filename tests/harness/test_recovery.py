"""Faults around a study: a killed or interrupted bench, two at once, a full disk, a clock that is set.

What is trained is counted in steps (`COUNTED`), so that after each of them the same command must give the
figures of the undisturbed study, bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import until

from results import schemas
from results.outcome import Outcome

# Several launches each, of minutes on a busy machine.
pytestmark = pytest.mark.slow

Bench = Any
Figures = dict[str, set[bytes]]
CELLS = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,8")


class Scene:
    """A study of two cells: the one of batch 4 comes first; in the one of batch 8 rank 1 has the faults."""

    def __init__(self, bench: Bench, model: Callable[..., tuple[str, ...]], expected: Figures) -> None:
        self.bench, self._model, self._expected = bench, model, expected

    def call(self, *faults: str) -> tuple[str, ...]:
        """The words of the one command, with faults for the cell of batch 8."""
        return (*self._model(self.bench.folder, *(f"1/2 8 {fault}" for fault in faults)), *CELLS)

    def start(self, *faults: str) -> subprocess.Popen[str]:
        """A bench whose rank 1 has reached the fault `wait` or `hang`."""
        process: subprocess.Popen[str] = self.bench.start(*self.call(*faults))
        until((self.bench.folder / "reached").exists)
        return process

    def outcomes(self) -> list[tuple[int, Outcome]]:
        """Batch size and outcome of every run."""
        study = self.bench.study()
        return sorted((study.cell(run.cell_id).micro_batch, run.outcome) for run in self.bench.results())

    def finish(self) -> None:
        """The same command ends well, changes no record that was there, and all is as if undisturbed."""
        records = {path: path.read_bytes() for path in self.bench.folder.glob("study/cells/*/*/rank-*.json")}
        done = self.bench.matrix(*self.call())
        assert done.code == 0, done.stderr
        assert all(path.read_bytes() == data for path, data in records.items())
        self.must_be_whole()

    def must_be_whole(self) -> None:
        figures = self.bench.figures()
        assert len(figures) == 2
        assert figures == {cell: self._expected[cell] for cell in figures}


@pytest.fixture
def scene(bench_in, faulty_model, expected, tmp_path) -> Iterator[Scene]:
    scene = Scene(bench_in(tmp_path), faulty_model, expected)
    yield scene
    for process in scene.bench.processes():
        process.kill()


@pytest.fixture
def _no_nohup() -> Iterator[None]:
    """A test under nohup ignores SIGHUP, and so would what it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_no_nohup")
def test_who_asks_it_to_end_or_gives_it_no_time_gets_its_workers_ended_and_can_go_on(scene) -> None:
    process = scene.start("wait")
    # The laws of launchers have SIGTERM, and tests of `bench network` SIGINT.
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "the same command continues from here" in errors
    assert scene.bench.processes() == []
    assert scene.bench.run(*scene.call("wait"), "--max-time", "1s").code == 1
    assert scene.bench.processes() == []
    assert scene.outcomes() == [(4, Outcome.OK), (8, Outcome.CANCELLED), (8, Outcome.TIMED_OUT)]
    scene.finish()


def test_nothing_outlives_a_killed_bench_and_the_same_command_goes_on(scene) -> None:
    """Not even a daemon that the workload has made, which hears no SIGTERM."""
    process = scene.start("daemon", "kill bench", "wait")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    scene.bench.wait_for_processes()
    assert scene.outcomes() == [(4, Outcome.OK), (8, Outcome.UNKNOWN)]
    scene.finish()
    assert scene.outcomes() == [(4, Outcome.OK), (8, Outcome.MISSING_RANKS), (8, Outcome.OK)]
    (lost,) = [run for run in scene.bench.results() if run.outcome is not Outcome.OK]
    # Nobody saw its end: the process that is gone is named.
    assert f"process {process.pid})" in str(lost.reason)


STARTUP = """
import os, pathlib, signal, time

HERE = pathlib.Path(__file__).parent
LEFT = HERE / "startup"
if os.environ.get("RANK") == "1" and LEFT.exists():
    first, _, rest = LEFT.read_text().partition(" ")
    LEFT.write_text(rest)
    if first == "hang":
        (HERE / "reached").write_text(str(os.getpid()))
        time.sleep(3600)
    taken = []
    while first == "exhaust":
        taken.append(b"x" * 2**24)
    if first:
        os.kill(os.getpid(), getattr(signal, first))
"""
"""Rank 1 does this as soon as its Python starts: the next word of the file `startup`."""


def test_a_death_or_a_hang_in_start_up_costs_the_first_cell_and_the_campaign_goes_on(scene) -> None:
    folder = scene.bench.folder
    (folder / "sitecustomize.py").write_text(STARTUP)
    (folder / "startup").write_text("SIGSEGV hang")
    batches = ("--batch-size", "4,8,16")
    done = scene.bench.run(*scene.call(), *batches, "--hang-after", "10s", PYTHONPATH=str(folder))
    assert done.code == 1
    assert [outcome for _, outcome in scene.outcomes()].count(Outcome.OK) == 1
    runs = sorted(scene.bench.results(), key=lambda run: run.run_id)
    assert [run.outcome for run in runs] == [Outcome.CRASHED, Outcome.HUNG, Outcome.OK]
    reasons = [str(run.reason) for run in runs]
    assert reasons[0] == "before any cell began: rank 1 was killed by SIGSEGV"
    assert re.match(
        r"before any cell began: no rank said anything for \d+ s; rank 1 has been silent for longest",
        reasons[1],
    )
    status = scene.bench("status", "study")
    shown = scene.bench("show", "study", runs[1].cell_id)
    assert all(reason in status.stdout for reason in reasons[:2])
    assert reasons[1] in shown.stdout
    again = scene.bench.matrix(*scene.call(), *batches, "--rerun", "failed", "--dry-run")
    assert "2 of 3 runs to do" in again.stdout


def test_want_of_memory_in_start_up_has_its_name_and_the_campaign_goes_on(scene, memory_group) -> None:
    folder = scene.bench.folder
    (folder / "sitecustomize.py").write_text(STARTUP)
    (folder / "startup").write_text("exhaust")
    group = tuple(memory_group(2 * 2**30))
    batches = ("--batch-size", "4,16")
    assert scene.bench.run(*scene.call(), *batches, before=group, PYTHONPATH=str(folder)).code == 1
    # The cell of batch 16 comes first, and that of a smaller batch may have room.
    assert scene.outcomes() == [(4, Outcome.OK), (16, Outcome.OUT_OF_MEMORY)]
    (lost,) = [run for run in scene.bench.results() if run.outcome is not Outcome.OK]
    killed = "before any cell began: rank 1 was killed by SIGKILL, and meanwhile the kernel"
    assert str(lost.reason).startswith(killed)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A separate disk below the test's folder, a little larger than a study asks for."""
    path = tmp_path / "study"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=230m", "none", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this machine or user mounts no tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_that_fills_up_is_named_and_with_room_the_same_command_goes_on(scene, disk) -> None:
    done = scene.bench.run(*scene.call(f"fill {disk}"))
    assert done.code == 1
    assert "free some space" in done.stderr
    assert "Traceback" not in done.stderr
    (disk / "filler").unlink()
    scene.finish()
    (lost,) = [run for run in scene.bench.results() if run.outcome is not Outcome.OK]
    assert (lost.outcome, "No space left on device" in str(lost.reason)) == (Outcome.CANCELLED, True)


@pytest.mark.long
def test_two_commands_at_once_do_the_work_once(scene) -> None:
    call = scene.call()
    both = [scene.bench.start(*call) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 1], errors
    assert "is in use by another bench" in errors[codes.index(1)]
    scene.must_be_whole()
    lines = (scene.bench.study().root / "index.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 2


CLOCK = """
import datetime
import pathlib
import time

FILE, now = pathlib.Path(__file__).with_name("clock"), time.time


def shifted():
    return now() + float(FILE.read_text())


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(shifted(), tz)


time.time, datetime.datetime = shifted, Shifted
"""


@pytest.fixture
def clock(tmp_path) -> dict[str, str]:
    """Variables under which every Python's time of day is off by the seconds in the file `clock`.

    The monotonic clock and the times of files stay what they are, as on a host whose clock is set.
    """
    (tmp_path / "clock").write_text("0")
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def test_a_rank_that_others_wait_for_is_named_with_its_stack_and_its_collectives_whatever_the_clock(
    scene, clock
) -> None:
    model = scene.call("hang")
    with (scene.bench.folder / "fault").open("a") as faults:
        faults.write("1/2 4 set-clock -86400\n")
    done = scene.bench.run(*model, "--hang-after", "10s", **clock)
    assert done.code == 1
    # What was timed by the monotonic clock does not show that the clock was set back.
    (result,) = scene.bench.named("-b4-")
    assert 0 < result.step_ns.value < 1e9
    (failed,) = scene.bench.named("-b8-")
    assert failed.outcome is Outcome.HUNG, failed.reason
    assert str(failed.reason).startswith("no rank said anything for 1")
    # Rank 0 waits in the sum that rank 1 has not issued.
    counts = re.search(r"rank 1 is behind: .* (\d+) collectives, rank 0 (\d+)", str(failed.reason))
    assert counts, failed.reason
    assert int(counts[2]) - int(counts[1]) == 1, failed.reason
    launch = scene.bench.study().launch_folder(failed.launch_id)
    attempt = schemas.ATTEMPT.read(launch / "attempt.json")
    assert attempt.stopped_by == failed.reason
    assert attempt.started_at is not None
    assert attempt.ended_at < attempt.started_at
    recordings = sorted(path.name for path in launch.glob("*flight*"))
    assert recordings == ["flight-00000.json", "flight-00001.json"]
    stacks = [next(launch.glob(f"torchrun/*/attempt_0/{rank}/stderr.log")).read_text() for rank in (0, 1)]
    assert "faulty.py" in stacks[1]
    assert "in hang" in stacks[1]
    assert "in backward" in stacks[0]
    assert not psutil.pid_exists(int((scene.bench.folder / "reached").read_text()))
    assert scene.bench.matrix(*scene.call(), "--rerun", "failed").code == 0
    scene.must_be_whole()
