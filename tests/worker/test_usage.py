"""Memory and CPU as the kernel counts them: planted amounts are seen."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from harness.worker.rank.usage import (
    ForeignCpu,
    available_bytes,
    descendants,
    reset_rss_peak,
    rss_bytes,
    rss_peak_bytes,
)

MB = 10**6
TICKS_S = 0.05
"""The kernel counts busy time in ticks of 10 ms; a few of them may fall on the other side of a moment."""


def _plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   500 kB\n"}, 512_000),
        (
            # Of a job's step without a limit, the job around it.
            {
                "proc/meminfo": "MemAvailable: 500 kB\n",
                "proc/self/cgroup": "0::/job/step\n",
                "cgroup/job/step/memory.max": "max\n",
                "cgroup/job/step/memory.current": "100\n",
                "cgroup/job/memory.max": "1000\n",
                "cgroup/job/memory.current": "700\n",
                "cgroup/job/memory.stat": "anon 400\ninactive_file 250\n",
            },
            550,
        ),
        (
            # Of a container, whose group is mounted as the root.
            {
                "proc/self/cgroup": "0::/outside\n",
                "cgroup/memory.max": "1000\n",
                "cgroup/memory.current": "900\n",
            },
            100,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,memory:/job\n4:pids:/job\n",
                "cgroup/memory/job/memory.limit_in_bytes": "1000\n",
                "cgroup/memory/job/memory.usage_in_bytes": "800\n",
                "cgroup/memory/job/memory.stat": "total_inactive_file 50\n",
            },
            250,
        ),
    ],
)
def test_memory_is_left_as_far_as_the_host_and_every_group_allow(tmp_path, files, expected) -> None:
    _plant(tmp_path, files)
    assert available_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup") == expected


WATCH = """
import time
from harness.worker.rank.usage import ForeignCpu

foreign = ForeignCpu({cores})
time.sleep({seconds})
print(foreign.cores_used())
"""


def watch_cpu(cores: list[int], seconds: float) -> float:
    """Measure what others use of the cores while a rank sleeps; a separate process starts this rank.

    Other ranks of the same starter would not count as foreign.
    """
    watch = shlex.join([sys.executable, "-c", WATCH.format(cores=cores, seconds=seconds)])
    # Something comes after it, so that the shell stays what started it.
    done = subprocess.run(["bash", "-c", f"{watch}; exit $?"], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.fixture
def busy_core() -> Iterator[int]:
    """A core on which a separate process spins, which the ranks' parent did not start."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); print('spinning', flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "spinning\n"
    yield core
    process.kill()
    process.communicate()


def test_a_busy_process_of_somebody_else_is_seen(busy_core) -> None:
    # All of the core: the spinner's share, and what other programs on it have.
    assert 1.0 - 2 * TICKS_S < watch_cpu([busy_core], 1.0) <= 1.0 + TICKS_S


def test_the_kernels_lists_of_children_name_all_descendants() -> None:
    # A shell that waits for another one, which has two children.
    shell = subprocess.Popen(
        ["bash", "-c", "bash -c 'sleep 60 & sleep 60 & echo; wait'; true"], stdout=subprocess.PIPE
    )
    shell.stdout.readline()
    found = {process.pid for process in psutil.Process(shell.pid).children(recursive=True)}
    assert len(found) == 3
    assert {process.pid for process in descendants(psutil.Process(shell.pid))} == found
    for pid in (shell.pid, *found):
        os.kill(pid, signal.SIGKILL)
    shell.communicate()


def test_no_cores_have_no_foreign_use() -> None:
    assert watch_cpu([], 0.05) == 0.0


def spin(rank: int, core: int, seconds: float) -> tuple[float, float]:
    """On a rank: foreign use of the core on which it spins itself, and its own CPU time over wall time."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    foreign, began, cpu = ForeignCpu([core]), time.monotonic(), time.process_time()
    while time.monotonic() < began + seconds:
        pass
    own = (time.process_time() - cpu) / (time.monotonic() - began)
    used = foreign.cores_used()
    os.sched_setaffinity(0, before)
    return used, own


def test_a_ranks_own_work_is_not_foreign(ranks) -> None:
    core = min(os.sched_getaffinity(0))
    [(used, own)] = ranks(1, spin, core, 1.0)
    assert own > 0.1
    # A core has one second of CPU time in a second: what the rank had, nobody else can have had.
    assert used <= 1.0 - own + TICKS_S


def allocate(rank: int) -> dict[str, int] | None:
    """On a rank: its peak over what it held before, after 100 MB, after their end, after a reset."""
    if not reset_rss_peak():
        return None
    before = rss_bytes()
    found = {"reset": rss_peak_bytes() - before}
    block = torch.ones(100 * MB, dtype=torch.uint8)
    found["held"] = rss_bytes() - before
    del block
    found["freed"] = rss_bytes() - before
    found["peak"] = rss_peak_bytes() - before
    assert reset_rss_peak()
    found["after another reset"] = rss_peak_bytes() - before
    return found


def test_a_peak_of_memory_is_seen_and_can_be_reset(ranks) -> None:
    [found] = ranks(1, allocate)
    if found is None:
        pytest.skip("this kernel does not reset peaks")
    # The kernel counts pages per thread and adds them up now and then: off by some hundred KiB.
    slack = 10 * MB
    assert found["reset"] == pytest.approx(0, abs=slack)
    assert found["held"] == pytest.approx(100 * MB, abs=slack)
    assert found["freed"] == pytest.approx(0, abs=slack)
    assert found["peak"] == pytest.approx(100 * MB, abs=slack)
    assert found["after another reset"] == pytest.approx(0, abs=slack)


def test_resident_memory_is_the_kernels_figure_in_bytes() -> None:
    # A Python process with torch holds more than 50 MB and less than the machine has.
    assert 50 * MB < rss_bytes() < psutil.virtual_memory().total
    assert rss_peak_bytes() > 50 * MB
