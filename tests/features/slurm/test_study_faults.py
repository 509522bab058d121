"""Faults of a cluster, its users and a program: every end of a job has its name, and no run is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from harness.features.slurm import call as slurm_call
from harness.jobs.start import END_S
from harness.launch.ending import killed_on_a_node
from harness.launch.starter import LogWords
from harness.machine.code import PACKAGES, checkout
from results.job_store import JobStore
from results.outcome import Outcome
from results.run import RunResult
from slurm.client import Client
from slurm.notices import SRUN_KILLED
from slurm.runner import Completed, NoAnswerError, run_program

# The jobs that run beside each other share one time.
pytestmark = pytest.mark.xdist_group("slurm faults")

# One device, or two nodes; a good cell beside each that a fault is for.
ALONE = ("--gpus", "1", "--strategy", "single", "--batch-size", "4,8")
PAIR = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,8")
FAULTS = {
    16: ("hang", Outcome.HUNG, r"no rank said anything for ([6-9]\d|\d{3,}) s"),
    32: ("kill rank", Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
    # No rank's program can do that: the cell is run again.
    64: ("kill torchrun", Outcome.MISSING_RANKS, "a node's torchrun was killed by SIGKILL"),
}
"""The fault of rank 1, and the outcome and a pattern of the reason of the run, by batch size. A rank that
hangs is silent for the 60 s of `--hang-after`, or longer on a busy machine."""
MANY = ("--gpus", "2", "--strategy", "ddp", "--batch-size", "4,16,32,64", "--hang-after", "60s")
"""Longer than ranks take to start while all the other jobs run."""
Bench = Any
Figures = dict[str, set[bytes]]


class Scene:
    """A study of one job, whose model does what the file `fault` says."""

    def __init__(self, bench: Bench, model: Callable[..., tuple[str, ...]], cells: tuple[str, ...]) -> None:
        self.bench, self.cells = bench, cells
        self._model = model
        self.raw: Mapping[Path, bytes] = {}
        self.job_id = 0
        self.told_at = 0.0
        """The time at which Slurm was given another end of its job."""

    def submit(self, *faults: str) -> None:
        """Submit the study's one job."""
        done = self.again(*faults)
        assert done.code == 0, done.stderr
        self.job_id = int(self.bench.jobs()[-1])

    def rank(self) -> bool:
        """Whether the last rank stands still in the cell of batch 8."""
        return bool((self.bench.folder / "reached").exists())

    def is_put_back(self) -> bool:
        return bool(Client().query([self.job_id])[self.job_id].restarts)

    def go_on(self) -> None:
        self.raw = self.files()
        (self.bench.folder / "fault").unlink(missing_ok=True)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.bench.folder.glob("study/cells/*/*/rank-*.json")}

    def again(self, *faults: str, options: tuple[str, ...] = ()) -> Any:
        """The one command, without a fault unless one is given."""
        call = self._model(self.bench.folder, *faults)
        site = ("--site", "site.yaml") if (self.bench.folder / "site.yaml").exists() else ()
        return self.bench.matrix(*call, *self.cells, "--gpus-per-node", "1", *site, *options)

    def lost(self) -> list[RunResult]:
        return [result for result in self.bench.results() if result.outcome is not Outcome.OK]

    def told(self) -> list[tuple[Outcome, str]]:
        """Outcome and reason of the runs that are not ok."""
        return [(result.outcome, str(result.reason)) for result in self.lost()]

    def must_be_whole(self, expected: Figures) -> None:
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
def scene(bench, faulty_model) -> Scene:
    return Scene(bench, faulty_model, ALONE)


# Jobs that run beside each other: each study meets a fault of its own.

SITE = "{{gpu_request: none, directives: {{{where}}}, time: {{signal: 22s}}}}"
NEAR_S = 60
"""Seconds to the end of a job after its limit was changed; its profile asks for a notice 22 s before."""
STANDING = ("cancelled", "requeued", "preempted", "near its limit", "past its limit", "killed", "copied")
"""Studies whose rank stands still while something happens to their jobs."""


