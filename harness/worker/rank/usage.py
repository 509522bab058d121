"""Memory and CPU of this rank and of its host, as the kernel counts them."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from harness.machine.device import control_groups, read_fact
from results import files

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def reset_rss_peak() -> bool:
    """Make the kernel forget the peak so far; False where it can't."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def rss_peak_bytes() -> int:
    """The largest resident memory of this process since the last reset."""
    peak_kib = status_field(Path("/proc/self/status"), "VmHWM:")
    return rss_bytes() if peak_kib is None else int(peak_kib) * 1024


def available_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that this process can still take before the kernel ends processes: what is left of the host's,
    or of a control group's that it is in, whichever is less; infinite where no file says.

    Sources: proc_meminfo(5), MemAvailable; cgroup-v2.rst, memory.max, memory.current and memory.stat;
    cgroup-v1/memory.rst.
    """
    host = status_field(proc / "meminfo", "MemAvailable:")
    return min([math.inf if host is None else host * 1024, *_left_in_groups(proc, cgroups)])


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[float]:
    """The bytes left in each control group of this process that has a limit: its group, the groups around
    it, and in a container the one that is mounted as the root."""
    for folder, version in control_groups("memory", proc, cgroups):
        limit, used, unused = "memory.max", "memory.current", "inactive_file"
        if version == 1:
            limit, used, unused = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        most, taken = read_fact(folder / limit) or "", read_fact(folder / used) or ""
        if most.isdigit() and taken.isdigit():
            # Pages of files that nobody uses are given back first.
            yield int(most) - int(taken) + (status_field(folder / "memory.stat", unused) or 0.0)


def status_field(path: Path, name: str) -> float | None:
    """The number behind a name at the beginning of a line of a file; None without such a line."""
    lines = (line.split() for line in (read_fact(path) or "").splitlines())
    return next((float(words[1]) for words in lines if len(words) > 1 and words[0] == name), None)


def host_number() -> float:
    """Return a number of 48 bits that is the same for all processes that share a host's memory, also in
    containers."""
    boot = read_fact(Path("/proc/sys/kernel/random/boot_id")) or platform.node()
    return float(int.from_bytes(hashlib.blake2b(boot.encode(), digest_size=6).digest()))


class ForeignCpu:
    """How much of some cores other processes used between two moments.

    Busy time of the cores from the kernel, steal by other virtual machines included, less the CPU time of
    own processes that may use them: `starter` and all below it, by default what started the ranks of this
    host.
    """

    def __init__(self, cores: Iterable[int], starter: psutil.Process | None = None) -> None:
        self._cores = frozenset(cores)
        self._starter = starter or _starter()
        self._wall_s = self._foreign_s = 0.0
        """Seconds of the spans before the last pause."""
        self._start = self._sample()

    def cores_used(self) -> float:
        """Foreign CPU time over wall time since the start, in cores; not less than 0."""
        self._add()
        return max(0.0, self._foreign_s / self._wall_s) if self._wall_s > 0 else 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no use of the cores during this context."""
        self._add()
        try:
            yield
        finally:
            self._start = self._sample()

    def _add(self) -> None:
        """Count the span since the last sample, and begin another."""
        now = self._sample()
        wall, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        self._wall_s += wall
        self._foreign_s += busy - own
        self._start = now

    def _sample(self) -> tuple[float, float, float]:
        return time.monotonic(), _busy_s(self._cores), _own_s(self._cores, self._starter)


def _busy_s(cores: frozenset[int]) -> float:
    total = 0
    for line in files.read("/proc/stat").text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
            total += user + nice + system + irq + softirq + steal
    return total * _TICK_S


def _own_s(cores: frozenset[int], starter: psutil.Process) -> float:
    total = 0.0
    for process in [starter, *descendants(starter)]:
        try:
            times, allowed = process.cpu_times(), process.cpu_affinity()
        except psutil.Error:
            continue
        if cores.intersection(allowed):
            # Those of children that have ended are in no other process.
            total += times.user + times.system + times.children_user + times.children_system
    return total


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """All descendants, from the kernel's list of the children of each thread (proc_pid_task(5)).

    psutil reads the parent of every process of the host instead, which takes tens of milliseconds between two
    blocks; this does so where the kernel has no such lists (CONFIG_PROC_CHILDREN).
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return process.children(recursive=True)
    found, parents = [], [process.pid]
    for pid in parents:
        for child in _children(pid):
            with suppress(psutil.Error):
                found.append(psutil.Process(child))
                parents.append(child)
    return found


def _children(pid: int) -> list[int]:
    """Children of all threads of a process; the list is empty if it has ended."""
    found = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (read_fact(thread / "children") or "").split()]
    return found


def started_by() -> psutil.Process:
    """The process that started this rank, or the rank that this process was forked from: torchrun."""
    own, parent = psutil.Process(), psutil.Process(os.getppid())
    forked = parent.cmdline() == own.cmdline()
    return (parent.parent() or parent) if forked else parent


def _starter() -> psutil.Process:
    """The process that started all ranks on this host: torchrun, or the parent of each virtual node's."""
    agent = started_by()
    parent = agent.parent()
    return parent if parent is not None and "harness.launch.nodes" in parent.cmdline() else agent
