"""A rank that makes no progress says where it stands, and one that does says nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.worker.rank.log import Watchdog

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
    """What this process writes to its stderr. `capfd` empties its file while a thread may write to it."""
    path, kept = folder / "stderr", os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_a_silence_is_recorded_after_the_last_progress_and_so_is_the_next(tmp_path: Path) -> None:
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


def test_an_ended_watchdog_records_nothing_and_leaves_no_thread(tmp_path: Path) -> None:
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
def test_ranks_speak_before_the_supervisor_loses_patience(silence_s: float, patience_s: float) -> None:
    assert Watchdog(silence_s)._patience_s == patience_s
