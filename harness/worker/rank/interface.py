"""The network interface of Gloo and NCCL, where nobody named one."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

import psutil

from harness.machine.device import GLOO_INTERFACE, NCCL_INTERFACE


def name_interface(environment: MutableMapping[str, str], nodes: int) -> None:
    """Have Gloo and NCCL use the interface by which this node reaches the master, unless one is named.

    Gloo takes the address that the node's own name resolves to, and many distributions resolve it to the
    loopback. NCCL takes interfaces that are neither the loopback nor Docker's, and a bridge or the board's
    controller may be among them. Other nodes cannot connect to either. NCCL is left alone where the node has
    interfaces of InfiniBand, which it takes first. On one node any address will do.
    """
    master = environment.get("MASTER_ADDR")
    if nodes == 1 or master is None:
        return
    if GLOO_INTERFACE not in environment:
        interface = interface_towards(master)
        if interface is None or interface == interface_towards("127.0.0.1"):
            return
        environment[GLOO_INTERFACE] = interface
    if not any(name.startswith("ib") for name in psutil.net_if_addrs()):
        # NCCL takes a name without the sign for the beginning of a name.
        environment.setdefault(NCCL_INTERFACE, f"={environment[GLOO_INTERFACE]}")


def interface_towards(host: str) -> str | None:
    """The name of the interface by which this node sends to `host`; None if the host is not known."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Of datagrams this sends none: the kernel looks up the route.
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return name
    return None
