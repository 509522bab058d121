"""What a cluster, its users and a program do to jobs: every end has its name, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.code import PACKAGES, checkout
from harness.launch.ending import Signs, asked_to_end, killed_on_a_node, reading
from harness.launchers.slurm import call as slurm_call
from results.job_store import JobStore
from results.launch import RankExit
from results.outcome import Outcome
from results.run import RunResult
from slurm.client import Client
from slurm.notices import SRUN_KILLED
from slurm.runner import Completed, NoAnswerError, run

# One device, or two nodes; a good cell beside each that a fault is for.
ALONE = ("--gpus", "1", "--strategy", "single", "--batch-size", "4,8")
PAIR = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,8")
FAULTS = {8: "raise", 16: "hang", 32: "die", 64: "orphan"}
MANY = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,8,16,32,64", "--hang-after", "25s")
Bench = Any


class Scene:
    """A study whose model does, at a known step, what the file `fault` says."""

    def __init__(self, bench: Bench, lab: Any, model: Callable[..., tuple[str, ...]]) -> None:
        self.bench, self.lab = bench, lab
        self._model = model
        self.raw: Mapping[Path, bytes] = {}

    def submit(self, cells: tuple[str, ...], *faults: str, out: str = "study", **variables: str) -> int:
        """Submit the study's one job. Returns its number."""
        call = self._model(self.bench.folder, *faults)
        done = self.bench.matrix(*call, *cells, "--gpus-per-node", "1", out=out, **variables)
        assert done.code == 0, done.stderr
        return int(self.bench.jobs(out)[-1])

    def start(self, cells: tuple[str, ...]) -> tuple[int, psutil.Process]:
        """Submit it, and give its number and its last rank, which stands still in the cell of batch 8."""
        gpus = cells[1]
        job_id = self.submit(cells, f"{gpus} 8 wait")
        reached = self.bench.folder / "reached"
        self.lab.wait(reached.exists, "the rank stands still", 90)
        self.raw = self.files()
        return job_id, psutil.Process(int(reached.read_text()))

    def go_on(self) -> None:
        (self.bench.folder / "fault").unlink(missing_ok=True)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.bench.folder.glob("study/cells/*/*/rank-*.json")}

    def again(self, cells: tuple[str, ...], *options: str) -> Any:
        """The same command, without a fault."""
        call = self._model(self.bench.folder)
        return self.bench.matrix(*call, *cells, "--gpus-per-node", "1", *options)

    def lost(self) -> list[RunResult]:
        return [result for result in self.bench.results() if result.outcome is not Outcome.OK]

    def told(self) -> list[tuple[Outcome, str]]:
        """Outcome and reason of the runs that are not ok."""
        return [(result.outcome, str(result.reason)) for result in self.lost()]

    def must_be_whole(self, expected: dict[str, set[bytes]]) -> None:
        """Every cell is done as if nothing had been, and what was there is as it was."""
        figures = self.bench.figures()
        plan = {cell.id for cell in self.bench.study().plans()[0].cells}
        assert plan <= set(figures)
        assert figures == {cell: expected[cell] for cell in figures}
        now = self.files()
        assert all(now[path] == data for path, data in self.raw.items())
        self.bench.wait_for_processes()

    def runs(self) -> list[tuple[int, Outcome]]:
        """Batch size and outcome of every run of the plan's cells, in the order of their starts."""
        plan = {cell.id: cell.micro_batch for cell in self.bench.study().plans()[0].cells}
        found = sorted(self.bench.results(), key=lambda result: result.run_id)
        return [(plan[result.cell_id], result.outcome) for result in found if result.cell_id in plan]


@pytest.fixture
def scene(bench: Bench, lab: Any, faulty_model: Callable[..., tuple[str, ...]]) -> Scene:
    return Scene(bench, lab, faulty_model)


