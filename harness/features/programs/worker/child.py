"""A program as a child process of a rank's worker, with what its shim and its output contain so far."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from harness.launch.follow import LogTail
from harness.machine.code import checkout
from harness.machine.kernel import die_with_parent

SHIM = Path(__file__).resolve().with_name("shim.py")
GRACE_S = 15.0
"""Seconds that a program has to leave after its last step."""
TERM_S = 5.0
"""Seconds that it then has after SIGTERM."""
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
_NOT_OURS = ("PYTHONSAFEPATH", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")
"""Variables of the worker's process that are not the program's."""


class LogLine(NamedTuple):
    """One line of the program's output that its pattern matches."""

    at_ns: int
    """When the line came, by the clock of the steps."""
    seen: int
    """The steps that had been seen then."""
    step: int
    """The program's own count; `seen` for a line without a count."""
    loss: float | None


class Child:
    """One program of one rank. It is ended when the context is left, however that comes about."""

    def __init__(
        self,
        interpreter: Sequence[str],
        control: Mapping[str, Any],
        *,
        folder: Path,
        cwd: Path,
        environment: Mapping[str, str],
        pattern: re.Pattern[str] | None,
    ) -> None:
        """`control` is what the shim reads, without the places of its files, which are in `folder`."""
        self.port = environment["MASTER_PORT"]
        """The port at which the ranks of the program meet."""
        out, self._stop = folder / "steps.jsonl", folder / "stop"
        self._out = LogTail(out)
        self._pattern, self._has_steps = pattern, control["steps"] != "none"
        self._tail: deque[str] = deque(maxlen=40)
        self._found: deque[tuple[int, re.Match[str]]] = deque()
        """The matches of the pattern in the output, each with the time at which it came."""
        self.begin: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.waits: dict[str, Any] = {}
        self.notes: list[str] = []
        self.refused: str | None = None
        self.columns: dict[str, list[Any]] = {name: [] for name in ("end_ns", "wait_ns", "loss", "samples")}
        self.device_ns: list[int] = []
        self.printed = 0
        """Bytes of output so far."""
        told = {**control, "out": str(out), "stop": str(self._stop), "flush_s": 0.1}
        path = folder / "control.json"
        path.write_text(json.dumps(told), encoding="utf-8")
        self.started_ns = time.perf_counter_ns()
        self.process = subprocess.Popen(
            [*interpreter, str(SHIM), str(path)],
            cwd=cwd,
            env={**own_environment(os.environ), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._pass_on, name="program-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill(signal.SIGKILL)
        self.process.wait()
        self._reader.join(TERM_S)

    def stop_after(self, step: int) -> None:
        """Have the program leave at the end of this step."""
        written = self._stop.with_suffix(".new")
        written.write_text(str(step), encoding="ascii")
        written.rename(self._stop)

    def leave(self, seconds: float, *, meanwhile: Callable[[], None]) -> bool:
        """Wait for the program to leave, and end it if it does not. Returns whether it left by itself.

        Calls `meanwhile` each second.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(min(left, 1.0))
                return True
            meanwhile()
        self.end_now()
        return False

    def end_now(self) -> None:
        """End the program by SIGTERM, and by SIGKILL if it catches that."""
        self._kill(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(TERM_S)

    def read(self) -> None:
        """Read what the shim has written since the last call."""
        while lines := self._out.lines():
            for line in lines:
                # Python writes a loss that is no number as NaN, which other readers refuse.
                self._take(json.loads(line.data))

    def _take(self, told: dict[str, Any]) -> None:
        for name, value in told.items():
            if name == "steps":
                for column, values in self.columns.items():
                    values += value[column]
                self.device_ns += value.get("device_ns") or []
            elif name == "notes":
                self.notes += value
            elif name in ("begin", "end", "waits", "refused"):
                setattr(self, name, value)

    @property
    def broken(self) -> bool:
        """Whether the program has ended badly. Gloo may abort one that has ended well, in its teardown."""
        return self.process.poll() not in (None, 0) and self.end.get("exit") != "returned"

    @property
    def failure(self) -> str:
        """Why the program ended: its exit, and the last line that it printed."""
        code = self.process.poll() or 0
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = self.end.get("error") or next((line for line in reversed(self._tail) if line.strip()), "")
        return f"{said.strip()} ({how})" if said else how

    def _kill(self, number: int) -> None:
        """Signal the session of the program, with all processes that it has started there."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _pass_on(self) -> None:
        """Copy the output of the program to this process's own, and keep what its pattern matches."""
        assert self.process.stdout is not None
        rest = b""
        while piece := os.read(self.process.stdout.fileno(), 65536):
            at_ns = time.perf_counter_ns()
            with suppress(OSError):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            self.printed += len(piece)
            # A progress bar begins its line anew by a carriage return.
            *lines, rest = re.split(rb"[\r\n]", rest + piece)
            self._tail += map(_text, lines)
            if self._pattern is not None:
                searched = ((at_ns, self._pattern.search(_text(line))) for line in lines)
                self._found += ((at, found) for at, found in searched if found is not None)

    def new_lines(self) -> list[LogLine]:
        """The lines that match the pattern, since the last call."""
        taken: list[LogLine] = []
        ends = self.columns["end_ns"]
        # The steps up to a line are known when a later step has ended.
        while self._found and (not self._has_steps or (ends and ends[-1] >= self._found[0][0])):
            at_ns, found = self._found.popleft()
            words = found.groupdict()
            step, loss = words.get("step"), words.get("loss")
            seen = bisect(ends, at_ns)
            try:
                own = seen if step is None else int(step.replace(",", ""))
                taken.append(LogLine(at_ns, seen, own, None if loss is None else float(loss)))
            except ValueError:
                self.refused = f"the pattern of `log` finds {words} in {found.string!r}, where numbers belong"
        return taken


def own_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Take the variables of a worker that its program gets too, without bench's packages on the path."""
    found = {name: value for name, value in variables.items() if name not in _NOT_OURS}
    path = [one for one in found.pop("PYTHONPATH", "").split(os.pathsep) if one not in ("", str(checkout()))]
    # Lines have the time at which they come, so that no buffer may hold them back.
    return {**found, "PYTHONUNBUFFERED": "1"} | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def _text(line: bytes) -> str:
    return _COLOURS.sub(b"", line).decode(errors="replace")
