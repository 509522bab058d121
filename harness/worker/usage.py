"""Memory and CPU of this rank and of its host, as the kernel counts them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

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
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return rss_bytes()


class ForeignCpu:
    """How much of some cores other processes used between two moments.

    Busy time of the cores from the kernel, steal by other virtual machines included, less the CPU time of
    this launch's own processes on the host that may use them.
    """

    def __init__(self, cores: Iterable[int]) -> None:
        self._cores = frozenset(cores)
        self._start = self._sample()

    def cores_used(self) -> float:
        """Foreign CPU time over wall time since the start, in cores; not less than 0."""
        wall, busy, own = (now - then for now, then in zip(self._sample(), self._start, strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0

    def _sample(self) -> tuple[float, float, float]:
        return time.monotonic(), _busy_s(self._cores), _own_s(self._cores)


def _busy_s(cores: frozenset[int]) -> float:
    total = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
            total += user + nice + system + irq + softirq + steal
    return total * _TICK_S


def _own_s(cores: frozenset[int]) -> float:
    starter = _starter()
    total = 0.0
    for process in [starter, *starter.children(recursive=True)]:
        try:
            times, allowed = process.cpu_times(), process.cpu_affinity()
        except psutil.Error:
            continue
        if cores.intersection(allowed):
            total += times.user + times.system
    return total


def _starter() -> psutil.Process:
    """What started all ranks on this host: torchrun, or what started one torchrun for each virtual node."""
    agent = psutil.Process(os.getppid())
    parent = agent.parent()
    return parent if parent is not None and "harness.launch.nodes" in parent.cmdline() else agent
