"""`python guardian.py PIPE GRACE_S COMMAND...`: runs a command, and ends all of its processes.

The guardian is a process between the starter of a launch and the command that starts the workers. It is the
reaper of every process below it, so that it becomes the parent of a worker's daemon whose parent has ended.
PIPE is a descriptor whose other end the starter holds: it closes when the starter ends, by SIGKILL too. Then,
or when asked by SIGTERM, the guardian asks the command to end, and kills it after GRACE_S seconds. When the
command has ended, it kills every process that is left, and ends as the command did, by the same exit code or
signal.

Each launch waits for this program to start: it is run by its path, and does not import bench.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

STRAYS_S = 1.0
"""Seconds for processes that outlive the command to end by themselves, as Python's resource tracker does."""
KILL_S = 10.0
"""Seconds for killed processes to end; one that waits in the kernel for a disk or a device may not."""
POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Guardian:
    """One command, and all that it has started."""

    def __init__(self, pipe: int, grace_s: float, command: list[str]) -> None:
        """Start the command. The process must have one thread, and no children."""
        os.set_inheritable(pipe, False)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.asked: str | None = None
        """Why the command is to end; None: nobody has asked."""
        self.status: int | None = None
        """The status of the command, as waitpid(2) returns it; None while it runs."""
        self._childless = False
        self._pipe = pipe
        self._grace_s = grace_s
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        self._woken = woken
        # A signal that arrives before the command is started stays pending until the command can be ended.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._command = _start(command)
        for number in _SIGNALS:
            # A signal that nohup has set to be ignored stays ignored, by the command as well.
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(wakes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._events = select.poll()
        self._events.register(pipe, select.POLLIN)
        self._events.register(woken, select.POLLIN)

    def stay(self) -> int:
        """Wait until no process of the command is left. Returns its status, as waitpid(2) returns it."""
        self._wait(lambda: self.status is not None or self.asked is not None)
        if self.status is None:
            _tell(f"{self.asked}: the workers are asked to end")
            os.kill(self._command, signal.SIGTERM)
            self._wait(lambda: self.status is not None, self._grace_s)
        if self.status is not None:
            self._wait(lambda: self._childless, STRAYS_S)
        end = time.monotonic() + KILL_S
        while not self._childless and time.monotonic() < end:
            for pid in _children():
                try:
                    # Its children become children of this process, and are killed in the next round.
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    # The process has ended, or belongs to another user by now.
                    pass
            self._wait(lambda: self._childless, POLL_S)
        if not self._childless:
            _tell(f"these processes do not end: {' '.join(map(str, _children()))}")
        return signal.SIGKILL if self.status is None else self.status

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until the condition holds, for at most `seconds`; reap the children that have ended."""
        end = None if seconds is None else time.monotonic() + seconds
        self._reap()
        while not condition():
            left = None if end is None else (end - time.monotonic()) * 1000
            if left is not None and left <= 0:
                return
            for descriptor, _ in self._events.poll(left):
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                else:
                    # The pipe carries no data: this event means that its other end was closed.
                    self._events.unregister(self._pipe)
                    self.asked = self.asked or "its starter has ended"
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            if pid == 0:
                return
            if pid == self._command:
                self.status = status

    def _on_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD and self.asked is None:
            self.asked = f"asked by {signal.Signals(number).name}"


def _start(command: list[str]) -> int:
    """Start the command, which the kernel kills if this process is killed. Returns its process id."""
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The guardian may have been killed before the call of prctl.
        if os.getppid() == guardian:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                # Python ignores these signals, and the command would inherit that.
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.execvp(command[0], command)
    except OSError as error:
        _tell(f"cannot start {command[0]}, which starts the workers: {error.strerror}")
    finally:
        os._exit(127)


def _children() -> list[int]:
    """The direct children of this process, adopted orphans included (proc_pid_stat(5))."""
    found, own = [], str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", errors="replace") as file:
                    # The program's name is in brackets, and may contain anything.
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == own:
                found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _tell(words: str) -> None:
    """Print into the log of the launch."""
    print(f"guardian: {words}", flush=True)


def _end_alike(status: int) -> None:
    """End as the process with this status did."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    import resource

    # One core file is enough.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    _end_alike(Guardian(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).stay())
