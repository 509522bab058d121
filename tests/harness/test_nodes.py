"""The parts of a launch on virtual nodes: its command, its cores, its end, and its obstacles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from launching import a_launch

from harness.launch import nodes, preflight
from harness.launch.command import code_environment, local_command, shell_line
from harness.launch.nodes import outlast, shares
from harness.launch.preflight import link_obstacle
from harness.machine.code import checkout
from results.launch import Launch
from results.store import Study

Agents = list[subprocess.Popen[bytes]]


def _launch(nodes: int, gpus_per_node: int, threads: int = 1) -> Launch:
    return a_launch(nodes, gpus_per_node, slots=(), threads=threads, link_mbit_per_s=100.0)


@pytest.mark.parametrize(
    ("nodes", "ranks", "threads", "cores", "expected"),
    [
        (2, 1, 1, [4, 5], [[4], [5]]),
        (2, 2, 1, [0, 2, 4, 6, 1], [[0, 2], [4, 6]]),
        (3, 1, 2, list(range(8)), [[0, 1], [2, 3], [4, 5]]),
        # Too few: every node may use all of them.
        (2, 2, 1, [0, 1, 2], [[0, 1, 2]] * 2),
        (2, 1, 2, [0, 1, 2], [[0, 1, 2]] * 2),
    ],
)
def test_nodes_have_cores_of_their_own_where_they_are_enough(nodes, ranks, threads, cores, expected) -> None:
    assert shares(_launch(nodes, ranks, threads), cores) == expected


def test_a_launch_with_a_link_is_a_command_of_ours_and_one_without_is_torchrun() -> None:
    launch, path = _launch(2, 1), Path("/s/launches/L/launch.json")
    command = local_command(launch, path)
    assert command == (sys.executable, "-m", "harness.launch.nodes", "/s/launches/L/launch.json")
    assert shell_line(launch, command).endswith("PYTHONSAFEPATH=1 " + " ".join(command))
    plain = msgspec.structs.replace(launch, link_mbit_per_s=None)
    assert local_command(plain, path)[2] == "torch.distributed.run"


@pytest.fixture
def agents() -> Iterator[Callable[..., Agents]]:
    """Stand-ins for torchruns: shell commands that have begun when they are handed over."""
    started: Agents = []

    def start(*commands: str) -> Agents:
        for command in commands:
            shell = ["sh", "-c", command.replace("BEGUN", "echo; exec")]
            started.append(subprocess.Popen(shell, stdout=subprocess.PIPE))
            if "BEGUN" in command:
                assert started[-1].stdout.readline() == b"\n"
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_all_are_waited_for_and_the_worst_code_is_told(agents, capsys) -> None:
    assert outlast(agents("exit 0", "sleep 0.3"), lambda: False) == 0
    assert outlast(agents("exit 1", "exit 3", "exit 2"), lambda: False) == 3
    assert capsys.readouterr().out == ""
    assert outlast(agents("kill -9 $$"), lambda: False) == 128 + 9
    # `killed_on_a_node` reads it.
    assert capsys.readouterr().out == "torchrun was killed by SIGKILL\n"


def test_a_bad_end_gives_the_others_a_while_and_no_more(agents, monkeypatch, capsys) -> None:
    monkeypatch.setattr(nodes, "PATIENCE_S", 3.0)
    reports, waits, bad = agents("sleep 0.3; exit 7", "BEGUN sleep 600", "exit 1")
    began = time.monotonic()
    assert outlast([reports, waits, bad], lambda: False) == 128 + signal.SIGTERM
    assert (reports.returncode, waits.returncode, bad.returncode) == (7, -signal.SIGTERM, 1)
    assert 3 < time.monotonic() - began < 300
    # Those that this process has ended itself are not told.
    assert capsys.readouterr().out == ""


def test_who_is_asked_to_stop_and_does_not_is_killed(agents, monkeypatch) -> None:
    monkeypatch.setattr(nodes, "GRACE_S", 2.0)
    monkeypatch.setattr(nodes, "PATIENCE_S", 300.0)
    willing, deaf = agents("BEGUN sleep 600", "trap '' TERM; BEGUN sleep 600")
    began = time.monotonic()
    assert outlast([willing, deaf], lambda: True) == 128 + max(signal.SIGTERM, signal.SIGKILL)
    assert (willing.returncode, deaf.returncode) == (-signal.SIGTERM, -signal.SIGKILL)
    assert time.monotonic() - began < nodes.PATIENCE_S


PROGRAM = """
import os, sys
from harness.machine import kernel
from harness.launch import nodes
unshare = kernel.unshare
def refuse(kinds):
    if kinds == kernel.Namespace.NETWORK | kernel.Namespace.MOUNT:
        raise PermissionError(1, "unshare: Operation not permitted")
    unshare(kinds)
