"""The timer of `make perf-gate` (`pytest --benchmark-timer=cpu_time.cpu_s`)."""

from __future__ import annotations

import resource


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended, in seconds.

    What others do on the machine lengthens the time on the wall by whole multiples, and this one far less.
    """
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
