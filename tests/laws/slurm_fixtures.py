"""A real Slurm on this machine: a controller and four nodes that are daemons here, with made-up GPUs.

Needs no root and no database, and writes only to its own folder. The daemons are children
that the kernel ends together with the tests; what else a killed session left behind, the next one clears.
"""

from __future__ import annotations

import atexit
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from slurm.client import Client
from slurm.job_view import JobView

NODES, GPUS, CPUS, MEMORY_MB = 4, 8, 16, 64_000
PREFIX = "bench-slurm-lab-"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "setpriv")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
SRUN_PORTS = 200
COMMAND_TIMEOUT_S = 60.0

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SrunPortRange={srun_ports}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired: two minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=8
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
KillWait=20
CompleteWait=0
InactiveLimit=0
MessageTimeout=30
# srun says only after that time, or 60 s, that it waits for a step to be created.
SlurmctldTimeout=60
SlurmdTimeout=20
# A node that was set down stays down: an answer that was under way when it ended would bring it back.
ReturnToService=1
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
        """End a node as a power cut does: its daemon and all that jobs run on it. Slurm gets no notice.

        All processes are stopped before the first is killed: numbers of processes wrap around, so that a
        program may come after what it has started, and would record how that was killed.
        """
        log = f"{self.folder}/slurmd-{node}.log"

        def on_node(process: psutil.Process) -> bool:
            if process.environ().get("SLURMD_NODENAME") == node and self._owns(process):
                return True
            # The title of a slurmstepd lies over its variables.
            return any(file.path == log for file in process.open_files())

        end_processes(lambda process: on_node(process) and not _stopped(process), signal.SIGSTOP)
        end_processes(on_node)
        self._daemons[node].wait()

    def set_down(self, node: str) -> None:
        """Tell Slurm that a node has failed."""
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def kill_controller(self) -> None:
        """End the controller as a crash does: jobs go on, and no command is answered."""
        self._daemons["slurmctld"].kill()
        self._daemons["slurmctld"].wait()

    def start_controller(self) -> None:
        """Bring it back with what it knew, and wait until it answers."""
        self._spawn("slurmctld", "slurmctld", "-D")

        def answers() -> bool:
            with suppress(AssertionError):
                return bool(self.command("scontrol", "ping"))
            return False

        self.wait(answers, "the controller answers")

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
        """Run one of Slurm's commands and return its output. Fails if it fails."""
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

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = 120) -> T:
        """Wait for the condition and return its value. Fails after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > end:
                words = [f"{path.name}: {path.read_text()[-500:]}" for path in self.folder.glob("*.out")]
                pytest.fail("\n".join([f"not within {timeout_s:g} s: {what}", *words]))
            time.sleep(0.05)
        return value

    def wait_for(self, job_id: int, *states: str, timeout_s: float = 120) -> JobView:
        """The job, once it is in one of the states."""

        def in_state() -> JobView | None:
            view = Client().query([job_id]).get(job_id)
            return view if view is not None and view.state in states else None

        return self.wait(in_state, f"job {job_id} in {states}", timeout_s)

    def hosts(self, job_id: int) -> list[str]:
        """The nodes of a job that runs, or has ended a moment ago."""
        held = self.command("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%N").strip()
        return self.command("scontrol", "show", "hostnames", held).split()

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
        """Have the nodes that were drained or set down take jobs again."""
        lines = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T %E").splitlines()
        states = [
            (name, state) for name, state, why in (line.split(maxsplit=2) for line in lines) if why == "test"
        ]
        told = [name for name, state in states if "drain" in state or "down" in state]
        if told:
            self.command("scontrol", "update", f"NodeName={','.join(told)}", "State=RESUME")

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


def end_processes(chosen: Callable[[psutil.Process], bool], number: int = signal.SIGKILL) -> None:
    """Signal the processes of this user that are chosen, but this one; they may start others meanwhile."""
    for _ in range(100):
        if not sum(_signalled(process, chosen, number) for process in psutil.process_iter()):
            return
        time.sleep(0.02)


def _signalled(process: psutil.Process, chosen: Callable[[psutil.Process], bool], number: int) -> bool:
    """Whether it was one of them, and lived."""
    with suppress(psutil.Error, OSError):
        if process.pid != os.getpid() and process.uids().real == os.getuid() and chosen(process):
            process.send_signal(number)
            return True
    return False


def _stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def sweep() -> None:
    """Clear away the labs of sessions that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(FileNotFoundError):  # another session may clear it away meanwhile
            mine = folder.stat().st_uid == os.getuid()
            if mine and owner.isdecimal() and not psutil.pid_exists(int(owner)):
                end_processes(lambda process, folder=folder: belongs(process, folder))
                shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> range:
    """A block of ports that nobody uses, below the ports of a rendezvous and of Linux's ephemeral range."""
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
def lab(running_lab, monkeypatch) -> Iterator[Lab]:
    """The cluster as a test wants it: this process's Slurm commands go to it, its nodes are idle."""
    for name, value in running_lab.environment.items():
        monkeypatch.setenv(name, value)
    yield running_lab
    running_lab.clean()
