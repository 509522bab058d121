"""A real Slurm on this machine: a controller and four nodes that are daemons here, with made-up GPUs.

Needs no root and no database, and touches nothing outside of a folder of its own. The daemons are children
that the kernel ends together with the tests; what else a killed session left behind, the next one clears.
"""

from __future__ import annotations

import atexit
import io
import os
import pwd
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from harness.cli import run as run_bench
from results.job_store import JobStore
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study
from slurm.client import Client
from slurm.job_view import JobView

NODES, GPUS, CPUS, MEMORY_MB = 4, 8, 16, 64_000
PREFIX = "bench-slurm-lab-"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "setpriv")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
SRUN_PORTS = 200
COMMAND_TIMEOUT_S = 20.0

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SrunPortRange={srun_ports}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired: two minutes, unless told otherwise.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
EnforcePartLimits=ALL
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=2
CompleteWait=0
InactiveLimit=0
MessageTimeout=30
SlurmdTimeout=10
ReturnToService=2
JobRequeue=1
PropagateResourceLimits=NONE
# The nodes are larger than this machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=10
PartitionName=short Nodes=n[1-2] MaxTime=00:30:00 DefaultTime=10
PartitionName=urgent Nodes=ALL MaxTime=UNLIMITED DefaultTime=10 PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1"
    " SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory} Gres=gpu:h100:{gpus}"
)

T = TypeVar("T")


