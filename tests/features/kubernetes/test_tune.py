"""`bench tune --launcher kubernetes`: one job, whose first pod makes the same call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from launching import a_launch, until

from harness.cli import run
from harness.features.kubernetes import pods
from harness.features.kubernetes.launcher import KubernetesLauncher
from results.files import LOCK
from results.job import Job
from results.job_store import JobStore
from results.outcome import Outcome
from results.store import Study

records = pytest.importorskip("harness.features.tune.records")
CALL = (
    *("tune", "--workload", "mlp", "--gpus", "2", "--gpus-per-node", "1", "--device", "cpu"),
    *("--global-batch-size", "64", "--strategy", "ddp:bucket_mb=5,ddp:bucket_mb=50", "--accumulation", "1"),
    *("--activation-checkpointing", "false", "--space", "space.yaml", "--budget", "0", "--quads", "0"),
    *("--repeats", "1", "--max-time", "10m", "--launcher", "kubernetes", "--site", "site.yaml"),
    *("--out", "volume/study"),
)
# This machine has no cluster's DNS: a pod, and the call in it, find the first pod at this address.
HERE = """
import sys
from harness.features.kubernetes import pods
pods.pod_address = lambda profile, job: "127.0.0.1"
"""
POD = f"""{HERE}
from harness.launchers import program
pods.BENCH = (sys.executable, "-c", {HERE + "from harness.cli import main; sys.exit(main())"!r})
sys.exit(program.main())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text("compile: false\n")
    (tmp_path / "site.yaml").write_text(
        f"image: bench:1\nvolume_claim: results\nmount_path: {tmp_path}/volume\ngpu_resource: none\n"
        f"port: {23_000 + os.getpid() % 7000}\n"
    )
    return tmp_path


def jobs() -> list[Job]:
    return JobStore(Path("volume/study")).jobs()


def test_one_job_is_written_with_its_files_and_offered_until_it_ends(folder, capsys) -> None:
    assert run(CALL) == 0
    [job] = jobs()
    seen = f"{folder}/volume/study"
    assert job.arguments[: len(CALL)] == CALL
    assert job.arguments[len(CALL) :: 2] == ("--out", "--site", "--space")
    assert job.arguments[len(CALL) + 1] == seen
    assert [Path(path).read_text() for path in job.arguments[len(CALL) + 3 :: 2]] == [
        Path(name).read_text() for name in ("site.yaml", "space.yaml")
    ]
    offer = f"kubectl apply -f volume/study/jobs/{job.job_id}/manifest.yaml"
    assert offer in capsys.readouterr().out
    _, manifest = yaml.safe_load_all(Path(offer.split()[-1]).read_text())
    assert manifest["spec"]["completions"] == 2
    assert run(CALL) == 0
    assert offer in capsys.readouterr().out
    assert jobs() == [job]


def test_pods_start_in_the_folder_of_the_call_if_it_is_on_the_volume(folder, monkeypatch) -> None:
    project = folder / "volume/project"
    project.mkdir(parents=True)
    for here, place in ((folder, folder / "volume"), (project, project)):
        monkeypatch.chdir(here)
        words = ["--out", str(folder / "volume" / here.name), "--site", str(folder / "site.yaml")]
        assert run([*CALL, *words, "--space", str(folder / "space.yaml")]) == 0
        [path] = (folder / "volume" / here.name).glob("jobs/*/manifest.yaml")
        _, job = yaml.safe_load_all(path.read_text())
        [container] = job["spec"]["template"]["spec"]["containers"]
        assert container["workingDir"] == str(place)


def test_a_profile_that_refuses_the_job_leaves_nothing_behind(folder) -> None:
    site = Path("site.yaml").read_text().replace("gpu_resource: none", "gpus_per_node: 1")
    Path("site.yaml").write_text(site)
    assert run([*CALL, "--gpus-per-node", "2"]) == 2
    assert jobs() == []
    assert run(CALL) == 0


