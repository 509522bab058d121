"""Jobs of two pods, really run: each a process of this machine, with its own torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.features.kubernetes.pods import STOPPED
from harness.features.kubernetes.profile import PORTS
from harness.machine.code import code_version
from harness.matrix import Matrix
from harness.plan.study_file import StudyFile
from results.job import Job
from results.job_store import JobStore
from results.launch import Attempt
from results.outcome import Outcome
from results.plan import Placement
from results.store import Study

pytestmark = pytest.mark.slow

POD = """
import signal
import sys
from pathlib import Path

import msgspec

from harness.machine.code import checkout
from harness.terminal.console import Console
from harness.launch.campaign import Campaign, CampaignContext
from harness.features.kubernetes import pods
from harness.launch.supervise import Interrupted
from results.job import JobEnd
from results.job_store import JobStore
from results.outcome import Outcome
from results.store import Study, utc_now

# This machine has no cluster's DNS.
pods.pod_address = lambda profile, job: "127.0.0.1"
root, job_id, node = sys.argv[1:]
study = Study(Path(root))
store = JobStore(study.root)
job = store.job(job_id)
if node != "0":
    sys.exit(pods.follow(study, job, int(node)))
starter = pods.PodStarter(job, store)
campaign = Campaign(study, study.plans()[0], job.options, Console())
campaign.run(CampaignContext(starter=starter, checkout=checkout(), code=job.code, job_id=job_id))
end = JobEnd(
    job_id=job_id, scheduler_id=None, start=0, told_by="job", nodes=(), started_at=None, ended_at=utc_now(),
    outcome=Outcome.OK, reason=None,
)
store.add_end(end)
"""


class Pods:
    """A study with a job for two pods of one CPU rank, and the processes that are its pods."""

    def __init__(self, folder: Path, job: Job, **options: object) -> None:
        self.study = Study(folder / "study")
        values = {
            **{"workload": "mlp", "gpus": 2, "strategy": "ddp", "device": "cpu", "repeats": 1},
            **{"gpus_per_node": 1, "budget": 0, "block_steps": 2, "quads": 1, "out": str(self.study.root)},
            # Plans for several hosts, and runs nothing.
            "launcher": "manual",
        }
        matrix = Matrix(StudyFile(**(values | options)), study_file=None)
        matrix._kept_plans(self.study)
        self.job = job
        JobStore(self.study.root).add(job, document="", name="manifest.yaml")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, node: int) -> subprocess.Popen[bytes]:
        arguments = [str(self.study.root), self.job.job_id, str(node)]
        with (self.study.root / f"pod-{node}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", POD, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def said(self, node: int) -> str:
        return (self.study.root / f"pod-{node}.log").read_text()

    def wait_for(self, what: Callable[[], object], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.said(0) + self.said(1)
            time.sleep(0.05)

    def train(self) -> bool:
        """Whether both ranks are in their steps; fails if a pod has ended before."""
        assert [process.poll() for process in self.processes] == [None, None], self.said(0) + self.said(1)
        return self._trains(0) and self._trains(1)

    def _trains(self, rank: int) -> bool:
        logs = self.study.root.glob(f"launches/*/rank-{rank:05d}.jsonl")
        return any('"warm-up"' in log.read_text() or '"measure"' in log.read_text() for log in logs)

    def attempts(self) -> list[Attempt]:
        """The attempts of the launches that have ended."""
        return list(self.study.attempts().values())


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A pod's processes, its first one included: all of them end with a real pod."""
    first = psutil.Process(process.pid)
    return [first, *first.children(recursive=True)]


