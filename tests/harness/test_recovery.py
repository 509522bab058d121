"""One fault in the middle of a run: its name, the other cell unharmed, and the same figures afterwards.

A model does what a file beside it says, once, on rank 1 in the middle of measuring; without the file it
trains. Warm-up and measuring have fixed numbers of steps (a block is as long as warm-up may last, and the
budget is 0), so that losses, parameters and bytes must equal those of an undisturbed study bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from results import schemas
from results.launch import Attempt
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

pytestmark = pytest.mark.slow

MODELS = '''
import os, time
from pathlib import Path
import psutil
import torch
from torch import nn
from workloads import Workload

ORDER = Path("fault")


def bench():
    """The process that watches: this one's torchrun is its child."""
    return psutil.Process(os.getppid()).ppid()


def fill(folder):
    """Leave no byte free where `folder` is."""
    with open(folder + "/filler", "wb") as file:
        for size in (2**20, 2**10, 1):
            try:
                while True:
                    file.write(bytes(size))
                    file.flush()
            except OSError:
                pass


def exhaust():
    taken = []
    while True:
        taken.append(torch.ones(2**24))



def set_clock(offset, seconds=0):
    Path("clock").write_text(offset)
    time.sleep(seconds)


def fault(words):
    name, _, argument = words.partition(" ")
    {
        "kill": lambda pid: os.kill({"rank": os.getpid, "torchrun": os.getppid, "bench": bench}[pid](), 9),
        "terminate": lambda pid: os.kill({"rank": os.getpid, "torchrun": os.getppid}[pid](), 15),
        "sleep": lambda seconds: time.sleep(float(seconds)),
        "raise": lambda text: (_ for _ in ()).throw(ValueError(text)),
        "fill": fill,
        "set-clock": set_clock,
        "set-clock-and-hang": lambda offset: set_clock(offset, seconds=600),
        "exhaust": lambda _: exhaust(),
    }[name](argument)


