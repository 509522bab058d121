"""Watching one rank from inside: where it stands when it stops getting on."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable

MARGIN_S = 10.0
"""Before the supervisor ends a silent launch, its ranks have this long to say where they stand."""


class Watchdog:
    """Has a rank say where it stands when nothing has happened for too long.

    Every thread's stack goes to stderr: that wait is in C, beside Python, so that a rank prints whatever it
    is stuck in. `record` is called by a thread that sleeps until then, so that a measured step pays for
    neither; it is called again with every further silence of that length, and must not raise.
    """

    def __init__(self, silence_s: float, record: Callable[[], None] | None = None) -> None:
        self._patience_s = max(silence_s - MARGIN_S, silence_s / 2)
        self._due = time.monotonic() + self._patience_s
        self._over = threading.Event()
        if record is not None:
            threading.Thread(target=self._keep, args=(record,), name="watchdog", daemon=True).start()

    def progress(self) -> None:
        """Something has happened: begin to wait anew."""
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
