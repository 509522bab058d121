"""System calls of Linux that Python 3.11 has no names for: namespaces, bind mounts, dying with a parent."""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag
from pathlib import Path

OWN_NETWORK = "/proc/self/ns/net"
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace(IntFlag):
    """The kinds of namespace, as CLONE_* of <linux/sched.h> has them."""

    MOUNT = 0x00020000
    HOST_NAME = 0x04000000
    USER = 0x10000000
    NETWORK = 0x40000000


def isolate() -> None:
    """Give this process a separate network and mounts, which the kernel removes with their last process.

    A user who may not do so becomes root of a user namespace first: files stay the user's own, and nothing
    outside can be changed. Raises OSError where the kernel forbids that as well. One thread only.
    """
    wanted = Namespace.NETWORK | Namespace.MOUNT
    try:
        unshare(wanted)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        unshare(wanted | Namespace.USER)
        # The kernel maps a group only for a process that has given up setgroups.
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def unshare(kinds: Namespace) -> None:
    """Leave the namespaces of these kinds for new ones. Raises OSError."""
    _call("unshare", kinds.value)


def enter_network(descriptor: int) -> None:
    """Move this thread into the network namespace that is open as `descriptor`. Raises OSError."""
    _call("setns", descriptor, Namespace.NETWORK.value)


def new_network() -> int:
    """The descriptor of a new network namespace, which lives while it is open or a process is in it."""
    home = os.open(OWN_NETWORK, os.O_RDONLY)
    try:
        unshare(Namespace.NETWORK)
        return os.open(OWN_NETWORK, os.O_RDONLY)
    finally:
        enter_network(home)
        os.close(home)


def bind(source: Path, target: Path) -> None:
    """Show the file `source` at `target`, for all processes with this one's mounts. Raises OSError."""
    _call("mount", os.fsencode(source), os.fsencode(target), None, _MS_BIND, None)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends."""
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