class Victim(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.calls = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 60 and os.environ["RANK"] == "1" and ORDER.exists():
            words = ORDER.read_text()
            ORDER.unlink()
            fault(words)
        return self.layers(x)


def _workload(module):
    def synthetic(generator, samples):
        return torch.randn(samples, 16, generator=generator), torch.randn(samples, 1, generator=generator)

    return Workload(module=module, loss=nn.functional.mse_loss, synthetic=synthetic)


def victim():
    return _workload(Victim())


def other():
    return _workload(nn.Linear(16, 1))
'''
COMMAND = (
    "matrix", "--workload", "py:models:victim,py:models:other", "--gpus", "2", "--strategy", "ddp",
    "--repeats", "1", "--batch-size", "4", "--device", "cpu", "--budget", "0", "--block-steps", "40",
    "--quads", "1", "--no-report", "--out",
)  # fmt: skip
HANG_AFTER = ("--hang-after", "30s")
"""Longer than a busy machine takes to import torch."""
Figures = dict[str, list[object]]


def _words(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("bench")), *arguments]


def _bench(
    folder: Path, *more: str, before: tuple[str, ...] = (), variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *_words(*COMMAND, str(folder / "study"), *more)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(variables or {})},
    )


def _figures(folder: Path) -> Figures:
    """What the runs that ended well did, by cell: losses, parameters and counted work of each rank."""
    study = Study(folder / "study")
    found: Figures = {}
    for result in study.results():
        if result.outcome is Outcome.OK:
            records = study.rank_records(result.cell_id, result.run_id)
            found[result.cell_id] = [
                (r.rank, r.warmup.loss, r.steps.loss, r.parameters_hash, r.work) for r in records
            ]
    return found


def _results(folder: Path, model: str) -> list[RunResult]:
    return [result for result in Study(folder / "study").results() if f"models-{model}" in result.cell_id]


def _attempt_of(folder: Path, run: RunResult) -> tuple[Path, Attempt]:
    path = folder / "study" / "launches" / run.launch_id / "attempt.json"
    return path.parent, schemas.ATTEMPT.read(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "models.py").write_text(MODELS)
    done = _bench(folder)
    assert done.returncode == 0, done.stderr
    records = [record for records in _figures(folder).values() for record in records]
    # 40 steps of warm-up and 6 blocks of 40, on 2 ranks in 2 cells.
    assert [(len(warmup), len(steps)) for _, warmup, steps, _, _ in records] == [(40, 240)] * 4
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def _one_failed(folder: Path) -> RunResult:
    """The run of the victim, of which there is one, beside a good run of the other cell."""
    (failed,) = _results(folder, "victim")
    assert not (folder / "fault").exists(), "the fault was never reached"
    return failed


def _finishes(folder: Path, undisturbed: Path, *more: str) -> None:
    """The same command ends well, touches no file that was there, and every figure is as it should be."""
    raw = {path: path.read_bytes() for path in folder.glob("study/cells/*/*/rank-*.json")}
    again = _bench(folder, *more)
    assert again.returncode == 0, again.stderr
    assert all(path.read_bytes() == data for path, data in raw.items())
    assert _figures(folder) == _figures(undisturbed)


OUTSIDE = "its processes were asked to end by a signal from outside"


@pytest.mark.parametrize(
    ("fault", "outcome", "reason", "more"),
    [
        ("kill rank", Outcome.CRASHED, "rank 1 was killed by SIGKILL", ("--rerun", "failed")),
        (
            "kill torchrun",
            Outcome.UNKNOWN,
            "the process that started the ranks was killed by SIGKILL",
            (),
        ),
        ("terminate rank", Outcome.CANCELLED, OUTSIDE, ()),
        ("terminate torchrun", Outcome.CANCELLED, OUTSIDE, ()),
        ("raise no more", Outcome.CRASHED, "rank 1: ValueError: no more", ("--rerun", "failed")),
    ],
)
def test_a_fault_costs_one_run_and_the_study_ends_as_if_it_had_not_been(
    fault: str, outcome: Outcome, reason: str, more: tuple[str, ...], folder: Path, undisturbed: Path
) -> None:
    (folder / "fault").write_text(fault)
    done = _bench(folder)
    failed = _one_failed(folder)
    assert done.returncode == 1
    assert (failed.outcome, failed.reason) == (outcome, reason)
    assert [result.outcome for result in _results(folder, "other")] == [Outcome.OK]
    _, attempt = _attempt_of(folder, failed)
    assert attempt.heartbeats.keys() == {"0", "1"}
    assert attempt.out_of_memory_kills == 0
    _finishes(folder, undisturbed, *more)


def test_a_rank_that_others_wait_for_is_named_with_its_stack_and_its_collectives(
    folder: Path, undisturbed: Path
) -> None:
    (folder / "fault").write_text("sleep 600")
    done = _bench(folder, *HANG_AFTER)
    failed = _one_failed(folder)
    assert done.returncode == 1
    assert failed.outcome is Outcome.HUNG
    assert str(failed.reason).startswith("no rank said anything for 3")
    counts = str(failed.reason).rpartition("; ")[2].split()
    assert counts[:3] == ["rank", "1", "had"]
    # Rank 0 waits in the sum that rank 1 has not come to.
    assert int(counts[8].rstrip(",")) - int(counts[4]) == 1, failed.reason
    launch, attempt = _attempt_of(folder, failed)
    assert attempt.stopped_by == failed.reason
    assert sorted(path.name for path in launch.glob("*flight*")) == [
        "flight-00000.json",
        "flight-00001.json",
    ]
    stacks = [next(launch.glob(f"torchrun/*/attempt_0/{rank}/stderr.log")).read_text() for rank in (0, 1)]
    assert "models.py" in stacks[1]
    assert "in fault" in stacks[1]
    assert "in backward" in stacks[0]
    _finishes(folder, undisturbed, "--rerun", "failed")


def test_a_killed_bench_is_followed_by_the_same_command(folder: Path, undisturbed: Path) -> None:
    (folder / "fault").write_text("kill bench")
    assert _bench(folder).returncode == -signal.SIGKILL
    # The workers finish the cell and find out that nobody watches.
    _wait(lambda: not _ranks(folder))
    assert not (folder / "fault").exists()
    _finishes(folder, undisturbed)
    assert len(_results(folder, "victim")) + len(_results(folder, "other")) == 2


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def _ranks(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if "harness.worker" in words and str(folder) in " ".join(words):
            found.append(process.pid)
    return found


def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_out_of_memory(
    folder: Path, undisturbed: Path, memory_group: Callable[[int], list[str]]
) -> None:
    (folder / "fault").write_text("exhaust")
    done = _bench(folder, before=tuple(memory_group(3 * 2**30)))
    failed = _one_failed(folder)
    assert done.returncode == 1
    assert (failed.outcome, failed.reason) == (
        Outcome.OUT_OF_MEMORY,
        "rank 1 was killed by SIGKILL, and meanwhile the kernel of its hosts ended 1 process for want of"
        " memory",
    )
    assert _attempt_of(folder, failed)[1].out_of_memory_kills == 1
    _finishes(folder, undisturbed, "--rerun", "failed")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _duplicate(path: Path) -> None:
    shutil.copy(path, path.with_name("rank-00000.json"))


def _from_another_cell(path: Path) -> None:
    (other,) = path.parents[2].glob(f"*other*/*/{path.name}")
    shutil.copy(other, path)


@pytest.mark.parametrize("damage", [_cut, _empty, _duplicate, _from_another_cell])
def test_a_damaged_rank_file_costs_its_run_and_the_same_command_makes_another(
    damage: Callable[[Path], None], folder: Path, undisturbed: Path
) -> None:
    shutil.copytree(undisturbed / "study", folder / "study")
    (path,) = folder.glob("study/cells/*victim*/*/rank-00001.json")
    damage(path)
    subprocess.run(_words("collect", "study"), cwd=folder, check=True, capture_output=True)
    (result,) = _results(folder, "victim")
    assert result.outcome is Outcome.UNKNOWN
    assert "rank-0000" in str(result.reason)
    assert _figures(folder).keys() == {one.cell_id for one in _results(folder, "other")}
    _finishes(folder, undisturbed)


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """A disk of its own below the test's folder, a little larger than a study asks for."""
    path = folder / "study"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=230m", "none", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this machine or user mounts no tmpfs: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_that_fills_up_is_named_and_with_room_the_same_command_goes_on(
    folder: Path, disk: Path, undisturbed: Path
) -> None:
    (folder / "fault").write_text(f"fill {disk}")
    done = _bench(folder)
    assert done.returncode == 1
    assert "free some space" in done.stderr
    assert "Traceback" not in done.stderr
    (disk / "filler").unlink()
    _finishes(folder, undisturbed)


def test_two_commands_at_once_do_the_work_once(folder: Path, undisturbed: Path) -> None:
    words = _words(*COMMAND, str(folder / "study"))
    both = [
        subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 1], errors
    assert "is in use by another bench" in errors[codes.index(1)]
    assert _figures(folder) == _figures(undisturbed)
    assert len(json.loads(f"[{','.join((folder / 'study' / 'index.jsonl').read_text().split())}]")) == 2
    _finishes(folder, undisturbed)


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
def clock(folder: Path) -> dict[str, str]:
    """Variables under which every Python's time of day is off by the seconds in the file `clock`.

    The monotonic clock and the times of files stay what they are, as on a host whose clock is set.
    """
    (folder / "clock").write_text("0")
    (folder / "sitecustomize.py").write_text(CLOCK)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def test_a_clock_that_is_set_back_changes_no_figure(
    folder: Path, clock: dict[str, str], undisturbed: Path
) -> None:
    (folder / "fault").write_text("set-clock -86400")
    done = _bench(folder, variables=clock)
    assert done.returncode == 0, done.stderr
    (result,) = _results(folder, "victim")
    _, attempt = _attempt_of(folder, result)
    # The fault has come, and what was timed by the monotonic clock does not show it.
    assert attempt.started_at is not None
    assert attempt.ended_at < attempt.started_at
    assert result.step_ns is not None
    assert 0 < result.step_ns.value < 1e9
    assert result.outcome is Outcome.OK
    assert _figures(folder) == _figures(undisturbed)
    _finishes(folder, undisturbed)


def test_a_rank_that_hangs_is_found_out_though_the_clock_was_set_back(
    folder: Path, clock: dict[str, str]
) -> None:
    (folder / "fault").write_text("set-clock-and-hang -86400")
    began = time.monotonic()
    _bench(folder, *HANG_AFTER, variables=clock)
    assert time.monotonic() - began < 200
    failed = _one_failed(folder)
    assert failed.outcome is Outcome.HUNG
    assert "no rank said anything for 3" in str(failed.reason)
