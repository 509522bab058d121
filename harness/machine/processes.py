"""Processes: how one ended, in words, and a temporary folder that a killed process does not leave behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(prefix: str) -> Iterator[tuple[Path, int]]:
    """A folder that is removed when this block ends, and also when this process is killed.

    Yields it with a descriptor for processes that work in it: a second program waits until it is closed
    everywhere, and then removes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    watched, held = os.pipe()
    try:
        sweeper = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$1"', "sweeper", str(folder)],
            stdin=watched,
            # Ctrl-C in a terminal does not reach it.
            start_new_session=True,
        )
    except BaseException:
        # Also on Ctrl-C: without the sweeper, nothing else removes the folder.
        os.close(held)
        shutil.rmtree(folder)
        raise
    finally:
        os.close(watched)
    try:
        yield folder, held
    finally:
        os.close(held)
        sweeper.wait()


def exit_words(code: int) -> str:
    """How a process ended, by its return code: below zero a signal's number."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """A signal's name, such as SIGKILL; a number without one as it is."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
