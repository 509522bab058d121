"""The output of a rank stays in bounds, and its watchdog shows where it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from harness.worker.rank import log as rank_log
from harness.worker.rank.log import KEPT_BYTES, MOST_BYTES, Watchdog, next_look_s

NOTE = re.compile(rb"--- (\d+) bytes were left out here ---\n")
PRINTS = """
import os, sys, time
from harness.worker.rank.log import MOST_BYTES, bound_output
bound_output()
print("--- run first", file=sys.stderr, flush=True)
print("the first words", file=sys.stderr, flush=True)
line = b"%07d " + b"x" * {width} + b"\\n"
size = 0
for number in range({lines}):
    size += os.write(2, line % number)
    if number == {lines} // 2:
        size += os.write(2, b"--- run second\\n")
    # A disk would have been filled before the other thread has looked once.
    while os.fstat(2).st_size > 2 * MOST_BYTES:
        time.sleep(0.01)
while os.fstat(2).st_size > MOST_BYTES:
    time.sleep(0.01)
os.write(2, b"the last words\\n")
print(size, flush=True)
os._exit(3)
"""


def printed(folder: Path, *, lines: int, width: int) -> tuple[bytes, int]:
    """Run such a process. Returns its stderr, a file as torchrun opens it, and how much it wrote."""
    with (folder / "stderr.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS.format(lines=lines, width=width)],
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert done.returncode == 3
    mine = len("--- run first\nthe first words\nthe last words\n")
    return (folder / "stderr.log").read_bytes(), int(done.stdout) + mine


def test_a_rank_that_prints_without_end_leaves_the_beginning_and_the_end(tmp_path) -> None:
    text, written = printed(tmp_path, lines=60_000, width=1000)
    assert len(text) <= MOST_BYTES + 2 * KEPT_BYTES
    head, left_out, tail = NOTE.split(text)
    assert head.startswith(b"--- run first\nthe first words\n0000000 ")
    assert tail.endswith(b"the last words\n")
    # The end is of the second run, though the line that said so is gone.
    assert tail.startswith(b"--- run second\n")
    numbers = [int(line[:7]) for line in tail.removeprefix(b"--- run second\n").splitlines()[:-1]]
    assert numbers[-1] == 60_000 - 1
    # The line that says which run it is was left out and is said again. What comes between the last look and
    # the cut is lost uncounted: as much as is printed while the thread that cuts waits for a core, in each of
    # some ten cuts.
    kept = len(head) + len(tail) - len("--- run second\n")
    lost = written - kept - int(left_out)
    assert 0 <= lost < written // 20
    # Nothing else is missing within the end that is kept, and nothing there is said twice.
    gaps = [after - before - 1 for before, after in pairwise(numbers)]
    assert min(gaps) >= 0
    assert sum(gaps) * len("0000000 " + 1000 * "x" + "\n") <= lost


def test_what_comes_after_the_last_look_for_more_is_kept(tmp_path, monkeypatch) -> None:
    """The line of a crash, between the read that found no more and the cut."""
    path, last = tmp_path / "stderr.log", b"SystemError: the end\n"
    path.write_bytes(b"head\nmiddle\ntail\n")
    size = path.stat().st_size
    read, crashes = os.pread, [last]

    with path.open("r+b", buffering=0) as file, path.open("ab", buffering=0) as log:

        def read_and_crash(*arguments: int) -> bytes:
            more = read(*arguments)
            if not more and crashes:
                log.write(crashes.pop())
            return more

        monkeypatch.setattr(os, "pread", read_and_crash)
        log.write(b"more\n")
        rank_log._Output._rewrite(file.fileno(), len(b"head\n"), b"tail\n", size)
    assert path.read_bytes() == b"head\ntail\nmore\n" + last


def test_a_process_that_prints_without_pause_is_cut_all_the_same(tmp_path, monkeypatch) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"head\nmiddle\ntail\n")
    size, read, prints = path.stat().st_size, os.pread, 0
    with path.open("r+b", buffering=0) as file, path.open("ab", buffering=0) as log:

        def print_more(*arguments: int) -> bytes:
            nonlocal prints
            prints += 1
            assert prints < 100, "the copy runs after the process that prints"
            log.write(b"more\n")
            return read(*arguments)

        monkeypatch.setattr(os, "pread", print_more)
        rank_log._Output._rewrite(file.fileno(), len(b"head\n"), b"tail\n", size)
    assert path.read_bytes() == b"head\ntail\n" + b"more\n" * prints


MARKS = """
import sys
from harness.worker.rank.log import mark_run
mark_run("a")
print("no end", end="")
print("an end", file=sys.stderr)
mark_run("b")
"""


def test_the_mark_of_a_run_is_a_line_of_its_own(tmp_path) -> None:
    out, errors = tmp_path / "stdout.log", tmp_path / "stderr.log"
    with out.open("w") as stdout, errors.open("w") as stderr:
        subprocess.run([sys.executable, "-c", MARKS], stdout=stdout, stderr=stderr, check=True)
    assert out.read_text() == "--- run a\nno end\n--- run b\n"
    assert errors.read_text() == "--- run a\nan end\n--- run b\n"


WAKES = """
import threading, time
from pathlib import Path
from harness.worker.rank.log import bound_output

