"""How far a campaign is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from harness.launch.deadline import Deadline
from harness.launch.follow import LaunchState
from harness.plan.estimate import LaunchEstimate
from harness.terminal.console import ProgressLine, Standing
from reports.text import duration


class Pace:
    """Tells a progress line where a campaign stands, launch after launch."""

    def __init__(
        self,
        line: ProgressLine,
        estimates: Sequence[LaunchEstimate],
        runs: Sequence[int],
        *,
        deadline: Deadline | None = None,
        names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`estimates` and `runs` (how many each has) are those of the launches, in order.

        `names` are what cells are called, by id.
        """
        self._line = line
        self._seconds = [estimate.seconds for estimate in estimates]
        self._runs = list(runs)
        self._clock = clock
        self._began = clock()
        self._ended = self._began
        self._launch = 0
        self._done = 0
        self._done_before = 0
        self._deadline = deadline
        self._names = names or {}

    def report(self, state: LaunchState) -> None:
        """Show where the launch in progress is."""
        done = self._done + max(0, len(state.started) - 1)
        doing = "starting workers"
        if state.cell_id:
            doing = f"{self._names.get(state.cell_id, state.cell_id)}: {state.phase}"
        self._line.show(
            Standing(
                done=done,
                total=sum(self._runs),
                doing=doing,
                left=_seconds(self.left_s(done)),
                elapsed=_seconds(self._clock() - self._began),
                waits_for=state.waits_for,
            )
        )

    def done(self, runs: int) -> None:
        """So many runs of the launch in progress have ended, or are not going to be."""
        self._done += runs

    def launch_over(self) -> None:
        self._launch += 1
        self._done = self._done_before = sum(self._runs[: self._launch])
        self._ended = self._clock()

    def left_s(self, done: int) -> float:
        """Seconds left when `done` runs are: the estimates, at the ratio that finished launches had."""
        estimated = sum(self._seconds[: self._launch])
        ratio = (self._ended - self._began) / estimated if estimated else 1.0
        share = 1 - (done - self._done_before) / max(1, self._runs[self._launch])
        left = ratio * (share * self._seconds[self._launch] + sum(self._seconds[self._launch + 1 :]))
        most = None if self._deadline is None else self._deadline.left_s
        return left if most is None else max(0.0, min(left, most))


def _seconds(seconds: float) -> str:
    """`9 s`, `2 min 05 s`: parts of a second say nothing of a campaign."""
    return f"{seconds:.0f} s" if seconds < 100 else duration(seconds * 1e9)
