"""The network of a rank: the interface that Gloo and NCCL use, NCCL's connections, the last collectives.

NCCL logs how it connects. These lines are read, as public logs of NCCL 2.10 to 2.31 and aws-ofi-nccl 1.7 to
1.16 have them (written in transport/p2p.cc, shm.cc, net.cc, net_ib.cc and graph/search.cc):

    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
    Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
    Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
    NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    NET/OFI Selected provider is efa, fabric is efa-direct (found 8 nics)
    Pattern 4, crossNic 0, nChannels 24, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1

The flight recorder is torch's: its backends keep the last collectives that a rank has issued.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path

import psutil
import torch

from harness.machine.device import GLOO_INTERFACE, INFINIBAND, LOGGING_OF_NCCL, NCCL_INTERFACE, rdma_devices
from results.cell import Backend
from results.files import read_lines, replace

_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] (?:->|<-) \d+\[\w+\] (?:\[(?:send|receive)\] )?via (\S.*)"
)
_NET = re.compile(r"NET/(?P<name>[^/]+)/\d+(?:\(\d+\))?(?P<direct>/GDRDMA)?")
_RING = re.compile(r"Pattern 4, .* type (\w+)/\w+")
_PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w;.-]+)", re.IGNORECASE)
SOCKETS = "TCP sockets"
NET = Path("/sys/class/net")


def log_network(environment: MutableMapping[str, str], path: Path) -> Path | None:
    """Have NCCL write to `path` how it connects; before its first call. None where the user logs it."""
    if "NCCL_DEBUG" in environment:
        return None
    environment.update(LOGGING_OF_NCCL, NCCL_DEBUG_FILE=str(path))
    return path


def transports(lines: Iterable[str]) -> list[str]:
    """List what carries data between ranks, each once, with NCCL's word in brackets."""
    found: dict[str, None] = {}
    inside, link, provider = "", "InfiniBand", "libfabric"
    channels: list[str] = []
    for line in lines:
        if match := _CHANNEL.search(line):
            channels.append(match[1].strip())
        elif match := _RING.search(line):
            inside = match[1]
        elif "NET/IB : Using" in line:
            link = "RoCE" if "/RoCE" in line else "InfiniBand"
        elif match := _PROVIDER.search(line):
            provider = match[1].upper() if match[1].startswith("efa") else match[1]
    for via in channels:
        found[_transport(via, inside, link, provider)] = None
    return sorted(found)


def read_transports(path: Path) -> list[str]:
    """Read the transports in a log; the list is empty if it cannot be read."""
    try:
        return transports(line.text for line in read_lines(path))
    except OSError:
        return []


def _transport(via: str, inside: str, link: str, provider: str) -> str:
    net = _NET.match(via)
    if net is None:
        if "shared memory" in via or via.startswith("SHM"):
            return "shared memory of the host (SHM)"
        if via.startswith("P2P"):
            word = "/".join(via.split("/")[:2])
            return f"{_INSIDE.get(inside, 'PCIe' if inside else 'NVLink or PCIe')} ({word})"
        return via
    name = net["name"]
    direct = ", GPUDirect RDMA" if net["direct"] else ""
    if name == "Socket":
        return f"{SOCKETS} (NET/{name})"
    if name.startswith("IB"):
        return f"{link} (NET/{name}{direct})"
    return f"{provider if 'Libfabric' in name else name} (NET/{name}{direct})"


_INSIDE = {"NVL": "NVLink", "NVB": "NVLink", "C2C": "NVLink-C2C"}
"""Names of links by the kind of path between a node's GPUs (`topoPathTypeStr` of graph/topo.cc)."""


def unused_fabric(found: Iterable[str], folder: Path = INFINIBAND) -> str | None:
    """A warning where NCCL uses sockets and this host has a port of InfiniBand, RoCE or EFA that is up."""
    if not any(transport.startswith(SOCKETS) for transport in found):
        return None
    devices = rdma_devices(folder)
    if not devices:
        return None
    return (
        f"NCCL exchanges over TCP sockets, and {', '.join(devices[:4])} (RDMA, {len(devices)} active) stood "
        f"unused: see the launch's nccl-*.log, and NCCL_IB_HCA, NCCL_IB_DISABLE and NCCL_NET"
    )


def one_queue(joins_a_pair_twice: bool, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning if a GPU has one queue for the groups that two ranks have in common; else nothing."""
    if not joins_a_pair_twice or environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return []
    return [
        "CUDA_DEVICE_MAX_CONNECTIONS is 1, and two ranks have several groups in common: their exchanges wait "
        "for each other in the one queue of the GPU, and may wait forever; unset it for this strategy"
    ]


def name_interface(environment: MutableMapping[str, str], nodes: int) -> None:
    """Have Gloo and NCCL use the interface by which this node reaches the master, unless one is named.

    Gloo takes the address that the node's own name resolves to, and many distributions resolve it to the
    loopback. NCCL takes interfaces that are neither the loopback nor Docker's, and a bridge or the board's
    controller may be among them. Other nodes cannot connect to either. NCCL is left alone where the node has
    interfaces of InfiniBand, which it takes first, or several adapters that it may use together. On one node
    any address will do.
    """
    master = environment.get("MASTER_ADDR")
    if nodes == 1 or master is None:
        return
    if GLOO_INTERFACE not in environment:
        interface = interface_towards(master)
        if interface is None or interface == interface_towards("127.0.0.1"):
            return
        environment[GLOO_INTERFACE] = interface
    others = adapters() - {environment[GLOO_INTERFACE]}
    if not others and not any(name.startswith("ib") for name in psutil.net_if_addrs()):
        # NCCL takes a name without the sign for the beginning of a name.
        environment.setdefault(NCCL_INTERFACE, f"={environment[GLOO_INTERFACE]}")


def adapters() -> set[str]:
    """The interfaces of adapters that are up and have an address which other hosts may reach.

    The kernel gives an adapter a device, and bridges and tunnels none. The board's controller has an
    address of the link only.
    """
    states = psutil.net_if_stats()
    up = {name for name in states if states[name].isup and (NET / name / "device").exists()}
    own = {name: [_address(entry.address) for entry in psutil.net_if_addrs().get(name, ())] for name in up}
    return {name for name in up if any(one is not None and not one.is_link_local for one in own[name])}


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address of an interface; None for the number of the adapter (MAC)."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def named_interfaces(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that name the interfaces of Gloo and NCCL, as they are set in this process."""
    return {name: environment[name] for name in (GLOO_INTERFACE, NCCL_INTERFACE) if name in environment}


def interface_towards(host: str) -> str | None:
    """The name of the interface by which this node sends to `host`; None if the host is not known."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # This sends no datagram: the kernel only looks up the route.
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return name
    return None


_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Private names of torch (2.13 to 2.15): they may be missing. ProcessGroupNCCL records its own operations."""


def flight_recording(backend: Backend) -> bytes | None:
    """The backend's recording as JSON; None if this torch keeps none."""
    dump: Callable[[bool, bool], bytes] | None
    dump = getattr(torch._C._distributed_c10d, _DUMPS[backend], None)
    # The dump includes finished collectives: ranks differ in the number that they have finished.
    return None if dump is None else dump(True, False)


def write_recording(path: Path, backend: Backend) -> None:
    """Write the recording to `path`, over an older one. A failure is printed, and the run continues."""
    try:
        recording = flight_recording(backend)
        if recording is None:
            print(f"this torch has no flight recorder of {backend}", file=sys.stderr, flush=True)
            return
        replace(path, recording)
    except Exception:
        # This runs in parallel with the run, which may still succeed.
        traceback.print_exc()
