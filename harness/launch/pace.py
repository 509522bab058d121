"""How far a campaign is, how long it will still take, and when it has to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from harness.launch.follow import LaunchState
from harness.terminal.console import ProgressLine, Standing
from reports.text import duration


class Deadline:
    """A moment of a monotonic clock that may be brought forward, also from a signal handler."""

    def __init__(
        self, seconds: float | None, reason: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The deadline is `seconds` from now; None: not known yet."""
        self._clock = clock
        self._at = None if seconds is None else clock() + seconds
        self.reason = reason

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, negative ones after the end; None without an end."""
        return None if self._at is None else self._at - self._clock()

    @property
    def is_over(self) -> bool:
        left = self.left_s
        return left is not None and left < 0

    def bring_forward(self, seconds: float, reason: str) -> None:
        """End `seconds` from now, unless the end is sooner already."""
        at = self._clock() + seconds
        if self._at is None or at < self._at:
            self._at, self.reason = at, reason


class Pace:
    """Shows the progress of a campaign that measures, launch after launch."""

    def __init__(
        self,
        line: ProgressLine,
        estimates: Sequence[float],
        runs: Sequence[int],
        *,
        deadline: Deadline | None = None,
        names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`estimates` and `runs` have the seconds of each launch and its number of runs, in order.

        `names` are the displayed names of cells, by id.
        """
        self._line = line
        self._seconds = list(estimates)
        self._runs = list(runs)
        self._clock = clock
        self._began = self._ended = clock()
        self._launch = 0
        self._done = self._done_before = 0
        self._deadline = deadline
        self._names = names or {}

    def report(self, state: LaunchState) -> None:
        """Show the progress of the current launch."""
        done = self._done + max(0, len(state.started) - 1)
        doing = "starting workers"
        if state.cell_id:
            doing = f"{self._names.get(state.cell_id, state.cell_id)}: {state.phase}"
        self._line.show(
            Standing(
                done=done,
                total=sum(self._runs),
                doing=doing,
                left=seconds_text(self.left_s(done)),
                elapsed=seconds_text(self._clock() - self._began),
                waits_for=state.waits_for,
            )
        )

    def done(self, runs: int) -> None:
        """Count `runs` of the current launch that have ended, or are left out."""
        self._done += runs

    def launch_over(self) -> None:
        self._launch += 1
        self._done = self._done_before = sum(self._runs[: self._launch])
        self._ended = self._clock()

    def left_s(self, done: int) -> float:
        """Seconds left when `done` runs have ended: the estimates, times the ratio of the time that the
        finished launches took to their estimates."""
        estimated = sum(self._seconds[: self._launch])
        ratio = (self._ended - self._began) / estimated if estimated else 1.0
        share = 1 - (done - self._done_before) / max(1, self._runs[self._launch])
        left = ratio * (share * self._seconds[self._launch] + sum(self._seconds[self._launch + 1 :]))
        most = None if self._deadline is None else self._deadline.left_s
        return left if most is None else max(0.0, min(left, most))


def seconds_text(seconds: float) -> str:
    """`9 s`, `2 min 05 s`: parts of a second say nothing about a campaign."""
    return f"{seconds:.0f} s" if seconds < 100 else duration(seconds * 1e9)
