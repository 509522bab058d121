"""Watching one rank from inside: where it stands when it stops getting on."""

from __future__ import annotations

import faulthandler

MARGIN_S = 2.0
"""Before the supervisor ends a silent launch, its ranks have this long to say where they stand."""


class Vigil:
    """Prints every thread's stack to stderr when nothing has happened for too long.

    The wait is in C, beside Python: a rank that is stuck in a collective prints as well.
    """

    def __init__(self, silence_s: float) -> None:
        self._patience_s = max(silence_s - MARGIN_S, silence_s / 2)

    def progress(self) -> None:
        """Something has happened: begin to wait anew."""
        faulthandler.dump_traceback_later(self._patience_s, file=2)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