def send(number: int, processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.fixture
def pods(tmp_path, make_job) -> Iterator[Callable[..., Pods]]:
    made: list[Pods] = []

    def make(**options: object) -> Pods:
        placement, code = Placement(nodes=2, gpus_per_node=1), code_version()
        site = {"image": "bench:1", "volume_claim": "results", "port": 23_000 + os.getpid() % 7000}
        job = make_job(placement=placement, code=code, site=site)
        made.append(Pods(tmp_path, job, **options))
        return made[-1]

    yield make
    for process in [process for each in made for process in each.processes]:
        if process.poll() is None:
            send(signal.SIGKILL, family(process))
        process.wait()


def test_two_pods_train_together_launch_after_launch(pods) -> None:
    here = pods(repeats=2)
    # The second comes first, as pods may.
    second, first = here.start(1), here.start(0)
    assert first.wait(300) == 0, here.said(0) + here.said(1)
    assert second.wait(300) == 0, here.said(1)
    results = here.study.collect()
    assert [result.outcome for result in results] == [Outcome.OK] * 2
    assert [(result.ranks_present, result.ranks_expected) for result in results] == [(2, 2)] * 2
    launches = here.study.launches()
    assert len(launches) == 2
    for launch in launches:
        folder = here.study.launch_folder(launch.launch_id)
        attempt = here.study.attempts()[launch.slots[0].run_id]
        assert (attempt.exit_code, attempt.stopped_by, attempt.outcomes) == (0, None, {})
        [meeting] = [word for word in attempt.command if word.startswith("--rdzv-endpoint=127.0.0.1:")]
        assert 0 <= int(meeting.rpartition(":")[2]) - here.job.site["port"] < PORTS
        assert "--node-rank=0" in attempt.command
        assert (folder / "agent-1.log").exists()
        assert (launch.job_id, launch.supervisor_pid) == (here.job.job_id, None)
    cell = here.study.cell_ids()[0]
    for run in here.study.run_ids(cell):
        assert [record.rank for record in here.study.rank_records(cell, run)] == [0, 1]


def test_a_pod_that_is_killed_ends_the_launch_with_a_name(pods) -> None:
    here = pods(budget=60)
    first, second = here.start(0), here.start(1)
    here.wait_for(here.train)
    send(signal.SIGKILL, family(second))
    # Seconds, not the 15 minutes after which silence is called a hang.
    here.wait_for(here.attempts)
    first.wait(300)
    (attempt,) = here.attempts()
    assert list(attempt.outcomes.values()) == [Outcome.MISSING_RANKS]
    (reason,) = attempt.reasons.values()
    assert reason.startswith("some ranks recorded that others went away")


def left_alone(attempts: list[Attempt]) -> bool:
    """Whether the one launch ended because node 1 was asked to end, by the supervisor's word."""
    (attempt,) = attempts
    reason = "ranks are missing: node 1: its pod was asked to end"
    return (list(attempt.outcomes.values()), list(attempt.reasons.values())) == (
        [Outcome.MISSING_RANKS],
        [reason],
    )


def test_a_pod_whose_first_is_lost_ends_when_it_is_asked_to(pods) -> None:
    here = pods(budget=60)
    first, second = here.start(0), here.start(1)
    here.wait_for(here.train)
    # A node that does not answer: its connections stay open, and rank 1 waits for it.
    send(signal.SIGSTOP, lost := family(first))
    others = family(second)
    assert any("harness.worker" in " ".join(process.cmdline()) for process in others)
    time.sleep(1)
    assert second.poll() is None
    second.terminate()
    assert second.wait(100) == STOPPED
    _, alive = psutil.wait_procs(others, 60)
    assert alive == []
    # It comes back, too late.
    send(signal.SIGCONT, lost)
    here.wait_for(here.attempts)
    assert left_alone(here.attempts())


def test_a_pod_that_leaves_before_anything_ran_costs_its_launch_and_not_the_job(pods) -> None:
    here = pods(budget=60)
    first, second = here.start(0), here.start(1)
    here.wait_for(lambda: any(here.study.root.glob("launches/*/agent-1.log")))
    second.terminate()
    assert first.wait(300) == 0, here.said(0)
    (attempt,) = here.attempts()
    assert attempt.stopped_by == "node 1: its pod was asked to end"
    (result,) = here.study.collect()
    assert (result.outcome, result.reason) == (
        Outcome.MISSING_RANKS,
        "before any cell began: ranks are missing: node 1: its pod was asked to end",
    )


def test_ranks_that_cannot_notice_that_a_pod_has_gone_are_ended(pods) -> None:
    here = pods(budget=60)
    first, second = here.start(0), here.start(1)
    here.wait_for(here.train)
    # As one that waits in a collective whose transport does not tell.
    rank = family(first)[-1]
    assert "torch.distributed.run" not in rank.cmdline()
    rank.suspend()
    second.terminate()
    here.wait_for(here.attempts)
    assert left_alone(here.attempts())
    assert here.attempts()[0].stopped_by == "node 1: its pod was asked to end"
    # Where nobody inherits orphans, one that was killed stays in the table of processes.
    here.wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    assert first.wait(100) == 0
