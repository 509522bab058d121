"""`python -m harness.launch.nodes LAUNCH.json`: a launch on virtual nodes of this machine, each a torchrun.

It is started instead of torchrun if a launch has a link. The torchruns meet at the first node's address
and print what they always do. All of it ends with this process, even if that is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from harness.launch.command import torchrun_command
from harness.launch.ending import print_torchrun_killed
from harness.launch.virtual_network import INTERFACE, VirtualNode, VirtualSwitch
from harness.machine.device import usable_cores
from harness.machine.kernel import Namespace, die_with_parent, enter_network, unshare
from results.errors import MachineError
from results.launch import Launch
from results.notation import link_text

PORT = 29500
"""The port at which the torchruns meet; each node has its own network, so it is always free."""
PATIENCE_S = 5.0
"""Time for the other nodes to find out by themselves, and to report it, when one has ended badly."""
GRACE_S = 5.0
"""Seconds between asking a torchrun to end and killing it; less than the supervisor gives this process."""
POLL_S = 0.05

_Agents = Sequence[subprocess.Popen[bytes]]


def main() -> int:
    """Start a torchrun on every node and stay until all have ended. Returns the largest of their codes."""
    path = Path(sys.argv[1]).resolve()
    switch = VirtualSwitch()
    # Set here: the kernel clears it when a process becomes root of a user namespace, as this one may have.
    die_with_parent()
    # Imported late: numpy starts threads, and a process with threads cannot enter a user namespace.
    from results.schemas import LAUNCH

    launch = LAUNCH.read(path)
    assert launch.link_mbit_per_s is not None
    nodes = switch.connect(launch.placement.nodes, launch.link_mbit_per_s)
    print(f"{len(nodes)} virtual nodes, {link_text(launch.link_mbit_per_s)} each way", flush=True)
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stops.append(number))
    agents = []
    for rank, (node, cores) in enumerate(zip(nodes, shares(launch, usable_cores()), strict=True)):
        endpoint = f"{nodes[0].address}:{PORT}"
        command = torchrun_command(launch, path, node_rank=rank, endpoint=endpoint)
        agents.append(start(node, cores, command))
    return outlast(agents, lambda: bool(stops))


def shares(launch: Launch, cores: Sequence[int]) -> list[Sequence[int]]:
    """The cores of each node: equal shares where they are enough for its ranks, all of them otherwise."""
    nodes, ranks = launch.placement.nodes, launch.placement.gpus_per_node
    each = len(cores) // nodes
    if each < ranks * launch.threads:
        return [cores] * nodes
    return [cores[node * each : (node + 1) * each] for node in range(nodes)]


def start(node: VirtualNode, cores: Sequence[int], command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command on a node, on these cores of the machine. It does not outlive this process."""

    def move_in() -> None:
        die_with_parent()
        enter_network(node.network)
        unshare(Namespace.HOST_NAME)
        socket.sethostname(node.name)
        os.sched_setaffinity(0, cores)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE},
        preexec_fn=move_in,
        # The workers inherit the descriptors that this process was given, such as the study's lock.
        close_fds=False,
        # Ctrl-C in a terminal reaches this process alone, which then ends the torchruns.
        start_new_session=True,
    )


def outlast(agents: _Agents, stopped: Callable[[], bool]) -> int:
    """Stay until all agents have ended: by themselves, or by signals after `stopped()` or a bad end of one.

    Returns the largest exit code, as given by `shell_code`. Torchruns that meet at a fixed address do not
    report a failure to each other, and a rank may compute for long before it misses a lost one.
    """
    _wait(agents, until=lambda: stopped() or any(agent.returncode for agent in agents))
    _wait(agents, until=stopped, seconds=PATIENCE_S)
    for agent in agents:
        if agent.returncode is not None and agent.returncode < 0 and not stopped():
            print_torchrun_killed(-agent.returncode)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for agent in agents:
            agent.send_signal(number)
        _wait(agents, seconds=GRACE_S)
    return max(shell_code(agent.returncode) for agent in agents)


def shell_code(code: int) -> int:
    """The exit code that a shell reports: for a signal, 128 plus the signal's number."""
    return code if code >= 0 else 128 - code


def _wait(agents: _Agents, *, until: Callable[[], bool] = lambda: False, seconds: float = inf) -> None:
    """Wait until all agents have ended, but no longer than `until` says or than `seconds`."""
    end = time.monotonic() + seconds
    # Every agent is asked, so that each has its return code.
    while None in [agent.poll() for agent in agents]:
        if until() or time.monotonic() > end:
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MachineError as error:
        sys.exit(str(error))