@pytest.fixture(scope="module")
def expected(
    bench_in: Callable[..., Bench],
    faulty_model: Callable[..., tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, set[bytes]]:
    """What the cells train when nothing goes wrong, on this machine."""
    bench = bench_in(tmp_path_factory.mktemp("undisturbed"))
    model = faulty_model(bench.folder)
    cells = ("--gpus", "1,2", "--strategy", "single,ddp", "--batch-size", MANY[5])
    done = bench.matrix(*model, *cells)
    assert done.code == 0, done.stderr
    figures: dict[str, set[bytes]] = bench.figures()
    assert len(figures) == 10
    return figures


# What a program does


@pytest.fixture(scope="module")
def many(
    running_lab: Any,
    bench_in: Callable[..., Bench],
    faulty_model: Callable[..., tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    """A job of a good cell and of one for each fault, at its end."""
    running_lab.wait_idle()
    scene = Scene(bench_in(tmp_path_factory.mktemp("many"), running_lab), running_lab, faulty_model)
    scene.submit(MANY, *(f"2 {batch} {fault}" for batch, fault in FAULTS.items()))
    scene.bench.settle()
    scene.raw = scene.files()
    yield scene
    running_lab.clean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "outcome", "words"),
    [
        (8, Outcome.CRASHED, "rank 1: ValueError: as it was told"),
        (16, Outcome.HUNG, "no rank said anything for 25 s"),
        (32, Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
        # Who killed a torchrun that had nothing to tell is not known; the cell is run again.
        (64, Outcome.UNKNOWN, "a node's torchrun was killed by SIGKILL"),
    ],
)
def test_each_fault_of_a_program_has_its_outcome(
    many: Scene, batch: int, outcome: Outcome, words: str
) -> None:
    cells = {cell.id: cell.micro_batch for cell in many.bench.study().plans()[0].cells}
    found = [result for result in many.bench.results() if cells.get(result.cell_id) == batch]
    assert [(result.outcome, words in str(result.reason)) for result in found] == [(outcome, True)], found


@pytest.mark.slow
def test_a_rank_that_hangs_leaves_its_stack(many: Scene) -> None:
    stacks = [path.read_text() for path in many.bench.study().root.glob("launches/*/torchrun/**/stderr.log")]
    assert [text for text in stacks if "faulty.py" in text and "in fault" in text]


@pytest.mark.slow
def test_what_failed_is_run_again_when_asked_and_all_is_as_if_undisturbed(
    many: Scene, expected: dict[str, set[bytes]]
) -> None:
    assert [batch for batch, outcome in many.runs() if outcome is Outcome.OK] == [4]
    # By itself the same command runs again what was not the program's fault alone.
    assert many.again(MANY).code == 0
    many.bench.settle()
    assert sorted(batch for batch, outcome in many.runs() if outcome is Outcome.OK) == [4, 64]
    assert many.again(MANY, "--rerun", "failed").code == 0
    many.bench.settle()
    many.must_be_whole(expected)
    assert len(many.lost()) == 4


def test_a_rank_that_lost_its_peer_is_no_culprit() -> None:
    victim = RankExit(rank=0, exit_code=1, signal=None, message=None)
    lost = ("a node's torchrun", "SIGKILL")
    alone = Signs(exit_code=143, killed_on_a_node=lost)
    assert reading([victim], None, alone) == (Outcome.CRASHED, "rank 0: exit code 1")
    told = Signs(exit_code=143, killed_on_a_node=lost, recorded=frozenset({0}))
    assert reading([victim], None, told) == (Outcome.UNKNOWN, "a node's torchrun was killed by SIGKILL")
    killed = RankExit(rank=0, exit_code=None, signal="SIGSEGV", message=None)
    assert reading([killed], None, told) == (Outcome.CRASHED, "rank 0 was killed by SIGSEGV")
    short = Signs(exit_code=137, killed_on_a_node=("the agent of n2", "SIGKILL"), out_of_memory_kills=1)
    assert reading([], None, short)[0] is Outcome.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("agent", "srun", "killed"),
    [
        ("torchrun was killed by SIGSEGV\n", "", ("a node's torchrun", "SIGSEGV")),
        ("", "srun: error: n2: task 1: Killed\n", ("the agent of n2", "SIGKILL")),
        (
            "torchrun was killed by SIGKILL\n",
            "srun: error: n1: tasks 0-1: Killed\n",
            ("a node's torchrun", "SIGKILL"),
        ),
        ("", "srun: error: n1: task 0: Exited with exit code 1\n", None),
    ],
)
def test_who_was_killed_is_in_the_logs(
    tmp_path: Path, agent: str, srun: str, killed: tuple[str, str] | None
) -> None:
    (tmp_path / "agent-1.log").write_text(f"some words\n{agent}")
    (tmp_path / "torchrun.log").write_text(f"some words\n{srun}")
    assert killed_on_a_node(sorted(tmp_path.glob("*.log")), SRUN_KILLED) == killed


def test_a_torchrun_that_says_twice_that_it_was_asked_to_end_is_one(tmp_path: Path) -> None:
    """The second is of a signal that came while it waited for its ranks, after the first."""
    said = "SignalException: Process {} got signal: 15\n"
    logs = [tmp_path / "agent-0.log", tmp_path / "agent-1.log"]
    logs[0].write_text(said.format(7) + said.format(7))
    logs[1].write_text("")
    assert not asked_to_end(logs, nodes=2)
    # Hosts number their processes each for itself.
    logs[1].write_text(said.format(7))
    assert asked_to_end(logs, nodes=2)


# What Slurm does


@pytest.mark.slow
def test_a_cancelled_job_goes_on_with_the_same_command(scene: Scene, expected: dict[str, set[bytes]]) -> None:
    scene.start(ALONE)
    assert scene.bench("cancel", "study").code == 0
    scene.bench.settle()
    assert scene.again(ALONE).code == 0
    assert scene.told() == [(Outcome.CANCELLED, "the job was asked to end: it was cancelled")]
    scene.bench.settle()
    scene.must_be_whole(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"), [("requeue", "Slurm ended it due to job requeue"), ("urgent", "due to preemption")]
)
def test_a_job_that_is_put_back_skips_what_it_has_done(
    scene: Scene, expected: dict[str, set[bytes]], way: str, words: str
) -> None:
    job_id, _ = scene.start(ALONE)
    done_before = len(scene.raw)
    if way == "requeue":
        scene.lab.command("scontrol", "requeue", str(job_id))
    else:
        whole = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        scene.lab.command("sbatch", *whole)
    scene.lab.wait_for(job_id, "PENDING", timeout_s=60)
    scene.go_on()
    assert "nothing to submit: 1 job of it" in scene.again(ALONE).stderr
    scene.bench.settle()
    ((outcome, reason),) = scene.told()
    assert outcome is Outcome.PREEMPTED
    assert words in reason
    scene.must_be_whole(expected)
    # Two runs of one cell at most: the other one was done already, or had not begun.
    assert len(scene.runs()) == 3
    assert done_before in (0, 1)
    assert "every cell has its runs" in scene.again(ALONE).stderr
    assert scene.bench.jobs() == [job_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end_in_s", "words"),
    [
        (60, "the job's time limit was near"),
        (1, "the job was asked to end: Slurm ended it due to time limit"),
    ],
)
def test_the_end_of_a_jobs_time(
    scene: Scene, expected: dict[str, set[bytes]], end_in_s: int, words: str
) -> None:
    (scene.bench.folder / "site.yaml").write_text("{gpu_request: none, time: {signal: 22s}}")
    cells = (*ALONE, "--site", "site.yaml")
    job_id, _ = scene.start(cells)
    scene.lab.command("scontrol", "update", f"JobId={job_id}", f"EndTime=now+{end_in_s}")
    scene.bench.settle()
    assert scene.again(cells).code == 0
    assert scene.told() == [(Outcome.TIMED_OUT, words)]
    scene.bench.settle()
    scene.must_be_whole(expected)


@pytest.mark.slow
@pytest.mark.parametrize("node", ["first", "second"])
def test_a_node_without_power(scene: Scene, expected: dict[str, set[bytes]], node: str) -> None:
    job_id, _ = scene.start(PAIR)
    nodes = Client().query([job_id])[job_id].nodes
    scene.go_on()
    scene.lab.kill_node(nodes[0 if node == "first" else 1])
    scene.bench.settle()
    scene.again(PAIR)
    scene.bench.settle()
    assert [outcome for outcome, _ in scene.told()] == [Outcome.NODE_FAILED], scene.told()
    scene.must_be_whole(expected)


@pytest.mark.slow
def test_a_jobs_program_that_is_killed(scene: Scene, expected: dict[str, set[bytes]]) -> None:
    scene.start(ALONE)
    (program,) = [p for p in scene.bench.processes() if "harness.launchers.program" in p.cmdline()]
    program.kill()
    scene.bench.settle()
    scene.bench.wait_for_processes()
    assert scene.again(ALONE).code == 0
    ((outcome, reason),) = scene.told()
    assert outcome is Outcome.CANCELLED
    assert "SIGKILL" in reason
    scene.bench.settle()
    scene.must_be_whole(expected)


# What people do


def _edited(scene: Scene, old: str, new: str) -> int:
    """Submit the script of the study's job by hand, changed. Returns the number of that job."""
    (path,) = scene.bench.study().root.glob("jobs/*/script.sh")
    text = path.read_text()
    assert old in text
    hand = scene.bench.folder / "by hand.sh"
    hand.write_text(text.replace(old, new))
    return int(scene.lab.command("sbatch", "--parsable", str(hand)))


@pytest.mark.slow
def test_scripts_that_are_submitted_by_hand_harm_nothing(
    scene: Scene, expected: dict[str, set[bytes]]
) -> None:
    job_id, _ = scene.start(ALONE)
    for nodes in ("--nodes=1", "--nodes=2"):
        stray = _edited(scene, "--nodes=1", nodes)
        assert scene.lab.wait_for(stray, "FAILED", "COMPLETED").state == "FAILED"
        (log,) = scene.bench.study().root.glob(f"jobs/*/job-{stray}.log")
        assert "a script is not submitted by hand" in log.read_text()
    scene.go_on()
    scene.bench.settle()
    assert scene.told() == []
    scene.must_be_whole(expected)
    assert "every cell has its runs" in scene.again(ALONE).stderr
    store = JobStore(scene.bench.study().root)
    (job,) = store.jobs()
    end = store.ended(job.job_id)
    assert end is not None
    assert (end.scheduler_id, end.outcome) == (str(job_id), Outcome.OK)
    assert [start.scheduler_id for start in store.starts(job.job_id)] == [str(job_id)]


def test_a_script_that_was_edited_and_submitted_for_a_job_that_was_not_taken(
    scene: Scene, deaf: pytest.MonkeyPatch
) -> None:
    """Nothing tells that the job is not the study's, but what it was given does not fit."""
    assert scene.again(ALONE).code == 1
    deaf.undo()
    stray = _edited(scene, "--nodes=1", "--nodes=2")
    # It says why by itself: nothing for Slurm to mend.
    scene.lab.wait_for(stray, "COMPLETED")
    store = JobStore(scene.bench.study().root)
    (start,) = store.starts(store.jobs()[0].job_id)
    assert start.outcome is Outcome.CANCELLED
    assert "the allocation has 2 nodes and the job is for 1" in str(start.reason)
    assert scene.bench.study().launches() == []
    # It is found by its name, and has ended: another one is submitted.
    assert scene.again(ALONE).code == 0
    assert len(scene.bench.jobs()) == 2
    assert store.ended(store.jobs()[0].job_id) is not None


@pytest.mark.slow
def test_code_that_is_edited_while_the_job_waits(
    scene: Scene, lab: Any, expected: dict[str, set[bytes]]
) -> None:
    copy = scene.bench.folder / "code"
    for name in PACKAGES:
        shutil.copytree(checkout() / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    model = scene._model(scene.bench.folder)
    words = ["matrix", *model, *scene.bench.counted, *ALONE, "--launcher", "slurm", "--out", "study"]

    def call() -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "harness.cli", *words],
            cwd=scene.bench.folder,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    lab.drain()
    call()
    with (copy / "strategies" / "__init__.py").open("a") as file:
        file.write("# edited\n")
    lab.resume()
    scene.bench.settle()
    store = JobStore(scene.bench.study().root)
    (start,) = store.starts(store.jobs()[0].job_id)
    assert start.outcome is Outcome.CANCELLED
    assert "the code of bench was edited while the job was waiting" in str(start.reason)
    assert scene.bench.study().launches() == []
    assert "every cell" not in call()
    scene.bench.settle()
    scene.must_be_whole(expected)


@pytest.mark.slow
def test_a_submission_without_an_answer_is_found_again(
    scene: Scene, expected: dict[str, set[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(command: Any, *, stdin: str, environment: Mapping[str, str], timeout_s: float) -> Completed:
        done = run(command, stdin=stdin, environment=environment, timeout_s=timeout_s)
        if command[0] == "sbatch":
            raise NoAnswerError("no answer in 60 s to: sbatch")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(slurm_call, "Client", lambda: Client(silent))
        done = scene.again(ALONE)
    assert (done.code, "no answer in 60 s" in done.stderr) == (1, True)
    assert scene.bench.jobs() == []
    assert "nothing to submit: 1 job of it" in scene.again(ALONE).stderr
    (job_id,) = scene.bench.jobs()
    assert scene.lab.command("squeue", "--noheader", "--format=%A").split() == [str(job_id)]
    scene.bench.settle()
    scene.must_be_whole(expected)


@pytest.fixture
def deaf() -> Iterator[pytest.MonkeyPatch]:
    """The scheduler takes no job and does not say so, until this is undone."""

    def no_sbatch(command: Any, *, stdin: str, environment: Mapping[str, str], timeout_s: float) -> Completed:
        if command[0] == "sbatch":
            raise NoAnswerError("no answer in 60 s to: sbatch")
        return run(command, stdin=stdin, environment=environment, timeout_s=timeout_s)

    patch = pytest.MonkeyPatch()
    patch.setattr(slurm_call, "Client", lambda: Client(no_sbatch))
    yield patch
    patch.undo()


def test_a_job_that_the_scheduler_never_took_is_submitted_again(
    scene: Scene, deaf: pytest.MonkeyPatch
) -> None:
    assert scene.again(ALONE).code == 1
    deaf.undo()
    assert scene.again(ALONE).code == 0
    store = JobStore(scene.bench.study().root)
    ends = [store.ended(job.job_id) for job in store.jobs()]
    assert [(end.outcome, end.reason) if end else None for end in ends] == [
        (Outcome.CANCELLED, "the scheduler never took it"),
        None,
    ]
    assert len(scene.bench.jobs()) == 1
