"""One side's run as the driver of a comparison sees it: the sockets of its ranks (`harness.worker.turns`)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from results.errors import MachineError, UsageError

POLL_S = 0.5
"""Seconds between two looks at whether the side's processes still live."""
MOST_RANKS = 1024
BLOCK_ALONE = 5
"""Steps of the block of a run that lacks a counterpart."""

Told = dict[str, Any]
"""One report of a rank."""


class LostError(Exception):
    """A rank has ended in the middle of its run."""


class _Rank:
    """The connection of one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.at = ""
        """The place at which the rank waits; empty while it runs."""

    def told(self) -> Told:
        """Read its next report. Raises LostError if it has ended."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise LostError
        told: Told = json.loads(line)
        self.at = told["at"]
        return told

    def answer(self, steps: int, *, only_timed: bool = False) -> None:
        self.at = ""
        told = {"steps": steps} | ({"only_timed": True} if only_timed else {})
        # The end of a rank is noticed where its next line is read.
        with suppress(ConnectionError):
            self._connection.sendall(json.dumps(told).encode() + b"\n")

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


class Seat:
    """The socket at which the runs of one side take their turns, one after another."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if there can be no socket of this path."""
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            raise UsageError(
                f"{path} cannot be a socket ({error}): set TMPDIR to a local folder with a short name, such "
                f"as /tmp"
            ) from error
        self._listener.listen(MOST_RANKS)
        self._listener.settimeout(POLL_S)
        self._ranks: dict[int, _Rank] = {}

    def next_run(self, exit_code: Callable[[], int | None]) -> Told | None:
        """Wait for all ranks of the next run. Returns the report of rank 0; None after the last run.

        `exit_code` returns the exit code of the side's processes, None while one lives.
        """
        first = Told()
        self._leave()
        while not self._ranks or len(self._ranks) < first["gpus"]:
            # Asked before `accept`, so that a rank that connected just before the end is still accepted.
            ended = exit_code() is not None
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if ended:
                    return None
                continue
            connection.settimeout(None)
            rank = _Rank(connection)
            try:
                told = rank.told()
            except LostError:
                rank.close()
                continue
            if told["run"] != first.get("run"):
                # A run whose ranks did not all come to its beginning is over.
                self._leave()
            if told["run"] != first.get("run") or told["rank"] == 0:
                first = told
            self._ranks[told["rank"]] = rank
        return first

    def go(self, steps: int = 0, *, only_timed: bool = False) -> list[Told]:
        """Give the run its turn, and wait until all ranks have reported again.

        With `only_timed`, at the first turn of a run, the run leaves out the work after its timed blocks.
        Returns the reports by rank. Raises LostError if a rank has ended.
        """
        for rank in self._ranks.values():
            rank.answer(steps, only_timed=only_timed)
        told = [self._ranks[number].told() for number in sorted(self._ranks)]
        places = {one["at"] for one in told}
        if len(places) > 1:
            raise MachineError(f"ranks of one run report from different places: {', '.join(sorted(places))}")
        return told

    def end(self) -> None:
        """Let the run complete, and wait until its ranks have left.

        A run that has not been measured, because the other side lacks a run to pair with it, times one block.
        """
        while self._ranks:
            for rank in self._ranks.values():
                if rank.at:
                    rank.answer(BLOCK_ALONE if rank.at == "measure" else 0)
            for number, rank in list(self._ranks.items()):
                try:
                    rank.told()
                except LostError:
                    rank.close()
                    del self._ranks[number]

    def close(self) -> None:
        self._leave()
        self._listener.close()

    def _leave(self) -> None:
        for rank in self._ranks.values():
            rank.close()
        self._ranks = {}
