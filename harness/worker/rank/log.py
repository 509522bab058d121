"""Everything that a rank writes: its log, its stacks when it makes no progress, and its output.

The log has one JSON object a line, for people with `jq` and for the supervisor, which follows it. When the
log has not grown for too long, a watchdog inside the rank prints where the rank is stuck.

torchrun gives each rank a file for stdout and one for stderr, and a model that prints in each step would fill
the disk. The words before a crash matter most, and must be in the file however the process ends. So output is
never buffered: a thread looks at the sizes of the files while the rank prints, and cuts the middle out of a
file that is too long, so that its beginning and its end remain.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

from results.files import FULL, no_follow
from results.launch import RUN_MARK
from results.store import utc_now

HEARTBEAT_S = 5.0


class RankLog:
    """Appends to one rank's file; every line is flushed, so that a killed rank's last words stay."""

    def __init__(self, path: Path, rank: int, watchdog: Watchdog) -> None:
        self._file = open(path, "a", encoding="utf-8", opener=no_follow)
        self._watchdog = watchdog
        self._rank = rank
        self._last = 0.0

    def event(self, name: str, **fields: object) -> None:
        """Write one line: `at`, `rank`, `event` and the fields."""
        line = {"at": utc_now(), "rank": self._rank, "event": name, **fields}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._watchdog.progress()
        self._last = time.monotonic()

    def heartbeat(self, **fields: object) -> None:
        """Say that the rank works, at most every few seconds; on a full disk only by the time of the file."""
        if time.monotonic() - self._last > HEARTBEAT_S:
            try:
                self.event("alive", **fields)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                os.utime(self._file.fileno())
                self._watchdog.progress()
                self._last = time.monotonic()

    def close(self) -> None:
        self._watchdog.end()
        self._file.close()


MARGIN_S = 10.0
"""Seconds in which the ranks of a silent launch print where they are stuck, before the supervisor ends it."""


class Watchdog:
    """Prints where a rank is stuck when nothing has happened for too long.

    Every thread's stack goes to stderr. The watchdog waits in C, outside of Python, so that a rank prints its
    stacks wherever it is stuck. A thread sleeps until then and calls `record`, so that a measured step takes
    no longer for either; it calls `record` again after every further silence of that length. `record` must
    not raise.
    """

    def __init__(self, silence_s: float, record: Callable[[], None] | None = None) -> None:
        self._patience_s = max(silence_s - MARGIN_S, silence_s / 2)
        self._due = time.monotonic() + self._patience_s
        self._over = threading.Event()
        if record is not None:
            threading.Thread(target=self._keep, args=(record,), name="watchdog", daemon=True).start()

    def progress(self) -> None:
        """Restart the wait, because something has happened."""
        faulthandler.dump_traceback_later(self._patience_s, file=2)
        self._due = time.monotonic() + self._patience_s

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._over.set()

    def _keep(self, record: Callable[[], None]) -> None:
        while not self._over.wait(max(self._due - time.monotonic(), 0)):
            # Progress moves the moment on and wakes nobody.
            if time.monotonic() >= self._due:
                record()
                self._due = time.monotonic() + self._patience_s


MOST_BYTES = 8 * 2**20
"""A file is cut when it is longer than this."""
KEPT_BYTES = 2 * 2**20
"""Bytes that are kept of its beginning, and of its end."""
LONGEST_LOOK_S, SHORTEST_LOOK_S = 1.0, 0.05
"""Seconds between two looks at the sizes. Each look wakes a thread, in timed steps too: files that hardly
grow are looked at once a second, so that a file may hold what is written in one second beyond its bound."""
_ROUNDS = 4


def bound_output() -> None:
    """Keep the files that stdout and stderr of this process write to in bounds from now on.

    Only plain files are cut; a terminal or a pipe is left as it is.
    """
    outputs = [_Output(each) for each in (1, 2) if stat.S_ISREG(os.fstat(each).st_mode)]
    if outputs:
        threading.Thread(target=_watch, args=(outputs,), name="bound-output", daemon=True).start()


def output_files(folder: Path) -> dict[str, str]:
    """The files in `folder` that this process prints to, as paths below it, by `stdout` and `stderr`."""
    found = {
        name: Path(f"/proc/self/fd/{number}").resolve() for number, name in ((1, "stdout"), (2, "stderr"))
    }
    root = folder.resolve()
    return {name: str(path.relative_to(root)) for name, path in found.items() if path.is_relative_to(root)}


def mark_run(run_id: str) -> None:
    """Print where the output of this run begins: `bench show` and `bench logs` print the lines after it."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        before = ""
        if stat.S_ISREG(os.fstat(number).st_mode):
            with Path(f"/proc/self/fd/{number}").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                # The run before it may have ended within a line.
                before = "" if file.read() in (b"", b"\n") else "\n"
        print(f"{before}{RUN_MARK}{run_id}", file=stream, flush=True)


