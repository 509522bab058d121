"""A run that takes turns with a run of another process, as the driver of a paired comparison says.

Each rank has a separate connection to the driver's Unix socket, whose path is in `VARIABLE`. The rank sends
a line of JSON that says where it is, and waits in a read of the answer: `{"steps": N}`, time a block of N
steps, or `{"steps": 0}`, continue the run. Where both sides say that they know it, the first answer
may also hold `"only_timed": true`: the run is wanted for its blocks, warms up for a few steps, and leaves out
what comes after them. A rank that waits uses no CPU and is in no collective. A run's turn ends when its ranks
report again, or close the connection, as the kernel does for a rank that dies.

Line by line, of one run:

============ ============================================== ==================================
`at`         other keys                                     the answer lets the rank
============ ============================================== ==================================
`begin`      `protocol`, `cell`, `run`, `rank`, `gpus`,     build, prove and warm up
             `cores`, `repeat`, `forked`, `only_timed`
`measure`    `step_ns`: of the warm-up's last block         time a block, or end the run
`block`      `ns`, `steps`: of the block                    time a block, or end the run
============ ============================================== ==================================

Imported by the driver too, so without torch.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

PROTOCOL = 1
"""Both sides of a comparison must have the same."""
FORKS = True
"""Whether `bench matrix --isolation fork` runs each run of a launch in a separate process."""
VARIABLE = "BENCH_TURNS"
BEAT_S = 2.0
"""Seconds between two calls of `beat` while a rank waits."""


class Turns:
    """One rank's side of one run's turns."""

    def __init__(self, path: str, beat: Callable[[], None]) -> None:
        """`beat` is called while the rank waits, so that its log grows and nobody takes it for hung."""
        self._beat = beat
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.settimeout(BEAT_S)
        self._received = b""
        self.only_timed = False
        """Whether the driver wants only the timed blocks of this run."""

    @classmethod
    def of_driver(cls, beat: Callable[[], None]) -> Turns | None:
        """The turns of the driver that started this process; None if no driver started it."""
        path = os.environ.get(VARIABLE)
        return None if path is None else cls(path, beat)

    def wait(self, at: str, **told: object) -> int:
        """Say where this rank is, and wait for its turn. Returns the steps of the block to time; 0: go on.

        Raises ConnectionError if the driver has ended.
        """
        self._socket.sendall(json.dumps({"at": at, **told}).encode() + b"\n")
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                self._beat()
                continue
            if not data:
                raise ConnectionError("the driver of the paired comparison has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        self.only_timed |= answer.get("only_timed", False)
        return int(answer["steps"])

    def close(self) -> None:
        self._socket.close()
