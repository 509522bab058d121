"""Runs in processes forked from a rank."""

from __future__ import annotations

import subprocess
import sys

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
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
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