@pytest.fixture(scope="module")
def scenes(running_lab, bench_in, faulty_model, tmp_path_factory) -> Iterator[dict[str, Scene]]:
    """The studies of STANDING and one with every fault of a program, each at the end of its first job."""
    lab = running_lab
    lab.wait_idle()
    found = {}
    for name in ("faulty", *STANDING):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        # Preemption takes a whole node.
        where = "nodelist: n4" if name == "preempted" else "exclude: n4"
        (folder / "site.yaml").write_text(SITE.format(where=where))
        found[name] = Scene(bench_in(folder, lab), faulty_model, MANY if name == "faulty" else ALONE)
    found["faulty"].submit(*(f"1/2 {batch} {fault}" for batch, (fault, *_) in FAULTS.items()))
    for name in STANDING:
        found[name].submit("0/1 8 wait")
    for name in STANDING:
        lab.wait(found[name].rank, f"the rank stands still: {name}", 400)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lab.environment.items():
            patch.setenv(name, value)
        _disturb(lab, found)
        lab.wait(found["requeued"].is_put_back, "Slurm puts it back: requeued")
        found["requeued"].go_on()
        assert "nothing to submit: 1 job of it" in found["requeued"].again().stderr
        lab.command("scontrol", "release", str(found["requeued"].job_id))
        lab.wait(found["preempted"].is_put_back, "Slurm puts it back: preempted")
    for name in ("preempted", "copied"):
        found[name].go_on()
    yield found
    running_lab.clean()


def _disturb(lab: Any, found: dict[str, Scene]) -> None:
    assert found["cancelled"].bench("cancel", "study").code == 0
    # Held, so that Slurm does not start it before the same command has asked for it.
    lab.command("scontrol", "requeuehold", str(found["requeued"].job_id))
    urgent = ("--partition=urgent", "--nodelist=n4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    lab.command("sbatch", *urgent)
    # The controller looks every 30 seconds, and gives a notice up to 30 seconds early.
    for name, end in (("near its limit", NEAR_S), ("past its limit", 1)):
        found[name].told_at = time.time()
        lab.command("scontrol", "update", f"JobId={found[name].job_id}", f"EndTime=now+{end}")
    (program,) = [p for p in found["killed"].bench.processes() if "harness.launchers.program" in p.cmdline()]
    program.kill()
    for nodes in ("--nodes=1", "--nodes=2"):
        stray = _edited(lab, found["copied"], "--nodes=1", nodes)
        assert lab.wait_for(stray, "FAILED", "COMPLETED").state == "FAILED"
        (log,) = found["copied"].bench.study().root.glob(f"jobs/*/job-{stray}.log")
        assert "a script is not submitted by hand" in log.read_text()


def _edited(lab: Any, scene: Scene, old: str, new: str) -> int:
    """Submit the script of the study's job by hand, changed. Returns the number of that job."""
    (path,) = scene.bench.study().root.glob("jobs/*/script.sh")
    text = path.read_text()
    assert old in text
    hand = scene.bench.folder / "by hand.sh"
    hand.write_text(text.replace(old, new))
    return int(lab.command("sbatch", "--parsable", str(hand)))


@pytest.fixture(scope="module")
def ended(scenes) -> dict[str, Any]:
    """The answers of the same command at the end of all jobs."""
    scenes["faulty"].bench.settle()
    for scene in scenes.values():
        scene.raw = {**scene.raw, **scene.files()}
    return {name: scene.again() for name, scene in scenes.items()}


@pytest.fixture(scope="module")
def again(scenes, ended) -> dict[str, Scene]:
    """The studies at the end of the jobs that it has submitted."""
    scenes["faulty"].bench.settle()
    return scenes


@pytest.mark.slow
@pytest.mark.parametrize("batch", FAULTS)
def test_each_fault_of_a_program_has_its_outcome(again, batch) -> None:
    faulty = again["faulty"]
    _, outcome, words = FAULTS[batch]
    cells = {cell.id: cell.micro_batch for cell in faulty.bench.study().plans()[0].cells}
    [(found, reason)] = [
        (run.outcome, str(run.reason)) for run in faulty.lost() if cells.get(run.cell_id) == batch
    ]
    assert found is outcome, reason
    assert re.search(words, reason), reason


@pytest.mark.slow
def test_a_rank_that_hangs_leaves_its_stack(again) -> None:
    root = again["faulty"].bench.study().root
    stacks = [path.read_text() for path in root.glob("launches/*/torchrun/**/stderr.log")]
    assert [text for text in stacks if "faulty.py" in text and "in hang" in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("cancelled", Outcome.CANCELLED, "the job was asked to end: it was cancelled"),
        ("near its limit", Outcome.TIMED_OUT, "the job's time limit was near"),
        # Slurm gives the notice and ends the job in the same look at its time: either may be heard first.
        (
            "past its limit",
            Outcome.TIMED_OUT,
            "the job was asked to end: Slurm ended it due to time limit|the job's time limit was near",
        ),
        ("killed", Outcome.MISSING_RANKS, ".*SIGKILL.*"),
    ],
)
def test_a_job_that_was_ended_goes_on_with_the_same_command(
    again, ended, expected, name, outcome, words
) -> None:
    ((found, reason),) = again[name].told()
    assert found is outcome
    assert re.fullmatch(words, reason), reason
    assert ended[name].code == 0
    assert len(again[name].bench.jobs()) == 2
    again[name].must_be_whole(expected)


