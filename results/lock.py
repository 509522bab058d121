"""One process at a time plans and runs in a study."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from results import files
from results.errors import StoreError, StudyBusyError

LOCK = ".lock"
"""The file in a study's folder that is locked while a process works on it."""


@contextmanager
def study_lock(root: Path) -> Iterator[int]:
    """Hold the study's lock; yields its descriptor.

    A child that inherits the descriptor keeps the lock alive if this process is killed, so that no
    second process starts beside workers that still run. Raises StudyBusyError.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = files.no_follow(str(root / LOCK), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if (root / LOCK).is_symlink():
            raise StoreError(f"{root / LOCK} is a link, which bench did not make: remove it") from error
        raise StoreError(
            f"cannot write in {root}: {error.strerror}; choose a folder that you may write with --out"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError(f"{root / LOCK} is not a regular file, and bench did not make it: remove it")
        _acquire(descriptor, root)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
        raise StudyBusyError(
            f"{root} is in use by another bench (process {holder}), or by workers it left behind; "
            f"wait for it or stop it, then run the same command again"
        ) from error
    except OSError as error:
        raise StoreError(
            f"the file system of {root} has no locks ({error.strerror}; Lustre has them when mounted with "
            f"flock): choose another one with --out"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
