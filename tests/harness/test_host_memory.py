"""How many processes the kernel has ended because memory ran out: from recorded files, and really."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.launch.ending import out_of_memory_kills, print_kills, printed_kills
from slurm.notices import OUT_OF_MEMORY_KILLS

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\nhigh 0\nmax 17\noom 5\noom_kill 4\noom_group_kill 0\n"
VMSTAT = "nr_free_pages 815033\noom_kill 9\nnuma_hit 1\n"
GROUPS_V1 = "9:name=systemd:/\n4:cpu,memory:/jobs/one\n0::/jobs/one\n"
GROUPS_V2 = "0::/jobs/one\n"


@pytest.fixture
def kills(tmp_path) -> Callable[..., int | None]:
    """Count the kills on a host with these files, by their paths."""

    def count(**files: str) -> int | None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return out_of_memory_kills(proc=tmp_path / "proc", cgroups=tmp_path / "groups")

    return count


def test_the_own_group_counts_whichever_the_version(kills) -> None:
    assert kills(proc__vmstat=VMSTAT, proc__self__cgroup=GROUPS_V2) == 9
    assert kills(groups__jobs__one__memory_dot_events=V2) == 4
    # Where both are mounted, the line of the memory controller comes first.
    assert kills(proc__self__cgroup=GROUPS_V1) == 4
    assert kills(groups__memory__jobs__one__memory_dot_oom_control=V1) == 3


def test_in_a_container_the_own_group_is_the_root(kills) -> None:
    files = {"proc__vmstat": VMSTAT, "groups__memory__memory_dot_oom_control": V1}
    assert kills(proc__self__cgroup=GROUPS_V1, **files) == 3


def test_old_kernels_that_do_not_count_by_group_count_by_host(kills) -> None:
    without = "oom_kill_disable 0\nunder_oom 0\n"
    files = {"proc__self__cgroup": GROUPS_V1, "groups__memory__jobs__one__memory_dot_oom_control": without}
    assert kills(**files) is None
    assert kills(proc__vmstat=VMSTAT) == 9


def test_where_nothing_tells_nothing_is_known(kills) -> None:
    assert kills() is None


def test_agents_of_other_hosts_tell_in_their_logs(tmp_path) -> None:
    assert printed_kills(tmp_path) is None
    logs = [tmp_path / "agent-0.log", tmp_path / "agent-1.log"]
    logs[0].write_text("[W] something\nout-of-memory kills on this host: 2\n")
    logs[1].write_text("no word\n")
    assert printed_kills(tmp_path) == 2
    logs[1].write_text("out-of-memory kills on this host: 10\n")
    assert printed_kills(tmp_path) == 12
    # As slurmstepd writes it where Slurm confines jobs.
    logs[1].write_text("slurmstepd-n1: error: Detected 3 oom_kill events in StepId=17.0.\n")
    assert (printed_kills(tmp_path), printed_kills(tmp_path, OUT_OF_MEMORY_KILLS)) == (2, 5)


HOG = "hog = bytearray(256 * 2**20)"
COUNT = f"""
import subprocess, sys
from harness.launch.ending import out_of_memory_kills
before = out_of_memory_kills()
code = subprocess.run([sys.executable, "-c", {HOG!r}]).returncode
print(code, out_of_memory_kills() - before)
"""


def test_a_process_that_the_kernel_really_ends_is_counted(memory_group) -> None:
    done = subprocess.run(
        [*memory_group(128 * 2**20), sys.executable, "-c", COUNT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["-9", "1"], done.stderr


def test_what_an_agent_tells_is_what_is_read(tmp_path, capsys) -> None:
    log = tmp_path / "agent-1.log"
    print_kills(0)
    assert capsys.readouterr().out == ""
    print_kills(2)
    log.write_text(f"words\n{capsys.readouterr().out}more\n")
    assert printed_kills(tmp_path) == 2