@pytest.mark.slow
def test_a_job_whose_notice_comes_early_uses_its_time(again) -> None:
    near = again["near its limit"]
    (lost,) = near.lost()
    attempt = near.bench.study().attempts()[lost.run_id]
    # Slurm was to tell 22 s before the end, and may do so as soon as it hears of that.
    assert datetime.fromisoformat(attempt.ended_at).timestamp() >= near.told_at + NEAR_S - END_S - 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [("requeued", "Slurm ended it due to job requeue"), ("preempted", "due to preemption")],
)
def test_a_job_that_is_put_back_skips_what_it_has_done(again, ended, expected, name, words) -> None:
    ((outcome, reason),) = again[name].told()
    assert outcome is Outcome.PREEMPTED
    assert words in reason
    again[name].must_be_whole(expected)
    assert sorted(batch for batch, _ in again[name].runs()) == [4, 8, 8]
    assert "every cell has its runs" in ended[name].stderr
    assert again[name].bench.jobs() == [again[name].job_id]


@pytest.mark.slow
def test_scripts_that_are_submitted_by_hand_harm_nothing(again, ended, expected) -> None:
    copied = again["copied"]
    assert copied.told() == []
    copied.must_be_whole(expected)
    assert "every cell has its runs" in ended["copied"].stderr
    store = JobStore(copied.bench.study().root)
    (job,) = store.jobs()
    end = store.ended(job.job_id)
    assert (end.scheduler_id, end.outcome) == (str(copied.job_id), Outcome.OK)
    assert [start.scheduler_id for start in store.starts(job.job_id)] == [str(copied.job_id)]


@pytest.mark.slow
def test_what_failed_is_run_again_when_asked_and_all_is_as_if_undisturbed(again, expected) -> None:
    faulty = again["faulty"]
    # By itself the same command has run again what was not the program's fault alone.
    assert sorted(batch for batch, outcome in faulty.runs() if outcome is Outcome.OK) == [4, 64]
    assert faulty.again(options=("--rerun", "failed")).code == 0
    faulty.bench.settle()
    faulty.must_be_whole(expected)
    assert len(faulty.lost()) == len(FAULTS)


@pytest.mark.slow
def test_a_node_without_power(scene, lab, expected) -> None:
    """First the node of rank 1, which rank 0 notices before Slurm does; then the program's node."""
    scene.cells = PAIR
    scene.submit("1/2 8 wait")
    for place in (1, 0):
        lab.wait(scene.rank, "the rank stands still", 200)
        scene.raw = {**scene.raw, **scene.files()}
        (scene.bench.folder / "reached").unlink()
        node = lab.hosts(scene.job_id)[place]
        lab.kill_node(node)
        if place:
            lab.wait(lambda: len(scene.files()) > len(scene.raw), "rank 0 has noticed")
        lab.set_down(node)
    lab.wait(scene.rank, "the rank stands still", 200)
    scene.go_on()
    scene.bench.settle()
    scene.again()
    scene.bench.settle()
    assert [outcome for outcome, _ in scene.told()] == [Outcome.NODE_FAILED] * 2, scene.told()
    scene.must_be_whole(expected)


@pytest.mark.slow
@pytest.mark.long
def test_a_controller_that_is_restarted_while_a_job_runs(scene, lab, expected) -> None:
    """It is away when the job starts its next launch: that one is tried again, and no run is lost."""
    scene.cells = (*PAIR[:-1], "8")
    # The job's baseline, on one device, comes first.
    scene.submit("0/1 8 wait")
    lab.wait(scene.rank, "the rank stands still", 200)
    lab.kill_controller()
    try:
        scene.go_on()
        lab.wait(
            lambda: Outcome.NODE_FAILED in [outcome for outcome, _ in scene.told()],
            "a launch that nobody answered",
            200,
        )
    finally:
        lab.start_controller()
    scene.bench.settle()
    assert {outcome for outcome, _ in scene.told()} == {Outcome.NODE_FAILED}, scene.told()
    assert all("the scheduler did not answer: Unable to" in reason for _, reason in scene.told())
    scene.must_be_whole(expected)


# How an end is read


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
def test_who_was_killed_is_in_the_logs(tmp_path, agent, srun, killed) -> None:
    (tmp_path / "agent-1.log").write_text(f"some words\n{agent}")
    (tmp_path / "torchrun.log").write_text(f"some words\n{srun}")
    assert killed_on_a_node(tmp_path, LogWords(agent_killed=SRUN_KILLED)) == killed


