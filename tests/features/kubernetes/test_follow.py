"""The pods that follow the first one. Shell commands replace torchruns; test_pods.py has real ones."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launching import a_job_end, a_launch, an_attempt, end_of, submitted, until

from harness.features.kubernetes import pods
from harness.features.kubernetes.pods import STOPPED, PodStarter, endpoint, follow, is_over
from harness.launch import guarded
from harness.launch.ending import who_left
from results.job import Job, JobEnd
from results.job_store import JobStore
from results.launch import Launch
from results.outcome import Outcome
from results.schemas import LAUNCH
from results.store import Study

JOB_ID = "0001-2x8"
ADDRESS = "demo-ab12-0001-2x8-0.demo-ab12-0001-2x8.default.svc"


def launch(name: str, *, job_id: str | None = JOB_ID, nodes: int = 2) -> Launch:
    return a_launch(nodes, 1, launch_id=name, slots=(), job_id=job_id)


def job_end(outcome: Outcome, start: int | None = 0) -> JobEnd:
    return a_job_end(outcome, job_id=JOB_ID, start=start)


@pytest.fixture
def study(tmp_path) -> Study:
    return Study(tmp_path)


@pytest.fixture
def torchrun(monkeypatch) -> Callable[[str], None]:
    """Replaces every torchrun by a shell command, which gets the launch, the node and the endpoint."""
    monkeypatch.setattr(pods, "POLL_S", 0.02)

    def put(script: str) -> None:
        def command(launch: Launch, path: Path, node_rank: int, endpoint: str) -> tuple[str, ...]:
            return ("bash", "-c", script, "torchrun", launch.launch_id, str(node_rank), endpoint, str(path))

        monkeypatch.setattr(pods, "node_command", command)

    return put


def log(study: Study, name: str) -> str:
    path = study.launch_folder(name) / "agent-1.log"
    return path.read_text() if path.exists() else ""


def following(study: Study, job: Job, play: Callable[[], None]) -> int:
    """Run `play` in a thread next to `follow`, and return its exit code; a failure of `play` ends both."""
    failures: list[BaseException] = []

    def beside() -> None:
        try:
            play()
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=beside)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    code = follow(study, job, 1)
    thread.join()
    assert not failures, failures
    assert signal.getsignal(signal.SIGTERM) is before
    return code


def test_a_node_takes_part_in_its_jobs_launches_and_no_others(study, make_job, torchrun) -> None:
    torchrun('echo "$@"; exit 7')
    for given in (
        launch("a-of-another-job", job_id="0002-2x8"),
        launch("b-of-no-job", job_id=None),
        launch("c-on-one-node", nodes=1),
        launch("d-over"),
        launch("e-joined-by-a-predecessor"),
        launch("f"),
    ):
        study.add_launch(given)
    study.add_attempt(an_attempt(launch_id="d-over"))
    (study.launch_folder("e-joined-by-a-predecessor") / "agent-1.log").touch()
    half = study.launch_folder("g") / "launch.json"
    half.parent.mkdir()
    half.touch()
    (study.launch_folder("h")).mkdir()

    def play() -> None:
        until(lambda: log(study, "f"))
        # What is half to see is looked at again, and so is a folder without its launch.
        half.with_name("whole").write_bytes(LAUNCH.encode(launch("g")))
        half.with_name("whole").replace(half)
        until(lambda: log(study, "g"))
        study.add_launch(launch("h"))
        until(lambda: log(study, "h"))
        JobStore(study.root).add_end(job_end(Outcome.OK))

    assert following(study, make_job(), play) == 0
    for name in ("f", "g", "h"):
        path = study.launch_folder(name) / "launch.json"
        # Once each, whatever its exit code.
        assert log(study, name).split() == [name, "1", endpoint(make_job(), name), str(path)]
    joined = {path.parent.name for path in study.root.glob("launches/*/agent-1.log")}
    assert joined == {"e-joined-by-a-predecessor", "f", "g", "h"}
    assert log(study, "e-joined-by-a-predecessor") == ""
    # The others do not wait for ranks that are no more.
    failed = "node 1: its torchrun ended with exit code 7"
    left = {name: who_left(study.launch_folder(name)) for name in sorted(joined)}
    assert left == {
        "e-joined-by-a-predecessor": "node 1: its pod was started again",
        **dict.fromkeys(("f", "g", "h"), failed),
    }
    assert who_left(study.launch_folder("d-over")) is None


def test_a_torchrun_is_ended_when_its_launch_is_over_but_not_at_once(
    study, make_job, torchrun, monkeypatch
) -> None:
    monkeypatch.setattr(pods, "PATIENCE_S", 0.5)
    torchrun('trap "echo ended; exit" TERM; echo begun; for i in {1..20000}; do sleep 0.01; done')
    study.add_launch(launch("a"))

    def play() -> None:
        until(lambda: "begun" in log(study, "a"))
        began = time.monotonic()
        study.add_attempt(an_attempt(launch_id="a"))
        until(lambda: "ended" in log(study, "a"))
        assert time.monotonic() - began > 0.5
        JobStore(study.root).add_end(job_end(Outcome.OK))

    assert following(study, make_job(), play) == 0
    assert who_left(study.launch_folder("a")) is None


def test_a_pod_that_is_to_end_leaves_nothing_behind(study, make_job, torchrun, monkeypatch) -> None:
    """Not even what does not hear SIGTERM, or has its own session, as ranks have."""
    monkeypatch.setattr(guarded, "GRACE_S", 0.3)
    torchrun('trap "" TERM; setsid sleep 600 & echo $$ $!; wait; sleep 600')
    study.add_launch(launch("a"))
    found: list[psutil.Process] = []

    def play() -> None:
        until(lambda: len(log(study, "a").split()) == 2)
        found.extend(psutil.Process(int(pid)) for pid in log(study, "a").split())
        os.kill(os.getpid(), signal.SIGTERM)

    assert following(study, make_job(), play) == STOPPED == 143
    until(lambda: not any(process.is_running() for process in found))
    assert who_left(study.launch_folder("a")) == "node 1: its pod was asked to end"


def test_a_node_that_has_done_its_share_has_not_left(study, make_job, torchrun) -> None:
    torchrun("echo done")
    study.add_launch(launch("a"))

    def play() -> None:
        until(lambda: "done" in log(study, "a"))
        JobStore(study.root).add_end(job_end(Outcome.OK))

    assert following(study, make_job(), play) == 0
    assert who_left(study.launch_folder("a")) is None


def test_a_pod_that_waits_ends_when_it_is_asked_to(study, make_job, torchrun) -> None:
    torchrun("false")
    before = signal.getsignal(signal.SIGTERM)

    def play() -> None:
        until(lambda: signal.getsignal(signal.SIGTERM) is not before)
        os.kill(os.getpid(), signal.SIGTERM)

    assert following(study, make_job(), play) == 143


def test_a_job_that_is_over_is_not_followed(study, make_job, torchrun) -> None:
    torchrun("echo")
    study.add_launch(launch("a"))
    JobStore(study.root).add_end(job_end(Outcome.CRASHED))
    assert follow(study, make_job(), 1) == 0
    assert log(study, "a") == ""


def test_which_ends_are_for_good(tmp_path, make_job) -> None:
    job = make_job()
    for number, outcome in enumerate(Outcome):
        store = JobStore(tmp_path / str(number))
        assert not is_over(store, job)
        store.add_end(job_end(outcome))
        # After these, pod 0 is started again.
        assert is_over(store, job) == (outcome not in (Outcome.PREEMPTED, Outcome.NODE_FAILED))
    store = JobStore(tmp_path / "again")
    store.add_end(job_end(Outcome.PREEMPTED, 0))
    store.add_end(job_end(Outcome.OK, 1))
    assert is_over(store, job)
    store = JobStore(tmp_path / "given up")
    for start in range(job.options.retries + 1):
        assert not is_over(store, job)
        store.add_end(job_end(Outcome.PREEMPTED, start))
    assert is_over(store, job)
    store = JobStore(tmp_path / "closed")
    store.add_end(job_end(Outcome.NODE_FAILED, None))
    assert is_over(store, job)


def test_an_end_that_is_half_to_see_is_none_yet(tmp_path, make_job) -> None:
    store = JobStore(tmp_path)
    store.folder(JOB_ID).mkdir(parents=True)
    (store.folder(JOB_ID) / "end-0000.json").write_text('{"schema": "bench/jo')
    assert not is_over(store, make_job())


def test_all_nodes_of_a_launch_work_out_one_endpoint_and_launches_have_their_own(make_job) -> None:
    # CRC-32 of "123456789" is 0xCBF43926 (its check value) = 3421780262, and 262 of a thousand.
    assert endpoint(make_job(), "123456789") == f"{ADDRESS}:20262"
    names = [f"20260102T030405Z-{number:06x}" for number in range(300)]
    ports = [int(endpoint(make_job(), name).rpartition(":")[2]) for name in names]
    assert all(20_000 <= port < 21_000 for port in ports)
    # 300 balls in 1000 urns leave 1000 (1 - 0.999^300) = 259 urns with some; 229 is five deviations off.
    assert len(set(ports)) > 229


def test_pod_0_starts_a_torchrun_of_node_0(tmp_path, make_job) -> None:
    starter = PodStarter(make_job(), JobStore(tmp_path))
    command = starter.command(launch("123456789"), Path("/s/launches/a/launch.json"))
    words = shlex.join(command)
    assert "--nnodes=2 --node-rank=0 " in words
    assert f"--rdzv-endpoint={ADDRESS}:20262 " in words
    alone = starter.command(launch("a", nodes=1), Path("/s/launches/a/launch.json"))
    assert "--standalone" in alone
    assert (starter.hosts, starter.supervisor_pid) == (True, None)
    assert starter.interruption().outcome is Outcome.PREEMPTED


@pytest.mark.parametrize(("cores", "pins"), [({0, 1}, True), ({0, 1, 2, 3}, False)])
def test_ranks_are_bound_where_the_pod_has_cores_of_its_own(
    cores, pins, monkeypatch, tmp_path, make_job
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    assert PodStarter(make_job(), JobStore(tmp_path)).pins is pins


def test_a_pod_is_a_start_more_than_its_job_has_recorded(tmp_path, make_job) -> None:
    job = make_job()
    store = JobStore(submitted(tmp_path, job, None).root)
    assert PodStarter(job, store).start == 0
    for number in range(2):
        store.add_end(end_of(job, Outcome.PREEMPTED, start=number))
    assert PodStarter(job, store).start == 2
