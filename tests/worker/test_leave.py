"""The end of a rank, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

HELD = """
import atexit
import threading
from harness.worker.leave import leave

atexit.register(print, "the interpreter's farewell")
threading.Thread(target=threading.Event().wait).start()
print("kept in the buffer of a pipe")
leave({code})
"""


def test_a_rank_leaves_at_once_with_its_code_and_its_words() -> None:
    # A thread that waits for ever would hold up an end by `sys.exit`.
    for code in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", HELD.format(code=code)], capture_output=True, text=True, timeout=20
        )
        assert (done.returncode, done.stdout) == (code, "kept in the buffer of a pipe\n"), done.stderr
