"""Virtual nodes with a network link: their rate is the one asked for, and they are alone in their world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.launch.command import code_environment
from harness.launch.virtual_network import burst_bytes, segment_bytes, shaped
from harness.machine.code import checkout

PAYLOAD_SHARE = 1448 / 1514
"""The payload of a frame, without the headers of Ethernet (14), IP (20) and TCP with its timestamps (32)."""
Inside = Callable[..., list[Any]]

REFUSED = """
from harness.machine import kernel
unshare = kernel.unshare
def refuse(kinds):
    if kinds == kernel.Namespace.NETWORK | kernel.Namespace.MOUNT:
        raise PermissionError(1, "unshare: Operation not permitted")
    unshare(kinds)
kernel.unshare = refuse
"""
"""Run as a user who is not root."""
LAB = """
import os, sys
from harness.launch.nodes import outlast, start
from harness.launch.virtual_network import VirtualSwitch
rate, count, script, *arguments = sys.argv[1:]
nodes = VirtualSwitch().connect(int(count), float(rate))
names = [f"{node.name}={node.address}" for node in nodes]
ranks = [
    start(node, os.sched_getaffinity(0), [sys.executable, script, str(rank), ",".join(names), *arguments])
    for rank, node in enumerate(nodes)
]
sys.exit(outlast(ranks, lambda: False))
"""


@pytest.fixture
def inside(links, tmp_path) -> Inside:
    """`inside(script, nodes, mbit_per_s, *arguments)`: the JSON lines that the script printed on nodes.

    It is called with its rank and `name=address,...` of all nodes before the arguments; `first` comes
    before the nodes are made.
    """

    def run(script: str, nodes: int, mbit_per_s: float, *arguments: object, first: str = "") -> list[Any]:
        (tmp_path / "lab.py").write_text(first + LAB)
        (tmp_path / "rank.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "lab.py", str(mbit_per_s), str(nodes), "rank.py", *map(str, arguments)],
            cwd=tmp_path,
            env=code_environment(checkout()),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


ALL_REDUCE = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
rank, nodes, payload_bytes = int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
torch.set_num_threads(1)
meeting = "tcp://" + nodes[0].split("=")[1] + ":29500"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=len(nodes),
                        timeout=timedelta(seconds=300))
seconds, values = [], torch.ones(payload_bytes // 4)
for _ in range(6):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    seconds.append(torch.tensor([time.perf_counter() - began]))
    dist.all_reduce(seconds[-1], dist.ReduceOp.MAX)
assert values[0] == len(nodes) ** 6
if rank == 0:
    print(min(second.item() for second in seconds))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_an_all_reduce_takes_the_time_of_a_ring_over_the_link_and_less_over_a_faster_one(inside) -> None:
    """A ring of n sends 2 (n - 1) / n of the payload (Patarasuk and Yuan 2009, section 4), here all of it."""
    payload_bytes = 2_500_000
    ring_s = payload_bytes * 8 / 200e6 / PAYLOAD_SHARE
    [slow] = inside(ALL_REDUCE, 2, 200, payload_bytes)
    assert 0.9 * ring_s < slow < 1.25 * ring_s
    [fast] = inside(ALL_REDUCE, 2, 10_000, payload_bytes)
    assert fast < 0.4 * ring_s


FLOWS = """
import json, socket, sys, threading, time
rank, nodes = int(sys.argv[1]), [node.split("=")[1] for node in sys.argv[2].split(",")]
flows, size_bytes = json.loads(sys.argv[3]), int(sys.argv[4])
server = socket.create_server((nodes[rank], 7000))


def connection(address):
    while True:
        try:
            return socket.create_connection((address, 7000))
        except ConnectionRefusedError:
            time.sleep(0.02)


def drain(incoming):
    left = size_bytes
    while left:
        left -= len(incoming.recv(min(left, 1 << 20)))


def at_once(function, connections):
    threads = [threading.Thread(target=function, args=(other,)) for other in connections]
    for thread in threads:
        thread.start()
    return threads


outgoing = [connection(nodes[there]) for here, there in flows if here == rank]
incoming = [server.accept()[0] for here, there in flows if there == rank]
began, ended = [], []
for _ in range(15):
    receiving = at_once(drain, incoming)
    for other in incoming:
        other.sendall(b"g")
    for other in outgoing:
        other.recv(1)
    # A link that rests saves up its burst.
    time.sleep(0.02)
    began.append(time.monotonic())
    sending = at_once(lambda other: other.sendall(bytes(size_bytes)), outgoing)
    for thread in receiving:
        thread.join()
    ended.append(time.monotonic())
    for thread in sending:
        thread.join()
control = {other.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode()
           for other in outgoing + incoming}