def _watch(outputs: list[_Output]) -> None:
    pause, look_s = threading.Event(), LONGEST_LOOK_S
    while not pause.wait(look_s):
        grown = 0
        for output in outputs:
            # A file system that refuses: the file grows, and the run continues.
            with suppress(OSError):
                grown = max(grown, output.look())
        look_s = next_look_s(grown, look_s)


def next_look_s(grown_bytes: int, look_s: float) -> float:
    """When a file that grew by `grown_bytes` in `look_s` will have grown by `MOST_BYTES`, within limits."""
    fills_s = look_s * MOST_BYTES / grown_bytes if grown_bytes > 0 else LONGEST_LOOK_S
    return min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, fills_s))


class _Output:
    """One file that this process and its children write to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._head: int | None = None
        """The length of the beginning that is kept; None while nothing was cut."""
        self._size = 0
        """Bytes of the file at the last look."""
        self._left_out = 0
        self._mark = b""
        """The last run mark among the lines that were left out: it names the run of the next line."""
        self._noted = 0
        """Bytes of the note after the beginning, which says how much was left out."""
        # In append mode, writing continues at the new end when the file gets shorter; torchrun opens it in
        # another.
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)

    def look(self) -> int:
        """Cut the file if it is too long. Returns by how many bytes it has grown since the last look."""
        size = os.fstat(self._descriptor).st_size
        grown, self._size = size - self._size, size
        if size > MOST_BYTES:
            self._cut(size)
            self._size = os.fstat(self._descriptor).st_size
        return grown

    def _cut(self, size: int) -> None:
        """Take the middle out of the file, which has `size` bytes."""
        # Opened again, because a descriptor in append mode writes only at the end.
        with Path(f"/proc/self/fd/{self._descriptor}").open("r+b", buffering=0) as file:
            with mmap(file.fileno(), size, access=ACCESS_READ) as text:
                if self._head is None:
                    self._head = text.rfind(b"\n", 0, KEPT_BYTES) + 1 or KEPT_BYTES
                first = self._head + self._noted
                end = text.find(b"\n", size - KEPT_BYTES) + 1 or size - KEPT_BYTES
                mark = text.rfind(RUN_MARK.encode(), first, end)
                if mark >= 0:
                    self._mark = text[mark : text.find(b"\n", mark) + 1]
                tail = text[end:]
            self._left_out += end - first
            note = b"--- %d bytes were left out here ---\n" % self._left_out + self._mark
            self._rewrite(file.fileno(), self._head, note + tail, size)
            self._noted = len(note)

    @staticmethod
    def _rewrite(file: int, at: int, data: bytes, size: int) -> None:
        """Replace what lies between `at` and `size`, the file's end, by `data`.

        Text that is appended meanwhile is moved too, in `_ROUNDS` reads at most, because no copy catches up
        with a process that prints without pause. Text that is appended between the last look and the cut is
        lost: no system call does both, and the writing process is not blocked.
        """
        at += os.pwrite(file, data, at)
        for _ in range(_ROUNDS):
            more = os.pread(file, KEPT_BYTES, size)
            if not more and os.fstat(file).st_size <= size:
                break
            size += len(more)
            at += os.pwrite(file, more, at)
        os.ftruncate(file, at)
