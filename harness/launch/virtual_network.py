"""Virtual nodes on this machine: network namespaces on one switch, each behind a link of a given rate.

`python -m harness.launch.virtual_network MBIT_PER_S` makes two nodes and removes them again, which shows
whether this machine can.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

from harness.machine.kernel import bind, enter_network, isolate, new_network
from results import files
from results.errors import MachineError

INTERFACE = "eth0"
"""The name of a node's end of its cable."""
_ADDRESSES = IPv4Network("10.77.0.0/16")
"""No other network has these addresses, because the switch has no uplink."""
_FRAME_BYTES = 1514
"""Ethernet header and 1500 bytes of IP: what the kernel counts of a full frame."""
_LARGEST_SEGMENT_BYTES = 65536
_LEAST_QUEUE_BYTES = 65536
_NEEDS = {"ip": "the kernel's veth and bridge (CONFIG_VETH, CONFIG_BRIDGE)", "tc": "its CONFIG_NET_SCH_TBF"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualNode:
    """A virtual node: a network namespace whose only way to the others is its cable to the switch."""

    name: str
    """Its host name: `node0.` and the name of the machine."""
    address: str
    network: int
    """Descriptor of the namespace."""


class VirtualSwitch:
    """A bridge without an uplink, in a separate network namespace, to which virtual nodes are connected.

    The constructor moves this process into the namespace. The namespace has no name outside this process and
    its children, and ends with the last of them.
    """

    def __init__(self) -> None:
        """Raises MachineError, with what is missing. The process must have one thread."""
        try:
            isolate()
        except OSError as error:
            raise MachineError(
                f"virtual nodes need network namespaces, and the kernel refuses them ({error.strerror}): run "
                f"as root, or have user namespaces allowed (sysctl user.max_user_namespaces, "
                f"kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
            ) from error
        _batch("ip", ["link set lo up", "link add switch type bridge mcast_snooping 0", "link set switch up"])

    def connect(self, count: int, mbit_per_s: float) -> tuple[VirtualNode, ...]:
        """Connect new nodes, each sending and receiving at `mbit_per_s` at most, both at once.

        The rate is in 10^6 bits of whole frames a second. Called once. Raises MachineError, with what is
        missing.
        """
        nodes = tuple(
            VirtualNode(
                # At most 64 bytes in Linux; what tells nodes apart is at the front.
                name=f"node{index}.{socket.gethostname()}"[:64],
                address=str(_ADDRESSES[index + 1]),
                network=new_network(),
            )
            for index in range(count)
        )
        for port, node in enumerate(nodes):
            _plug_in(node, f"port{port}", mbit_per_s)
        _answer_for(nodes)
        return nodes


def _plug_in(node: VirtualNode, port: str, mbit_per_s: float) -> None:
    """Lay the cable between a node and its port, and hold both of its ends to the rate."""
    namespace = f"/proc/{os.getpid()}/fd/{node.network}"
    segment = f"gso_max_size {segment_bytes(mbit_per_s)}"
    outside = [
        f"link add {port} type veth peer name {INTERFACE} netns {namespace}",
        f"link set {port} master switch {segment}",
        f"link set {port} up",
    ]
    inside = [
        "link set lo up",
        f"addr add {node.address}/{_ADDRESSES.prefixlen} dev {INTERFACE} noprefixroute",
        f"link set {INTERFACE} up {segment}",
        # Reno is on every machine, allowed in every namespace, and does not pause to probe, as BBR does.
        f"route add {_ADDRESSES} dev {INTERFACE} src {node.address} congctl reno",
    ]
    _batch("ip", outside)
    _batch("ip", inside, on=node)
    _batch("tc", [shaped(port, mbit_per_s)])
    _batch("tc", [shaped(INTERFACE, mbit_per_s)], on=node)


def shaped(interface: str, mbit_per_s: float) -> str:
    """A line for `tc`: the interface sends through a token bucket (man 8 tc-tbf), and queues up to 50 ms."""
    kbit_per_s, burst = round(mbit_per_s * 1000), burst_bytes(mbit_per_s)
    limit = burst + max(round(0.050 * kbit_per_s * 125), _LEAST_QUEUE_BYTES)
    return f"qdisc add dev {interface} root tbf rate {kbit_per_s}kbit burst {burst} limit {limit}"


def burst_bytes(mbit_per_s: float) -> int:
    """The bytes that an idle link sends at once: 1 ms of its rate, and never less than three frames.

    With a smaller burst, a timer that comes late on a busy machine loses rate; with a larger one, the rate
    does not limit small messages.
    """
    return max(round(0.001 * mbit_per_s * 125_000), 3 * _FRAME_BYTES)


def segment_bytes(mbit_per_s: float) -> int:
    """The largest piece that TCP hands to the link: with the headers of its frames it fits into the burst."""
    return min(burst_bytes(mbit_per_s) * 7 // 8, _LARGEST_SEGMENT_BYTES)


def _batch(tool: str, lines: Sequence[str], *, on: VirtualNode | None = None) -> None:
    """Have `tool` do what the lines say, on the switch or on a node."""
    # On Debian /usr/sbin is in root's PATH alone.
    path = shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if path is None:
        raise MachineError(f"virtual nodes need the program `{tool}`: install iproute2")
    done = subprocess.run(
        [path, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        errors="replace",
        preexec_fn=None if on is None else partial(enter_network, on.network),
    )
    if done.returncode != 0:
        words = " ".join(done.stderr.split())
        raise MachineError(f"virtual nodes need {_NEEDS[tool]}, and `{tool}` of iproute2 said: {words}")


def _answer_for(nodes: Sequence[VirtualNode]) -> None:
    """Have names and addresses looked up in a file: a query to a DNS server that can't be reached takes 30
    s."""
    hosts = ["127.0.0.1 localhost", "::1 localhost"]
    for node in nodes:
        # TCPStore listens on IPv6, and sees its clients by mapped addresses.
        hosts += [f"{address} {node.name}" for address in (node.address, f"::ffff:{node.address}")]
    _replace(Path("/etc/hosts"), "\n".join(hosts) + "\n")
    _replace(Path("/etc/resolv.conf"), "")
    order = Path("/etc/nsswitch.conf")
    if order.exists():
        lines = files.read(order).text.splitlines()
        kept = [line for line in lines if not line.startswith("hosts:")]
        _replace(order, "\n".join([*kept, "hosts: files"]) + "\n")


def _replace(path: Path, text: str) -> None:
    """Show `text` at `path`, to this process and its children."""
    if not path.exists():
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        # A file that is mounted somewhere outlives its name.
        bind(Path(file.name), path)


if __name__ == "__main__":
    try:
        VirtualSwitch().connect(2, float(sys.argv[1]))
    except MachineError as error:
        sys.exit(str(error))