sys.stdout.write(json.dumps([rank, began, ended, *control]) + "\\n")
"""


def _transfer_s(inside: Inside, groups: list[list[list[int]]], size_bytes: int) -> list[float]:
    """For each group of flows `[from, to]`: the shortest time from its first start to its last byte."""
    flows = [flow for group in groups for flow in group]
    lines = inside(FLOWS, 1 + max(map(max, flows)), 100, flows, size_bytes)
    began = {rank: moments for rank, moments, *_ in lines}
    ended = {rank: moments for rank, _, moments, *_ in lines}
    assert [control for *_, control in lines] == ["reno"] * len(lines)
    return [
        min(
            max(ended[there][turn] for _, there in group) - min(began[here][turn] for here, _ in group)
            for turn in range(15)
        )
        for group in groups
    ]


@pytest.mark.parametrize(
    ("groups", "shared_by"),
    [
        pytest.param([[[0, 1], [1, 0]]], 1, id="both ways at once"),
        pytest.param([[[0, 1], [0, 2]]], 2, id="one node to two shares its way out"),
        pytest.param([[[1, 0], [2, 0]]], 2, id="two nodes to one share its way in"),
        pytest.param([[[0, 1]], [[2, 3]]], 1, id="two pairs have nothing in common"),
    ],
)
def test_each_node_sends_and_receives_at_the_rate_and_the_switch_is_faster(inside, groups, shared_by) -> None:
    wanted = shared_by * 500_000 * 8 / 100e6 / PAYLOAD_SHARE
    for seconds in _transfer_s(inside, groups, 500_000):
        assert 0.9 * wanted < seconds < 1.25 * wanted


def test_a_link_that_was_idle_saves_up_a_millisecond_and_no_more(inside) -> None:
    # 12.5 KB travel at once, the rest of 100 KB at 12.5 MB a second.
    [seconds] = _transfer_s(inside, [[[0, 1]]], 100_000)
    assert (100_000 - 12_500) / 12.5e6 < seconds < 2 * 100_000 / 12.5e6


def test_a_burst_is_a_millisecond_of_the_rate_and_holds_what_tcp_sends_at_once() -> None:
    assert [burst_bytes(rate) for rate in (1, 100, 1000, 10_000)] == [4542, 12_500, 125_000, 1_250_000]
    assert [segment_bytes(rate) for rate in (1, 100, 1000)] == [3974, 10_937, 65_536]
    for rate in (1, 10, 36.4, 100, 300, 1000):
        frames = -(-segment_bytes(rate) // 1448)
        assert segment_bytes(rate) + frames * 66 <= burst_bytes(rate)


def test_both_ends_of_a_cable_get_a_token_bucket_in_powers_of_ten() -> None:
    # 50 ms of 12.5 MB/s behind a burst of 12.5 KB; of 312.5 KB/s that would be ten frames, and 64 KB it is.
    assert shaped("eth0", 100) == "qdisc add dev eth0 root tbf rate 100000kbit burst 12500 limit 637500"
    assert shaped("port1", 2.5) == "qdisc add dev port1 root tbf rate 2500kbit burst 4542 limit 70078"


WORLD = """
import json, socket, sys, time
rank, nodes = int(sys.argv[1]), dict(node.split("=") for node in sys.argv[2].split(","))
me = list(nodes)[rank]
began = time.monotonic()
addresses = [socket.gethostbyname(name) for name in nodes]
names = [socket.gethostbyaddr(address)[0] for address in nodes.values()]
names += [socket.getnameinfo((f"::ffff:{address}", 0), 0)[0] for address in nodes.values()]
try:
    socket.getaddrinfo("www.example.com", 80)
    unknown = "known"
except OSError:
    unknown = "unknown"
asked_s = time.monotonic() - began
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
    outside = "reached"
except OSError as error:
    outside = error.strerror
with open("/etc/nsswitch.conf") as file:
    order = [line.split() for line in file if line.startswith("hosts:")]
sys.stdout.write(json.dumps({
    "host": socket.gethostname(), "me": me, "addresses": addresses, "names": names, "nodes": nodes,
    "order": order, "unknown": unknown, "asked_s": asked_s, "outside": outside,
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "resolver": open("/etc/resolv.conf").read(), "users": int(open("/proc/self/uid_map").read().split()[2]),
}) + "\\n")
"""


@pytest.mark.parametrize("first", ["", REFUSED], ids=["as we are", "as a user"])
def test_nodes_know_each_other_by_name_and_nobody_else(inside, first) -> None:
    found = inside(WORLD, 3, 1000, first=first)
    assert sorted(world["host"].split(".")[0] for world in found) == ["node0", "node1", "node2"]
    for world in found:
        nodes = world["nodes"]
        assert nodes.keys() == {name for name in nodes if name.endswith(f".{os.uname().nodename}")}
        assert (world["host"], world["addresses"]) == (world["me"], list(nodes.values()))
        assert list(nodes.values()) == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        assert world["names"] == [*nodes, *nodes]
        assert (world["unknown"], world["outside"]) == ("unknown", "Network is unreachable")
        assert world["asked_s"] < 4.5
        assert "eth0" in world["interfaces"]
        assert not [name for name in world["interfaces"] if name.startswith("port")]
        assert (world["resolver"], world["order"]) == ("", [["hosts:", "files"]])
        # A user is nobody but root of a namespace of its own.
        assert not first or world["users"] == 1


def test_the_machine_itself_stays_as_it_was(inside) -> None:
    def state() -> tuple[object, ...]:
        links = sorted(path.name for path in Path("/sys/class/net").iterdir())
        return (
            os.uname().nodename,
            links,
            Path("/etc/hosts").read_bytes(),
            Path("/proc/self/mountinfo").read_text(),
        )

    before = state()
    inside("", 2, 100)
    assert state() == before


SHARED = """
import subprocess, sys
from pathlib import Path
mounts = Path("/proc/self/mountinfo")
before = mounts.read_text()
subprocess.run([sys.executable, "-m", "harness.launch.virtual_network", "100"], check=True)
sys.exit(mounts.read_text() != before)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's mounts could come back to where they are shared")
def test_what_is_mounted_for_the_nodes_is_not_seen_outside(links) -> None:
    outer = ["unshare", "--mount", "--propagation", "shared", sys.executable, "-c", SHARED]
    done = subprocess.run(outer, env=code_environment(checkout()), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
