"""Launches in the pods of a job: each pod starts one torchrun for each launch, and pod 0 decides when.

Pod 0 supervises, and the others follow it. A launch begins for them when its file is on the shared volume,
and is over when its attempt is there. The torchruns meet by their own rendezvous, at the address of pod 0 and
a port that all pods work out from the launch's id.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.features.kubernetes.manifest import pod_address
from harness.features.kubernetes.profile import PORTS, PROFILE_FILE
from harness.jobs.closing import LOST, close_launches
from harness.jobs.start import JobEnvironment, JobStart, obstacle
from harness.launch.command import node_command, worker_environment
from harness.launch.ending import write_left
from harness.launch.guarded import Guarded
from harness.launch.starter import Starter
from harness.launch.supervise import handled
from harness.launchers.campaign_call import INTERRUPTED
from harness.machine.code import checkout
from harness.machine.processes import exit_words
from results.errors import MachineError, NewerSchemaError, StoreError
from results.features import inner_folders
from results.files import is_busy
from results.job import Job
from results.job_store import JobStore
from results.launch import Launch
from results.outcome import Ending, Outcome
from results.schemas import LAUNCH
from results.store import Study

POLL_S = 0.5
PATIENCE_S = 10.0
"""Seconds for a torchrun to end by itself, and for its ranks to write what they know, once its launch is
over."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a pod that was asked to end; Kubernetes would count 0 as work that is done."""

