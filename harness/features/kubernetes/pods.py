"""Launches in the pods of a job: each pod starts one torchrun for each launch, and pod 0 decides when.

Pod 0 supervises, and the others follow it. A launch begins for them when its file is on the shared volume,
and is over when its attempt is there. The torchruns meet by their own rendezvous, at the address of pod 0 and
a port that all pods work out from the launch's id.
"""

from __future__ import annotations

import os
import platform
import signal
import time
import zlib
from pathlib import Path

from harness.features.kubernetes.manifest import pod_address
from harness.features.kubernetes.profile import PORTS, PROFILE_FILE
from harness.jobs.start import JobStarter
from harness.launch.command import node_command, worker_environment
from harness.launch.ending import write_left
from harness.launch.guarded import Guarded
from harness.launch.supervise import handled
from harness.machine.code import checkout
from harness.machine.processes import exit_words
from results.errors import MachineError, NewerSchemaError, StoreError
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
_COMES_BACK = {Outcome.PREEMPTED, Outcome.NODE_FAILED}


class PodStarter(JobStarter):
    """Starts the launches of one job in its first pod; the others follow it."""

    def __init__(self, job: Job, store: JobStore) -> None:
        self._job = job
        # A pod does not know how many pods it replaces; each of these has left a record, or open launches.
        self.start = len(store.starts(job.job_id))
        self.nodes = (platform.node(),)
        # The kubelet gives some pods cores that nobody else is on ("Control CPU Management Policies").
        self.pins = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        return node_command(launch, path, 0, endpoint(self._job, launch.launch_id))

    def interruption(self) -> Ending:
        return Ending(
            Outcome.PREEMPTED,
            "the pod was asked to end: it was evicted, preempted or deleted, or its time was over",
        )


def endpoint(job: Job, launch_id: str) -> str:
    """HOST:PORT at which the nodes of a launch meet, by the profile of its job.

    The port that a launch leaves may linger; the next one has another.
    """
    profile = PROFILE_FILE.converted(job.site, f"the profile of {job.name}")
    return f"{pod_address(profile, job)}:{profile.port + zlib.crc32(launch_id.encode()) % PORTS}"


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


def follow(study: Study, job: Job, node_rank: int) -> int:
    """Take part in the job's launches, as node `node_rank` from 1, until the job is over.

    Returns the exit code of the pod's program: 0 when the job is over, STOPPED after SIGTERM, when this
    node's share of a launch has ended with it.
    """
    stops: list[int] = []
    store, settled = JobStore(study.root), set[str]()
    with handled([signal.SIGTERM], lambda number, frame: stops.append(number)):
        while not stops and not is_over(store, job):
            if launch := _next(study, job, node_rank, settled):
                settled.add(launch.launch_id)
                _join(study, job, node_rank, launch, stops)
            else:
                time.sleep(POLL_S)
    return STOPPED if stops else 0


def _next(study: Study, job: Job, node_rank: int, settled: set[str]) -> Launch | None:
    """The oldest launch that waits for a node. Adds the others that need no more of it to `settled`."""
    names = {path.name for path in study.root.glob("launches/*")}
    for name in sorted(names - settled):
        try:
            launch = LAUNCH.read(study.launch_folder(name) / "launch.json")
        except NewerSchemaError:
            raise
        except StoreError:
            # The launch's file does not exist yet, or is only partly visible.
            continue
        is_ours = launch.job_id == job.job_id and node_rank < launch.placement.nodes
        if is_ours and not study.has_attempt(name):
            return launch
        settled.add(name)
    return None


def _join(study: Study, job: Job, node_rank: int, launch: Launch, stops: list[int]) -> None:
    """Run this node's torchrun until it has ended, or the launch is over, or this pod is to end."""
    folder = study.launch_folder(launch.launch_id)
    try:
        log = (folder / f"agent-{node_rank}.log").open("xb")
    except FileExistsError:
        # The other pods have met the predecessor of this pod there, and cannot meet this pod.
        write_left(folder, node_rank, "its pod was started again")
        return
    path = (folder / "launch.json").resolve()
    with log:
        torchrun = Guarded(
            node_command(launch, path, node_rank, endpoint(job, launch.launch_id)),
            log=log,
            environment=worker_environment(launch, checkout()),
        )
        try:
            why = _outlast(torchrun, study, launch.launch_id, stops)
            if why is not None:
                write_left(folder, node_rank, why)
        finally:
            torchrun.end()


def _outlast(torchrun: Guarded, study: Study, launch_id: str, stops: list[int]) -> str | None:
    """Wait for the end of the torchrun or of the launch. Returns why this node left before the end."""
    over_at: float | None = None
    while (code := torchrun.poll()) is None:
        now = time.monotonic()
        if over_at is None and study.has_attempt(launch_id):
            over_at = now
        if stops or (over_at is not None and now - over_at > PATIENCE_S):
            return "its pod was asked to end" if over_at is None else None
        time.sleep(POLL_S)
    return f"its torchrun {exit_words(code)}" if code else None


def pod_number() -> int:
    """Which pod of its job this is. Raises MachineError outside of one."""
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    if not text.isdecimal():
        raise MachineError("JOB_COMPLETION_INDEX does not say which pod of the job this is")
    return int(text)
