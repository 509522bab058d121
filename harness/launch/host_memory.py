"""How many processes the kernel's out-of-memory killer has ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_TOLD = re.compile(r"out-of-memory kills on this host: (?P<kills>\d+)")
"""What an agent prints."""


def out_of_memory_kills(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Out-of-memory kills in this process's control group, or, if it has no such counter, on the host.

    They are counted since the group was made, or since the host started: use the difference over a launch.
    None if the kernel has no such counter. Sources: cgroup-v2.rst, memory.events (with the groups below);
    cgroup-v1/memory.rst, memory.oom_control (this group alone); /proc/vmstat.
    """
    counted = (_count(path) for path in (*_of_own_group(proc, cgroups), proc / "vmstat"))
    return next((kills for kills in counted if kills is not None), None)


def tell_kills(kills: int) -> None:
    """Print, for the log of a launch, what `kills_told` reads; nothing if there were none."""
    if kills:
        print(f"out-of-memory kills on this host: {kills}", flush=True)


def kills_told(logs: Sequence[Path], scheduler: re.Pattern[str] | None = None) -> int | None:
    """The sum of the kills that agents print in the logs of a launch; None if none is printed.

    `scheduler` matches a scheduler's own message about such kills, with the group `kills` (`LogWords`).
    """
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    ways = [_TOLD, *([] if scheduler is None else [scheduler])]
    told = [int(found["kills"]) for text in texts for way in ways for found in way.finditer(text)]
    return sum(told) if told else None


def _of_own_group(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The files that may count, the best first."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _below(cgroups / "memory", path, "memory.oom_control")
        elif not controllers:
            yield from _below(cgroups, path, "memory.events")


def _below(root: Path, path: str, name: str) -> Iterator[Path]:
    yield root / path.lstrip("/") / name
    # In a container the group's own folder is often mounted as the root.
    yield root / name


def _count(path: Path) -> int | None:
    found = _KILLS.search(_text(path))
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