kernel.unshare = refuse
def command(launch, path, *, node_rank, endpoint):
    words = f"{node_rank} of {launch.placement.nodes} at {endpoint}"
    talk = f"echo {words} on $GLOO_SOCKET_IFNAME of $(cat /proc/sys/kernel/hostname)"
    return ["bash", "-c", f"{talk}; echo locked >&{sys.argv[2]}"]
nodes.torchrun_command = command
sys.exit(nodes.main())
"""


def test_a_user_can_start_a_torchrun_on_every_node_and_each_inherits_the_lock(links, tmp_path) -> None:
    path = Study(tmp_path).add_launch(_launch(3, 1))
    lock_seen, lock = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(lock)],
        # Not one thread: with more, numpy starts them when it is imported. And the path of a user.
        env={**code_environment(checkout()), "OMP_NUM_THREADS": "2", "PATH": "/usr/bin:/bin"},
        pass_fds=(lock,),
        capture_output=True,
        text=True,
    )
    os.close(lock)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "3 virtual nodes, 100mbit each way"
    host = os.uname().nodename
    assert sorted(lines) == [f"{n} of 3 at 10.77.0.1:29500 on eth0 of node{n}.{host}" for n in range(3)]
    with os.fdopen(lock_seen) as seen:
        assert seen.read() == "locked\n" * 3


@pytest.fixture
def fresh_trial() -> Iterator[None]:
    link_obstacle.cache_clear()
    yield
    link_obstacle.cache_clear()


@pytest.mark.usefixtures("fresh_trial")
@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (("-c", "pass"), None),
        (("-c", "import sys; sys.exit('more\\nno veth')"), "no veth"),
        (("-c", "import os; os.kill(os.getpid(), 9)"), "making two virtual nodes ended with -9"),
    ],
)
def test_what_stands_in_the_way_of_links_is_told(monkeypatch, trial, reason) -> None:
    monkeypatch.setattr(preflight, "LINK_TRIAL", trial)
    assert link_obstacle() == reason
    monkeypatch.setattr(preflight, "LINK_TRIAL", ("-c", "1 / 0"))
    assert link_obstacle() == reason, "asked once"


MISSING = """
import shutil, sys
from harness.machine import kernel
from harness.launch import virtual_network
def refuse(*kinds):
    raise PermissionError(1, "unshare: Operation not permitted")
def nothing(tool, path=None):
    return None
def fails(tool, path=None):
    return "/bin/false" if tool == sys.argv[2] else which(tool, path=path)
which = shutil.which
{"unshare": lambda: setattr(kernel, "unshare", refuse),
 "program": lambda: setattr(shutil, "which", nothing),
 "kernel": lambda: setattr(shutil, "which", fails)}[sys.argv[1]]()
try:
    virtual_network.VirtualSwitch().connect(2, 100.0)
except virtual_network.MachineError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (("unshare", ""), "Operation not permitted): run as root, or have user namespaces allowed"),
        (("program", ""), "need the program `ip`: install iproute2"),
        (("kernel", "ip"), "CONFIG_VETH"),
        (("kernel", "tc"), "CONFIG_NET_SCH_TBF"),
    ],
)
def test_each_thing_that_is_missing_has_its_word(links, what, words) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, *what],
        env=code_environment(checkout()),
        capture_output=True,
        text=True,
    )
    assert words in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


STARTER = """
import subprocess, sys
agent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
spinner = "import os; os.sched_setaffinity(0, [1])\\nwhile sum(os.times()[:2]) < 100: pass"
rank = '''
import os, time
from harness.worker.rank.usage import _own_s, _starter
def own_s():
    return [_own_s(frozenset(cores), _starter()) for cores in ([1], [0], [])]
os.sched_setaffinity(0, [0])
began, end = own_s(), time.monotonic() + 100
while (now := own_s())[0] - began[0] < 1 and time.monotonic() < end:
    time.sleep(0.5)  # asking takes time of core 0
print([then - before for then, before in zip(now, began)])
'''
other = subprocess.Popen([sys.executable, "-c", spinner])
try:
    subprocess.run([sys.executable, "-c", agent, rank], check=True)
finally:
    other.kill()
"""


@pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="there is no core for the other node")
def test_ranks_of_other_nodes_are_foreign_to_no_core_that_they_may_use() -> None:
    """The rank of one node watches while the rank of another spins on core 1, both started by one program."""
    done = subprocess.run(
        [sys.executable, "-c", STARTER, "harness.launch.nodes"],
        env=code_environment(checkout()),
        capture_output=True,
        text=True,
    )
    shared, apart, none = json.loads(done.stdout)
    assert shared >= 1
    assert apart < shared - 0.5
    assert none == 0