def test_a_job_is_applied_once(kubectl) -> None:
    for _ in range(2):
        assert run([*CALL, "--apply"]) == 0
    [job] = jobs()
    manifest = Path("volume/study/jobs") / job.job_id / "manifest.yaml"
    assert kubectl.read_text() == manifest.read_text()


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        ("exit 0", Outcome.OK),
        ("exit 2", Outcome.CRASHED),
        ("exit 130", Outcome.PREEMPTED),
        # A call that has not begun its work has no handler of SIGTERM.
        ("kill -TERM $$", Outcome.PREEMPTED),
    ],
)
def test_the_end_of_the_call_is_the_end_of_its_start(call, outcome, monkeypatch) -> None:
    assert run(CALL) == 0
    [job], study = jobs(), Study(Path("volume/study"))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setattr(pods, "BENCH", ("sh", "-c", call))
    assert KubernetesLauncher().run_job(study, job) == (0 if outcome is Outcome.OK else 1)
    assert [end.outcome for end in JobStore(study.root).starts(job.job_id)] == [outcome]


def test_a_start_whose_call_is_killed_ends_after_the_workers_of_the_call(monkeypatch) -> None:
    assert run(CALL) == 0
    [job], study = jobs(), Study(Path("volume/study"))
    study.add_launch(a_launch(job_id=job.job_id))
    killed = f"exec 9>>volume/study/{LOCK}; flock 9; (sleep 1; touch ended) & kill -KILL $$"
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setattr(pods, "BENCH", ("bash", "-c", killed))
    assert KubernetesLauncher().run_job(study, job) == 1
    assert Path("ended").exists()
    assert all(study.has_attempt(launch.launch_id) for launch in study.launches())


class Pods:
    """The pods of the only job: processes of this machine."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> subprocess.Popen[bytes]:
        [job] = jobs()
        with Path(f"pod-{number}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", POD, str(Path("volume/study/jobs").resolve() / job.job_id)],
                cwd="volume",
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "JOB_COMPLETION_INDEX": str(number)},
            )
        self.processes.append(process)
        return process


def kill(pod: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a pod, as if its node had lost power."""
    if pod.poll() is None:
        for each in [*psutil.Process(pod.pid).children(recursive=True), psutil.Process(pod.pid)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        pod.wait()


@pytest.fixture
def started() -> Iterator[Pods]:
    found = Pods()
    yield found
    for process in found.processes:
        kill(process)


@pytest.mark.slow
@pytest.mark.long
def test_two_pods_tune_to_the_answer_and_go_on_when_the_first_one_is_replaced(started, capsys) -> None:
    assert run(CALL) == 0
    study, [job] = Study(Path("volume/study")), jobs()
    trials = Study(study.root / records.TRIALS)

    second, first = started.start(1), started.start(0)
    until(lambda: list(trials.launches()) or first.poll() is not None)
    # The cluster drains its node.
    first.terminate()
    assert first.wait() == 1, Path("pod-0.log").read_text()
    assert [end.outcome for end in JobStore(study.root).starts(job.job_id)] == [Outcome.PREEMPTED]
    first = started.start(0)
    until(lambda: [one for one in trials.results() if one.outcome is Outcome.OK] or first.poll() is not None)
    kill(first)
    assert started.start(0).wait() == 0, Path("pod-0.log").read_text()
    assert second.wait() == 0, Path("pod-1.log").read_text()
    found = records.read_record(study.root)
    # This launcher does not train, and the default needs no command.
    assert {command.split()[1] for command in found.answer.commands} <= {"matrix"}
    counted = Counter((one.setting, one.rung, one.block) for one in found.trials if one.rate is not None)
    assert set(counted.values()) == {1}
    launches = [(each, launch) for each in (study, trials) for launch in each.launches()]
    assert all(each.has_attempt(launch.launch_id) for each, launch in launches)
    assert {launch.job_id for _, launch in launches} == {job.job_id}
    capsys.readouterr()
    assert run(CALL) == 0
    assert found.answer.sentence in " ".join(capsys.readouterr().out.split())
    assert jobs() == [job]