# What people do


@pytest.mark.slow
def test_a_script_that_was_edited_and_submitted_for_a_job_that_was_not_taken(scene, lab, deaf) -> None:
    """The job cannot know that it is not the study's, but its allocation does not fit."""
    assert scene.again().code == 1
    deaf.undo()
    stray = _edited(lab, scene, "--nodes=1", "--nodes=2")
    # It says why by itself: nothing for Slurm to mend.
    lab.wait_for(stray, "COMPLETED")
    store = JobStore(scene.bench.study().root)
    (start,) = store.starts(store.jobs()[0].job_id)
    assert start.outcome is Outcome.CANCELLED
    assert "the allocation has 2 nodes and the job is for 1" in str(start.reason)
    assert scene.bench.study().launches() == []
    # It is found by its name, and has ended: another one is submitted.
    assert scene.again().code == 0
    assert len(scene.bench.jobs()) == 2
    assert store.ended(store.jobs()[0].job_id) is not None


@pytest.mark.slow
def test_a_launch_whose_step_slurm_does_not_create_is_run_again(scene) -> None:
    scene.cells = (*ALONE[:-1], "8")
    profile = scene.bench.folder / "site.yaml"
    profile.write_text("{gpu_request: none, step_creation: 10s, setup: [srun -n1 sleep 600 &]}")
    assert scene.again(options=("--retries", "0")).code == 0
    scene.bench.settle()
    assert [outcome for outcome, _ in scene.told()] == [Outcome.NODE_FAILED]
    words = "the scheduler started no process within 10 s: Job"
    assert all(words in reason and "nodes are busy" in reason for _, reason in scene.told())
    profile.write_text("gpu_request: none")
    assert scene.again().code == 0
    assert len(scene.bench.jobs()) == 2


@pytest.mark.slow
def test_code_that_is_edited_while_the_job_waits(scene, lab, expected) -> None:
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
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    lab.drain()
    call()
    with (copy / "strategies" / "__init__.py").open("a") as file:
        file.write("EDITED = True\n")
    lab.resume()
    scene.bench.settle()
    store = JobStore(scene.bench.study().root)
    (start,) = store.starts(store.jobs()[0].job_id)
    assert start.outcome is Outcome.CANCELLED
    assert "the code of bench was edited after the job was submitted" in str(start.reason)
    assert scene.bench.study().launches() == []
    assert "every cell" not in call()
    scene.bench.settle()
    scene.must_be_whole(expected)


@pytest.mark.slow
def test_a_submission_without_an_answer_is_found_again(scene, lab, monkeypatch) -> None:
    def silent(command: Any, *, stdin: str, environment: Mapping[str, str], timeout_s: float) -> Completed:
        done = run_program(command, stdin=stdin, environment=environment, timeout_s=timeout_s)
        if command[0] == "sbatch":
            raise NoAnswerError("no answer in 60 s to: sbatch")
        return done

    lab.drain()
    with monkeypatch.context() as patch:
        patch.setattr(slurm_call, "Client", lambda: Client(silent))
        done = scene.again()
    assert (done.code, "no answer in 60 s" in done.stderr) == (1, True)
    assert scene.bench.jobs() == []
    assert "nothing to submit: 1 job of it" in scene.again().stderr
    (job_id,) = scene.bench.jobs()
    assert lab.command("squeue", "--noheader", "--format=%A").split() == [str(job_id)]


@pytest.fixture
def deaf() -> Iterator[pytest.MonkeyPatch]:
    """The scheduler takes no job and does not say so, until this is undone."""

    def no_sbatch(command: Any, *, stdin: str, environment: Mapping[str, str], timeout_s: float) -> Completed:
        if command[0] == "sbatch":
            raise NoAnswerError("no answer in 60 s to: sbatch")
        return run_program(command, stdin=stdin, environment=environment, timeout_s=timeout_s)

    patch = pytest.MonkeyPatch()
    patch.setattr(slurm_call, "Client", lambda: Client(no_sbatch))
    yield patch
    patch.undo()


@pytest.mark.slow
def test_a_job_that_the_scheduler_never_took_is_submitted_again(scene, deaf) -> None:
    assert scene.again().code == 1
    deaf.undo()
    assert scene.again().code == 0
    store = JobStore(scene.bench.study().root)
    ends = [store.ended(job.job_id) for job in store.jobs()]
    assert [(end.outcome, end.reason) if end else None for end in ends] == [
        (Outcome.CANCELLED, "the scheduler never took it"),
        None,
    ]
    assert len(scene.bench.jobs()) == 1
