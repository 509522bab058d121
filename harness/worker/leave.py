"""The end of a process that has had a process group: at once, without the interpreter's own farewell."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with `code`; what was printed is written first, and what it was to keep must be.

    torch holds groups for as long as the interpreter lives (as the defaults of functions that were imported
    after the default group was made, for one), and with them the threads of their backend. One that frees
    its last tensor when the interpreter has begun to end aborts the process: "terminate called without an
    active exception", and an exit code that has nothing to do with the work. Nor does a thread that waits
    for a rank which never comes hold up the end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
