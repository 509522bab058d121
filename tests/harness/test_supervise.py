"""Watching over a launch: silence, nodes that leave, signals. A shell command replaces torchrun."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from launching import SLURM_WORDS, Shell, a_launch, until

from harness.launch import supervise
from harness.launch.conduct import Deadline
from harness.launch.ending import who_left, write_left
from harness.launch.follow import LaunchState, Pulse
from harness.launch.guarded import Guarded
from harness.launch.starter import LocalStarter, Starter
from harness.launch.supervise import Interrupted, Supervisor, Watch
from results.launch import Launch, Slot, rank_log_path
from results.outcome import Ending, Outcome
from results.plan import Placement
from results.store import Study


def _supervisor(folder: Path, launch: Launch, starter: Starter) -> Supervisor:
    watch = Watch(report=lambda state: None, deadline=Deadline(None, ""))
    return Supervisor(Study(folder), launch, folder, starter, watch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_a_launch_is_ended_is_heard_after_its_attempt_is_written(
    number, tmp_path, monkeypatch
) -> None:
    """Node 1 leaves; the shell takes its time to end when it is asked to, and meanwhile the signal comes."""
    monkeypatch.setattr(supervise, "PATIENCE_S", 0.0)
    monkeypatch.setattr(supervise, "LOOK_S", 0.0)
    launch, study = a_launch(nodes=2), Study(tmp_path)
    folder = study.launch_folder(launch.launch_id)
    ending = "touch asked; until test -e heard; do sleep 0.01; done; exit"
    script = f"trap '{ending}' TERM; touch begun; while :; do sleep 0.01; done"

    def play() -> None:
        until((folder / "begun").exists)
        write_left(folder, 1, "its pod was asked to end")
        until((folder / "asked").exists)
        os.kill(os.getpid(), number)
        (folder / "heard").touch()

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(Interrupted, match="interrupted by the user"):
        _supervisor(tmp_path, launch, Shell(f"cd {folder}; {script}")).run()
    thread.join()
    assert study.attempts()["r"].stopped_by == "node 1: its pod was asked to end"


def test_a_run_that_another_rank_has_begun_before_rank_0_ends_as_the_launch_does(tmp_path) -> None:
    """Rank 0 has recorded the first run; rank 1 has made the folder of the second when Ctrl-C comes."""
    study = Study(tmp_path)
    slots = [Slot(cell_id=cell, run_id=f"run-{cell}", repeat=1) for cell in "abc"]
    launch = msgspec.structs.replace(a_launch(), slots=tuple(slots))
    folder, begun = study.launch_folder(launch.launch_id), study.run_folder("b", "run-b")
    first = study.run_folder("a", "run-a")
    script = f"""
        mkdir -p {first} {begun}; touch {first}/rank-00000.json {first}/rank-00001.json
        echo '{{"event": "ready"}}' > {rank_log_path(folder, 0)}
        echo '{{"event": "run", "run": "run-a", "cell": "a"}}' >> {rank_log_path(folder, 0)}
        touch {folder}/begun; sleep 60
    """

    def interrupt() -> None:
        until((folder / "begun").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="interrupted by the user"):
        _supervisor(tmp_path, launch, Shell(script)).run()
    thread.join()
    attempt = study.attempts()["run-b"]
    assert attempt.outcomes == {"run-b": Outcome.CANCELLED}
    assert attempt.reasons == {"run-b": "interrupted by the user"}


def test_no_worker_outlives_its_launch(tmp_path) -> None:
    """A worker in its own session, which its torchrun leaves behind when it is asked to end."""
    pid, deadline = tmp_path / "pid", Deadline(None, "")

    def report(state: LaunchState) -> None:
        if pid.exists():
            deadline.bring_forward(-1, "--max-time was over")

    script = f"setsid sleep 60 & echo $! > new; mv new {pid}; trap exit TERM; while :; do sleep 0.01; done"
    watch = Watch(report=report, deadline=deadline)
    attempt, _ = Supervisor(
        Study(tmp_path), a_launch(), tmp_path, Shell(f"cd {tmp_path}; {script}"), watch
    ).run()
    assert attempt.stopped_by == "--max-time was over"
    until(lambda: not _lives(int(pid.read_text())), 10)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_have_a_while_to_find_out_that_a_node_has_left(tmp_path, monkeypatch) -> None:
    launch = a_launch(nodes=12)
    folder = tmp_path / "launches" / launch.launch_id
    folder.mkdir(parents=True)
    supervisor = _supervisor(tmp_path, launch, LocalStarter())
    now = [1000.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
    assert (supervisor._deserted(), who_left(folder)) == (False, None)
    now[0] = 2000.0
    write_left(folder, 10, "its torchrun ended with exit code 1")
    # From when it is seen: the clocks of files are those of other hosts.
    assert not supervisor._deserted()
    now[0] = 2010.0
    write_left(folder, 9, "its pod was asked to end")
    assert not supervisor._deserted()
    now[0] = 2010.1
    assert supervisor._deserted()
    assert (
        who_left(folder) == "node 9: its pod was asked to end; node 10: its torchrun ended with exit code 1"
    )


@pytest.mark.parametrize("speaks", [True, False])
def test_a_rank_that_speaks_while_its_last_words_are_awaited_has_not_hung(
    speaks, tmp_path, monkeypatch
) -> None:
    launch = msgspec.structs.replace(a_launch(), silence_s=10.0)
    folder = tmp_path / "launches" / launch.launch_id
    folder.mkdir(parents=True)
    supervisor = _supervisor(tmp_path, launch, LocalStarter())
    now = [0.0]
    pulse = Pulse(folder, Placement(nodes=1, gpus_per_node=2), clock=lambda: now[0])

    def wait() -> None:
        now[0] += 2
        if speaks:
            (folder / "rank-00001.jsonl").write_text('{"event": "joining"}\n')

    monkeypatch.setattr(supervisor, "_await_recordings", wait)
    now[0] = 10.0
    assert supervisor._hung(pulse) is None
    assert now[0] == 10.0
    now[0] = 10.5
    stopped = supervisor._hung(pulse)
    reason = "no rank said anything for 12 s; rank 0 has been silent for longest, 12 s (phase: starting)"
    assert stopped == (None if speaks else Ending(Outcome.HUNG, reason))


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("event", "outcome", "reason"),
    [
        (f'"failed", "reason": "the disk is full: {FULL}"', Outcome.CANCELLED, f"the disk is full: {FULL}"),
        # A rank that has gone on after that.
        ('"note", "reason": "No space left on device"', Outcome.UNKNOWN, "the launch ended without a word; "),
    ],
)
def test_a_rank_that_could_not_record_that_the_disk_was_full_has_said_so_in_its_log(
    event, outcome, reason, tmp_path
) -> None:
    launch = a_launch()
    log = rank_log_path(tmp_path / "launches" / launch.launch_id, 0)
    run = '{"event": "run", "run": "r", "cell": "c"}'
    starter = Shell(f"echo '{run}' > {log}; echo '{{\"event\": {event}}}' >> {log}; exit 1")
    attempt, _ = _supervisor(tmp_path, launch, starter).run()
    assert attempt.outcomes == {"r": outcome}
    assert attempt.reasons["r"].startswith(reason)


def test_ranks_are_silent_from_the_moment_that_the_scheduler_starts_them(tmp_path, monkeypatch) -> None:
    launch = msgspec.structs.replace(a_launch(), silence_s=10.0)
    agent, later = tmp_path / "launches" / launch.launch_id / "agent-0.log", tmp_path / "later"
    monkeypatch.setattr(supervise, "LOOK_S", 0.0)
    monkeypatch.setattr(Shell, "log_words", SLURM_WORDS)
    # It is started at 9 s, and 15 s are over soon after that.
    clock = partial(Pulse, clock=lambda: 15.0 if later.exists() else 9.0 if agent.exists() else 0.0)
    monkeypatch.setattr(supervise, "Pulse", clock)
    starter = Shell(f"sleep 0.5; touch {agent}; sleep 0.5; touch {later}; sleep 0.5")
    attempt, _ = _supervisor(tmp_path, launch, starter).run()
    assert attempt.stopped_by is None


class Impatient(Shell):
    """A launch for which srun waits, on a cluster whose steps have a second to be created."""

    log_words = SLURM_WORDS
    most_delay_s = 1.0


BUSY = "Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"


def test_a_step_that_is_not_created_is_given_up_before_a_launch_that_says_nothing_is(tmp_path) -> None:
    launch = msgspec.structs.replace(a_launch(), silence_s=600.0)
    attempt, _ = _supervisor(tmp_path, launch, Impatient(f"echo 'srun: {BUSY}'; sleep 600")).run()
    reason = f"the scheduler started no process within 1 s: {BUSY}"
    assert attempt.outcomes == {"r": Outcome.NODE_FAILED}
    assert attempt.stopped_by == reason


@pytest.mark.parametrize("says", ["echo", f"echo 'srun: {BUSY}'; echo 'srun: Step created for job 7'"])
def test_a_launch_whose_image_is_fetched_has_the_time_of_a_silent_one(says, tmp_path) -> None:
    launch = msgspec.structs.replace(a_launch(), silence_s=4.0)
    attempt, _ = _supervisor(tmp_path, launch, Impatient(f"{says}; sleep 600")).run()
    assert attempt.stopped_by == "the scheduler started no process within 4 s: it has not said why"


class NodeFailed(Shell):
    """srun says that a node has failed and ends; Slurm may say a moment later why it ends the job."""

    log_words = SLURM_WORDS

    def __init__(self, begins: str, notice: Ending | None = None) -> None:
        super().__init__("echo RendezvousTimeoutError; echo 'srun: error: Node failure on n2'; exit 1")
        self._begins, self._notice = begins, notice

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        return ("bash", "-c", f"echo '{self._begins}' > {rank_log_path(path.parent, 0)}; {self._script}")

    def notice(self) -> Ending | None:
        return self._notice


NOTICE = Ending(Outcome.NODE_FAILED, "Slurm ended it due to node failure")
WITHOUT_NOTICE = "the scheduler says that the node n2 failed"


@pytest.mark.parametrize(
    ("begins", "notice", "reason"),
    [
        ('{"event": "run", "run": "r", "cell": "c"}', NOTICE, NOTICE.reason),
        ('{"event": "run", "run": "r", "cell": "c"}', None, WITHOUT_NOTICE),
        ("", None, f"before any cell began: {WITHOUT_NOTICE}"),
    ],
)
def test_a_job_whose_node_failed_starts_no_other_launch(begins, notice, reason, tmp_path) -> None:
    with pytest.raises(Interrupted) as ended:
        _supervisor(tmp_path, a_launch(), NodeFailed(begins, notice)).run()
    assert ended.value.stopped.outcome is Outcome.NODE_FAILED
    attempt = Study(tmp_path).attempts()["r"]
    assert (attempt.outcomes, attempt.reasons) == ({"r": Outcome.NODE_FAILED}, {"r": reason})


def test_ranks_that_are_silent_because_their_node_failed_did_not_hang(tmp_path, monkeypatch) -> None:
    supervisor = _supervisor(tmp_path, a_launch(), NodeFailed(""))
    hung = Ending(Outcome.HUNG, "no rank said anything for 900 s")

    def watch(process: Guarded) -> Ending:
        # srun says it and ends while the supervisor collects the stacks of silent ranks.
        while process.poll() is None:
            time.sleep(0.01)
        return hung

    monkeypatch.setattr(supervisor, "_watch_over", watch)
    with pytest.raises(Interrupted):
        supervisor.run()
    assert Study(tmp_path).attempts()["r"].outcomes == {"r": Outcome.NODE_FAILED}


class Refused(Shell):
    """A scheduler that has ended the job starts no launch, and says only a moment later why."""

    log_words = SLURM_WORDS

    def __init__(self, *notices: Ending | None) -> None:
        over = "Unable to create step for job 8: Job/step already completing or completed"
        super().__init__(f"echo 'srun: error: {over}'; exit 1")
        self._notices = list(notices)

    def notice(self) -> Ending | None:
        return self._notices.pop(0) if self._notices else None


@pytest.mark.parametrize(
    ("starter", "outcome", "words"),
    [
        (
            Refused(None, Ending(Outcome.TIMED_OUT, "due to time limit")),
            Outcome.TIMED_OUT,
            "before any cell began: due to time limit",
        ),
        (
            Refused(),
            Outcome.CANCELLED,
            "before any cell began: its allocation was over: Unable to create step",
        ),
    ],
)
def test_a_launch_that_is_refused_because_the_job_is_over_waits_for_the_reason(
    starter, outcome, words, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(supervise, "NOTICE_S", 0.5)
    with pytest.raises(Interrupted):
        _supervisor(tmp_path, a_launch(), starter).run()
    attempt = Study(tmp_path).attempts()["r"]
    assert attempt.outcomes == {"r": outcome}
    assert attempt.reasons["r"].startswith(words)
