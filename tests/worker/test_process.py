"""The process of a rank: runs in processes forked from it, and its end, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RANK = """
import atexit
import threading
from harness.worker.rank.rank import leave_after

atexit.register(print, "the interpreter's farewell")

def work():
    threading.Thread(target=threading.Event().wait).start()
    print("kept in the buffer of a pipe")
    {end}

leave_after(work)
"""


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("return 0", 0, ""),
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("raise ValueError('a full disk')", 1, "ValueError: a full disk"),
        ("raise SystemExit(0)", 1, "SystemExit: 0"),
    ],
)
def test_a_rank_leaves_at_once_with_its_code_and_its_words(end, code, last) -> None:
    # Its thread waits for ever, and would hold up an end by `sys.exit`.
    done = subprocess.run([sys.executable, "-c", RANK.format(end=end)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "kept in the buffer of a pipe\n"), done.stderr
    assert (done.stderr.splitlines() or [""])[-1] == last


def test_a_worker_that_cannot_begin_says_why_and_leaves_with_1(tmp_path) -> None:
    """Under a process that passes for its torchrun."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit\natexit.register(print, 'the interpreter had its farewell')\n"
    )
    start = f"{sys.executable} -m harness.worker missing.json; exit $?"
    rank = dict.fromkeys(("RANK", "GROUP_RANK", "LOCAL_RANK"), "0")
    sizes = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        ["bash", "-c", start, "torchrun"],
        capture_output=True,
        text=True,
        env={**os.environ, **rank, **sizes, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "missing.json" in done.stderr.splitlines()[-1]


SCRIPT = """
import os, sys, threading
from harness.worker.rank.process import STOPPED, fork_obstacle, run_of_this_process
from harness.worker.rank.usage import _starter

def codes(*asked):
    mine = run_of_this_process(range(len(asked)))
    if os.getpid() != rank:
        print("child", mine, flush=True)
        # Else the other ranks would be foreign to it.
        assert _starter().pid == starter
        if asked[mine] < 0:
            os.kill(os.getpid(), -asked[mine])
        os._exit(asked[mine])
    print("rank", mine, flush=True)

rank, starter = os.getpid(), os.getppid()
print(fork_obstacle())
codes(0, 0)
codes(0, STOPPED, 0)
codes(7, 0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(fork_obstacle(), flush=True)
codes(-9, 0)
"""


def test_a_rank_ends_as_the_first_child_that_does_not_end_well() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "None",
        *("child 0", "child 1", "rank 0"),
        # What has ended a launch early is no failure of its ranks.
        *("child 0", "child 1", "rank 0"),
        *("child 0", "rank 7"),
        "it has 2 threads before the first run: user code starts them when it is imported",
        "child 0",
    ]
    assert done.returncode == -9, done.stderr