BENCH = (sys.executable, "-m", "harness.cli")
JOB_VARIABLE = "BENCH_JOB"
"""The environment variable by which a call knows the job that makes it."""
_COMES_BACK = {Outcome.PREEMPTED, Outcome.NODE_FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The addresses at which the nodes of a job's launches meet."""

    address: str
    """The host name of pod 0."""
    first_port: int

    def endpoint(self, launch_id: str) -> str:
        """HOST:PORT of one launch. The port that a launch leaves may linger; the next one has another."""
        return f"{self.address}:{self.first_port + zlib.crc32(launch_id.encode()) % PORTS}"


class PodStarter(Starter):
    """Starts the launches of one job, in pod 0."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        # The kubelet gives some pods cores that nobody else is on ("Control CPU Management Policies").
        self.pins = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        return node_command(launch, path, 0, self._meeting.endpoint(launch.launch_id))

    def interruption(self) -> Ending:
        return Ending(
            Outcome.PREEMPTED,
            "the pod was asked to end: it was evicted, preempted or deleted, or its time was over",
        )


def studies_of(study: Study) -> list[Study]:
    """The studies that launches of a job may be in: its own, and the studies of short runs inside it."""
    return [study, *(Study(study.root / name) for name in inner_folders())]


def is_over(store: JobStore, job: Job) -> bool:
    """Whether the job has ended for good, so that no pod has work left.

    After an end that the cluster brought about, pod 0 is started again, as often as there are retries.
    """
    try:
        ends = store.starts(job.job_id)
        if store.ended(job.job_id) is not None or len(ends) > job.options.retries:
            return True
        return any(end.outcome not in _COMES_BACK for end in ends)
    except NewerSchemaError:
        raise
    except StoreError:
        # A shared file system may show a name before its content; the next look sees both.
        return False


def follow(study: Study, job: Job, node_rank: int, meeting: Meeting) -> int:
    """Take part in the job's launches, as node `node_rank` from 1, until the job is over.

    Returns the exit code of the pod's program: 0 when the job is over, STOPPED after SIGTERM, when this
    node's share of a launch has ended with it.
    """
    stops: list[int] = []
    follower = _Follower(study, job, node_rank, meeting, lambda: bool(stops))
    store = JobStore(study.root)
    with handled([signal.SIGTERM], lambda number, frame: stops.append(number)):
        while not stops and not is_over(store, job):
            if found := follower.next():
                follower.join(*found)
            else:
                time.sleep(POLL_S)
    return STOPPED if stops else 0


class _Follower:
    """One node of a job, other than the first."""

    def __init__(
        self, study: Study, job: Job, node_rank: int, meeting: Meeting, stopped: Callable[[], bool]
    ) -> None:
        self._studies = studies_of(study)
        self._job = job
        self._rank = node_rank
        self._meeting = meeting
        self._stopped = stopped
        self._settled: set[str] = set()
        """Ids of launches that need no more of this node."""

    def next(self) -> tuple[Study, Launch] | None:
        """The oldest launch that waits for this node, and its study."""
        studies = {path.name: study for study in self._studies for path in study.root.glob("launches/*")}
        for name in sorted(studies.keys() - self._settled):
            study = studies[name]
            try:
                launch = LAUNCH.read(study.launch_folder(name) / "launch.json")
            except NewerSchemaError:
                raise
            except StoreError:
                # The launch's file does not exist yet, or is only partly visible.
                continue
            is_ours = launch.job_id == self._job.job_id and self._rank < launch.placement.nodes
            if is_ours and not study.has_attempt(name):
                return study, launch
            self._settled.add(name)
        return None

    def join(self, study: Study, launch: Launch) -> None:
        """Run this node's torchrun until it has ended, or the launch is over, or this pod is to end."""
        self._settled.add(launch.launch_id)
        folder = study.launch_folder(launch.launch_id)
        try:
            log = (folder / f"agent-{self._rank}.log").open("xb")
        except FileExistsError:
            # The other pods have met the predecessor of this pod there, and cannot meet this pod.
            write_left(folder, self._rank, "its pod was started again")
            return
        path, endpoint = (folder / "launch.json").resolve(), self._meeting.endpoint(launch.launch_id)
        with log:
            torchrun = Guarded(
                node_command(launch, path, self._rank, endpoint),
                log=log,
                environment=worker_environment(launch, checkout()),
            )
            try:
                why = self._outlast(torchrun, study, launch.launch_id)
                if why is not None:
                    write_left(folder, self._rank, why)
            finally:
                torchrun.end()

    def _outlast(self, torchrun: Guarded, study: Study, launch_id: str) -> str | None:
        """Wait for the end of the torchrun or of the launch. Returns why this node left before the end."""
        over_at: float | None = None
        while (code := torchrun.poll()) is None:
            now = time.monotonic()
            if over_at is None and study.has_attempt(launch_id):
                over_at = now
            if self._stopped() or (over_at is not None and now - over_at > PATIENCE_S):
                return "its pod was asked to end" if over_at is None else None
            time.sleep(POLL_S)
        return f"its torchrun {exit_words(code)}" if code else None


class PodEnvironment(JobEnvironment):
    """The first pod of a job on Kubernetes; the others follow it."""

    def __init__(self, job: Job, store: JobStore) -> None:
        # A pod does not know how many pods it replaces; each of these has left a record, or open launches.
        self.start = len(store.starts(job.job_id))
        self.nodes = (platform.node(),)
        self.starter = PodStarter(meeting_of(job))


class CallStart(JobStart):
    """One start of a job whose first pod makes a call of bench; the other pods follow its launches."""

    def _worked(self) -> Ending:
        job, environment = self._job, self._environment
        if reason := obstacle(job, environment, self._jobs.ended(job.job_id)):
            return Ending(Outcome.CANCELLED, reason)
        variables = {**os.environ, JOB_VARIABLE: job.job_id}
        call = subprocess.Popen([*BENCH, *job.arguments], env=variables)
        with handled([signal.SIGTERM], lambda number, frame: call.terminate()):
            code = call.wait()
        for study in studies_of(self._study):
            # The workers of a call that was killed have its lock until they end.
            while is_busy(study.root):
                time.sleep(POLL_S)
            close_launches(study, job.job_id, LOST)
        # SIGTERM has its default effect until the call starts launches.
        if code in (INTERRUPTED, -signal.SIGTERM):
            return environment.starter.interruption()
        if code:
            why = f"bench {job.arguments[0]} {exit_words(code)}; the log of pod 0 says why"
            return Ending(Outcome.CRASHED, why)
        return Ending(Outcome.OK, "")


def meeting_of(job: Job) -> Meeting:
    """The addresses at which the pods of a job meet, by its profile."""
    profile = PROFILE_FILE.converted(job.site, f"the profile of {job.name}")
    return Meeting(address=pod_address(profile, job), first_port=profile.port)


def pod_number() -> int:
    """Which pod of its job this is. Raises MachineError outside of one."""
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    if not text.isdecimal():
        raise MachineError("JOB_COMPLETION_INDEX does not say which pod of the job this is")
    return int(text)
