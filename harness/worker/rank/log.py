"""A rank's log: one JSON object a line, for people with `jq` and for the supervisor, which follows it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from harness.worker.rank.watchdog import Watchdog
from results.files import FULL, no_follow
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
        """Say that work goes on, at most every few seconds; on a full disk by the time of the file alone."""
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
