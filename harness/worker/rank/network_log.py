"""Which network NCCL uses, by its own log of how it connects.

What is read of it, as public logs of NCCL 2.10 to 2.31 and aws-ofi-nccl 1.7 to 1.16 have it (written in
transport/p2p.cc, shm.cc, net.cc, net_ib.cc and graph/search.cc):

    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
    Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
    Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
    NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    NET/OFI Selected provider is efa, fabric is efa-direct (found 8 nics)
    Pattern 4, crossNic 0, nChannels 24, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1
"""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from harness.machine.device import INFINIBAND, LOGGING_OF_NCCL, rdma_devices

_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] (?:->|<-) \d+\[\w+\] (?:\[(?:send|receive)\] )?via (\S.*)"
)
_NET = re.compile(r"NET/(?P<name>[^/]+)/\d+(?:\(\d+\))?(?P<direct>/GDRDMA)?")
_RING = re.compile(r"Pattern 4, .* type (\w+)/\w+")
_PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w;.-]+)", re.IGNORECASE)
SOCKETS = "TCP sockets"


def log_network(environment: MutableMapping[str, str], path: Path) -> Path | None:
    """Have NCCL write to `path` how it connects; before its first call. None where the user logs it."""
    if "NCCL_DEBUG" in environment:
        return None
    environment.update(LOGGING_OF_NCCL, NCCL_DEBUG_FILE=str(path))
    return path


def transports(lines: Iterable[str]) -> list[str]:
    """What carries data between ranks, each once: what it is, and in brackets NCCL's word."""
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
    """Those of a log; none of one that cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return transports(lines)
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
"""By the kind of the path between the GPUs of a node (`topoPathTypeStr` of graph/topo.cc)."""


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