class Lab:
    """One throw-away cluster. The variables PATH and SLURM_CONF are all that a client needs."""

    nodes = tuple(f"n{i}" for i in range(1, NODES + 1))

    def __init__(self) -> None:
        # Short, because the path of a socket holds 107 characters; its owner's number is in the name.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.environment = {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Bring the nodes up. Fails with the last words of the daemons if they do not come."""
        self._configure(_free_ports(1 + NODES + SRUN_PORTS))
        self._start_munge()
        self._spawn("slurmctld", "slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.wait_idle()

    def _configure(self, ports: range) -> None:
        host = socket.gethostname().partition(".")[0]
        lines = [
            NODE.format(name=node, host=host, port=port, cpus=CPUS, memory=MEMORY_MB, gpus=GPUS)
            for node, port in zip(self.nodes, ports[1:], strict=False)
        ]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host,
                controller_port=ports[0],
                srun_ports=f"{ports[1 + NODES]}-{ports[-1]}",
                user=pwd.getpwuid(os.geteuid()).pw_name,
                folder=self.folder,
                nodes="\n".join(lines),
            )
        )
        # Slurm looks at the files of GPUs; a link to a device will do.
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").symlink_to("/dev/null")
        devices = self.folder / f"gpu[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu Type=h100 File={devices}\n")
        (self.folder / "state").mkdir()

    def _start_munge(self) -> None:
        key, socket_path = self.folder / "munge.key", self.folder / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        # Forced, because it minds who owns the folders above.
        self._spawn("munged", "munged", "--foreground", "--force", f"--socket={socket_path}", *files)
        self.wait(socket_path.exists, "munged")

    def start_node(self, node: str) -> None:
        self._spawn(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """End a node as a power cut does: its daemon and all that jobs run on it."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        # First the daemons of its jobs: one that lives on for a moment tells that its program was killed.
        log = f"{self.folder}/slurmd-{node}.log"
        end_processes(lambda process: any(file.path == log for file in process.open_files()))
        end_processes(
            lambda process: process.environ().get("SLURMD_NODENAME") == node and self._owns(process)
        )

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def command(self, *words: str) -> str:
        """What one of Slurm's commands prints. Fails if it fails."""
        done = subprocess.run(
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = 30) -> T:
        """What the condition gives as soon as it holds. Fails after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > end:
                words = [f"{path.name}: {path.read_text()[-500:]}" for path in self.folder.glob("*.out")]
                pytest.fail("\n".join([f"not within {timeout_s:g} s: {what}", *words]))
            time.sleep(0.05)
        return value

    def wait_for(self, job_id: int, *states: str, timeout_s: float = 30) -> JobView:
        """The job, once it is in one of the states."""

        def in_state() -> JobView | None:
            view = Client().query([job_id]).get(job_id)
            return view if view is not None and view.state in states else None

        return self.wait(in_state, f"job {job_id} in {states}", timeout_s)

    def wait_idle(self) -> None:
        """Until every node waits for work."""

        def idle() -> bool:
            with suppress(AssertionError):
                return self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split() == ["idle"] * NODES
            return False

        self.wait(idle, "all nodes idle")

    def drain(self) -> None:
        """Have the nodes start nothing: jobs wait until `resume`, or the end of the test."""
        self.command("scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=DRAIN", "Reason=test")

    def resume(self) -> None:
        if "drain" in self.command("sinfo", "-h", "-N", "-o", "%T"):
            self.command("scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=RESUME")

    def clean(self) -> None:
        """End what a test has left, and bring lost nodes back."""
        if self.command("squeue", "--noheader"):
            self.command("scancel", "--user", str(os.geteuid()))
            self.wait(lambda: not self.command("squeue", "--noheader"), "an empty queue")
        for node in self.nodes:
            if self._daemons[node].poll() is not None:
                self.start_node(node)
        self.resume()
        self.wait_idle()

    def stop(self) -> None:
        """End every process of this lab, and remove its folder."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        end_processes(self._owns)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _owns(self, process: psutil.Process) -> bool:
        return belongs(process, self.folder)


def belongs(process: psutil.Process, folder: Path) -> bool:
    """Whether a process is of the lab in this folder: by its variables, or by its log."""
    if process.environ().get("SLURM_CONF", "").startswith(f"{folder}/"):
        return True
    # The title of a slurmstepd lies over its variables.
    return any(file.path.startswith(f"{folder}/") for file in process.open_files())


def end_processes(chosen: Callable[[psutil.Process], bool]) -> None:
    """Kill this user's processes that are chosen, never this one."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.uids().real == os.getuid() and chosen(process):
                process.kill()


def sweep() -> None:
    """Clear away the labs of sessions that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        mine = folder.stat().st_uid == os.getuid()
        if mine and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            end_processes(lambda process, folder=folder: belongs(process, folder))
            shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> range:
    """A block of ports that nobody uses, below those of a rendezvous and those that Linux gives away."""
    for _ in range(50):
        first = random.SystemRandom().randrange(10_000, 20_000 - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return range(first, first + count)
    pytest.fail(f"there is no free block of {count} ports")


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture(scope="session")
def running_lab() -> Iterator[Lab]:
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        pytest.skip(
            f"no Slurm here ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
        )
    sweep()
    lab = Lab()
    atexit.register(lab.stop)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        atexit.unregister(lab.stop)


@pytest.fixture
def lab(running_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The cluster as a test wants it: this process's Slurm commands go to it, its nodes are idle."""
    for name, value in running_lab.environment.items():
        monkeypatch.setenv(name, value)
    yield running_lab
    running_lab.clean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a call of `bench` left."""

    code: int
    stdout: str
    stderr: str


class Bench:
    """`bench` as it is called in one folder, on the cluster or on this machine, and what its studies hold."""

    def __init__(self, folder: Path, lab: Lab | None = None) -> None:
        self.folder = folder
        self.counted = COUNTED
        self._lab = lab

    def __call__(self, *arguments: object, **variables: str) -> Done:
        """Call it in this process, with these variables beside the cluster's."""
        given = {**(self._lab.environment if self._lab else {}), **variables}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        out, errors = io.StringIO(), io.StringIO()
        try:
            with chdir(self.folder), redirect_stdout(out), redirect_stderr(errors):
                code = run_bench([str(argument) for argument in arguments], debug=False)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return Done(code=code, stdout=out.getvalue(), stderr=errors.getvalue())

    def matrix(self, *arguments: object, out: str = "study", **variables: str) -> Done:
        """`bench matrix` with steps that are counted, not timed: what it trains is always the same."""
        launcher = ("slurm",) if self._lab else ("local", "--oversubscribe", "--no-report")
        return self("matrix", *COUNTED, "--launcher", *launcher, "--out", out, *arguments, **variables)

    def study(self, out: str = "study") -> Study:
        return Study(self.folder / out)

    def jobs(self, out: str = "study") -> list[int]:
        """The scheduler's numbers of a study's jobs, oldest first."""
        store = JobStore(self.folder / out)
        found = [store.submission(job.job_id) for job in store.jobs()]
        return [int(submission.scheduler_id) for submission in found if submission is not None]

    def settle(self, timeout_s: float = 240) -> None:
        """Until the queue is empty."""
        assert self._lab is not None
        lab = self._lab
        lab.wait(lambda: not lab.command("squeue", "--noheader"), "an empty queue", timeout_s)

    def results(self, out: str = "study") -> list[RunResult]:
        return self.study(out).results()

    def figures(self, out: str = "study") -> dict[str, set[bytes]]:
        """What each cell's good runs trained, bit for bit: losses, parameters and bytes of all ranks."""
        study = self.study(out)
        found: dict[str, set[bytes]] = {}
        for result in study.results():
            if result.outcome is Outcome.OK:
                records = study.rank_records(result.cell_id, result.run_id)
                found.setdefault(result.cell_id, set()).add(
                    msgspec.json.encode(
                        [
                            (
                                *(record.rank, record.warmup.loss, record.steps.loss),
                                *(record.parameters_hash, record.work),
                            )
                            for record in records
                        ]
                    )
                )
        return found

    def processes(self) -> list[psutil.Process]:
        """Those that work in this folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and str(self.folder) in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait_for_processes(self, timeout_s: float = 30) -> None:
        """Until none of them is left. Fails after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < end, [process.cmdline() for process in left if process.is_running()]
            time.sleep(0.1)


FAULTY = """
import os, signal, time
from pathlib import Path

import torch
from torch import nn
from workloads import Workload

HERE = Path(__file__).parent


class Faulty(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        path = HERE / "fault"
        last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if self.calls == 8 and last and path.exists():
            for line in path.read_text().splitlines():
                gpus, batch, fault = line.split()
                if (gpus, batch) == (os.environ["WORLD_SIZE"], str(len(x))):
                    self.fault(fault, path)
        return super().forward(x)

    def fault(self, fault, path):
        if fault == "raise":
            raise ValueError("as it was told")
        elif fault == "hang":
            time.sleep(600)
        elif fault in ("die", "orphan"):
            os.kill(os.getpid() if fault == "die" else os.getppid(), signal.SIGKILL)
        elif fault == "wait":
            (HERE / "reached.part").write_text(str(os.getpid()))
            (HERE / "reached.part").rename(HERE / "reached")
            while path.exists():
                time.sleep(0.02)


def build():
    def synthetic(generator, samples):
        return torch.randn(samples, 16, generator=generator), torch.randn(samples, 1, generator=generator)

    return Workload(module=Faulty(16, 1), loss=nn.functional.mse_loss, synthetic=synthetic)
"""


@pytest.fixture(scope="session")
def faulty_model() -> Callable[..., tuple[str, ...]]:
    """`faulty_model(folder, "2 8 wait")` puts a model there, and gives the words that train it.

    In its 8th call, the last of 2 ranks with 8 samples waits until the file `fault` is gone; other faults
    are hang, raise, die (the rank) and orphan (its torchrun). Without any it trains the same.
    """

    def put(folder: Path, *faults: str) -> tuple[str, ...]:
        (folder / "faulty.py").write_text(FAULTY)
        (folder / "fault").unlink(missing_ok=True)
        if faults:
            (folder / "fault").write_text("".join(f"{fault}\n" for fault in faults))
        return ("--workload", "py:faulty:build")

    return put


COUNTED = (
    *("--device", "cpu", "--repeats", "1", "--budget", "0"),
    *("--warmup-steps", "5", "--block-steps", "5", "--quads", "0"),
)


@pytest.fixture(scope="session")
def bench_in() -> Callable[..., Bench]:
    """`bench_in(folder)` is `bench` on this machine, `bench_in(folder, lab)` on the cluster."""
    return Bench


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Bench:
    return Bench(tmp_path, lab)