bound_output()
[thread] = (each for each in threading.enumerate() if each.name == "bound-output")
time.sleep(2)
status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")))
"""


def test_a_rank_that_prints_nothing_is_woken_about_once_a_second(tmp_path) -> None:
    with (tmp_path / "stdout.log").open("w+") as stdout:
        subprocess.run([sys.executable, "-c", WAKES], stdout=stdout, check=True)
        stdout.seek(0)
        # Its start and what it waits for of the interpreter, beside two looks.
        assert int(stdout.read()) < 12


@pytest.mark.parametrize(
    ("grown", "look_s", "expected"),
    # A file that grows by 8 MiB in a fifth of a second; one that shrank; one that hardly grows, and a flood.
    [(MOST_BYTES, 0.2, 0.2), (-1, 1.0, 1.0), (1000, 1.0, 1.0), (1000 * MOST_BYTES, 1.0, 0.05)],
)
def test_a_file_is_looked_at_before_it_grows_by_its_bound(grown, look_s, expected) -> None:
    assert next_look_s(grown, look_s) == pytest.approx(expected)


@pytest.mark.parametrize("target", ["pipe", "null"])
def test_what_is_no_plain_file_is_left_alone(target) -> None:
    code = (
        "import threading, harness.worker.rank.log as log; log.bound_output();"
        "assert threading.active_count() == 1"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE if target == "pipe" else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


SILENCE_S = 1.2
"""Half of it, 0.6 s, is a rank's patience: the margin of 2 s is more than there is."""


@contextmanager
def _watchdog(times: list[float]) -> Iterator[Watchdog]:
    watchdog = Watchdog(SILENCE_S, lambda: times.append(time.monotonic()))
    try:
        yield watchdog
    finally:
        watchdog.end()


def _wait_for(times: list[float], count: int) -> None:
    end = time.monotonic() + 20
    while len(times) < count and time.monotonic() < end:
        time.sleep(0.01)
    assert len(times) >= count


@contextmanager
def _stderr(folder: Path) -> Iterator[Path]:
    """Yield the file that stderr goes to. `capfd` empties its file while a thread may write to it."""
    path, kept = folder / "stderr", os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_a_silence_is_recorded_after_the_last_progress_and_so_is_the_next(tmp_path) -> None:
    times: list[float] = []
    with _stderr(tmp_path) as stderr, _watchdog(times) as watchdog:
        last = time.monotonic()
        for _ in range(12):
            time.sleep(0.1)
            # On a busy machine this rank may make no progress for as long.
            assert all(then - last >= 0.59 for then in times)
            times.clear()
            last = time.monotonic()
            watchdog.progress()
        _wait_for(times, 1)
        assert times[0] - last >= 0.59
        # A thread of faulthandler writes the stacks, and may not have ended when the record is called.
        end = time.monotonic() + 20
        while "in test_a_silence_is_recorded" not in stderr.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert "in test_a_silence_is_recorded" in stderr.read_text()
        _wait_for(times, 2)
        assert times[1] - times[0] >= 0.59


def test_an_ended_watchdog_records_nothing_and_leaves_no_thread(tmp_path) -> None:
    times: list[float] = []
    with _stderr(tmp_path) as stderr:
        with _watchdog(times) as watchdog:
            watchdog.progress()
        time.sleep(0.9)
    assert times == []
    assert stderr.read_text() == ""
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize(("silence_s", "patience_s"), [(900, 890), (30, 20), (20, 10), (10, 5), (1, 0.5)])
def test_ranks_speak_before_the_supervisor_loses_patience(silence_s, patience_s) -> None:
    assert Watchdog(silence_s)._patience_s == patience_s
