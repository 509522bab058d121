"""The place of this process among the workers of a launch, by torchrun's variables, and its end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    rank: int
    local_rank: int
    node_rank: int
    gpus: int
    """Workers of the launch."""
    local_gpus: int
    """Workers of the launch on this node."""

    @classmethod
    def from_torchrun(cls) -> Rank:
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            node_rank=int(os.environ["GROUP_RANK"]),
            gpus=int(os.environ["WORLD_SIZE"]),
            local_gpus=int(os.environ["LOCAL_WORLD_SIZE"]),
        )


def leave_after(work: Callable[[], int | None]) -> NoReturn:
    """Do `work`, then end this process with the exit code that it returns (None: 0).

    Whatever it raises is printed, and the code is 1.

    torch holds groups for as long as the interpreter lives (as the defaults of functions that were imported
    after the default group was made, for one), and with them the threads of their backend. One that frees
    its last tensor when the interpreter has begun to end aborts the process: "terminate called without an
    active exception", and an exit code that has nothing to do with the work. Nor does a thread that waits
    for a rank which never comes hold up the end. Files must have been written and closed before.
    """
    try:
        code = work() or 0
    except BaseException:
        # SystemExit and KeyboardInterrupt too: no exception may reach the interpreter's own shutdown.
        traceback.print_exc()
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
