"""The network interface of Gloo, where nobody named one."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"


def name_interface(environment: MutableMapping[str, str], nodes: int) -> None:
    """Have Gloo use the interface by which this node reaches the master, unless one is named.

    Gloo takes the address that the node's own name resolves to, which is that of the loopback on many
    distributions; other nodes cannot connect to it. On one node any address will do.
    """
    master = environment.get("MASTER_ADDR")
    if nodes == 1 or VARIABLE in environment or master is None:
        return
    interface = interface_towards(master)
    if interface is not None and interface != interface_towards("127.0.0.1"):
        environment[VARIABLE] = interface


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
