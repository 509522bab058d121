"""A command whose processes all end with it, and with this process: started below a guardian."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from harness.launch import guardian

GRACE_S = 10.0
"""Seconds between asking a command to end and killing it."""
PATIENCE_S = guardian.STRAYS_S + guardian.KILL_S + 5.0
"""Seconds for a guardian to end everything after that; then it is taken for a guardian that cannot."""
_GUARDIAN = (sys.executable, "-I", "-S", str(Path(guardian.__file__)))


class Guarded:
    """One running command below a guardian (`harness.launch.guardian`).

    When no process of the command is left, the guardian ends with the command's exit code or signal. If the
    guardian is killed, the kernel kills the command, and then, if the command is torchrun, its ranks. The
    kernel does not kill the processes that a rank has forked.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        grace_s: float | None = None,
    ) -> None:
        """`log` takes stdout and stderr (None: they stay this process's); `descriptors` are passed on.

        A command that is asked to end is killed after `grace_s`, GRACE_S if it is None.
        """
        self._grace_s = GRACE_S if grace_s is None else grace_s
        watched, self._held = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*_GUARDIAN, str(watched), str(self._grace_s), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env=environment,
                # Ctrl-C in a terminal reaches this process alone, which then ends the workers.
                start_new_session=True,
                pass_fds=(watched, *descriptors),
            )
        except BaseException:
            # Also on Ctrl-C: only this object holds the descriptor, so nothing else would close it.
            os.close(self._held)
            raise
        finally:
            os.close(watched)

    def poll(self) -> int | None:
        """The command's exit code, negative for a signal; None while a process is left."""
        return self.process.poll()

    def end(self) -> int:
        """Have the command ended, if it still runs, and all of its processes. Returns its exit code."""
        if self.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(self._grace_s + PATIENCE_S)
        except subprocess.TimeoutExpired:
            # A stopped guardian: the kernel ends its processes with it.
            self.process.kill()
            code = self.process.wait()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        return code
