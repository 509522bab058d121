"""The live line of a training run: step, loss, throughput, validation and time left, read from its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from harness.console import ProgressLine, Standing
from harness.launch.deadline import Deadline
from harness.launch.follow import LaunchState
from reports.text import duration
from results.store import Study
from results.training_log import Started, Steps, TrainingLog, Validated, seconds_between

LOOK_S = 1.0
"""Between two looks at the log."""
RECENT = 20
"""Rows that throughput and time left are told by."""


class TrainingPace:
    """Tells a progress line where a training campaign stands; in place of a `Pace`."""

    def __init__(
        self,
        line: ProgressLine,
        study: Study,
        cells: Mapping[str, str],
        *,
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cells` are the names, by id, of those that are still to train."""
        self._line, self._study, self._names, self._deadline = line, study, cells, deadline
        self._clock = clock
        self._began = clock()
        self._done = 0
        self._look_at = 0.0
        self._told: tuple[str, float | None] = "", None

    def report(self, state: LaunchState) -> None:
        """Show where the launch in progress is."""
        doing, left = "starting workers", None
        if state.cell_id:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + LOOK_S
                log = self._study.training_log(state.cell_id)
                self._told = standing(log, state.started[-1]), left_s(log, state.started[-1])
            told, left = self._told
            doing = f"{self._names.get(state.cell_id, state.cell_id)}: {told or state.phase}"
        most = self._deadline.left_s
        if most is not None:
            left = most if left is None else min(left, most)
        self._line.show(
            Standing(
                done=self._done,
                total=len(self._names),
                doing=doing,
                left="?" if left is None else _seconds(max(0.0, left)),
                elapsed=_seconds(self._clock() - self._began),
                waits_for=state.waits_for,
            )
        )

    def done(self, runs: int) -> None:
        self._done += runs

    def launch_over(self) -> None:
        self._told = "", None


def standing(log: TrainingLog, run_id: str) -> str:
    """`step 120 of 400, epoch 1.2, loss 0.412, 812 samples/s, val_loss 0.5`; empty before a run has a row."""
    started, steps = _of_run(log, run_id)
    if started is None or not steps:
        return ""
    last = steps[-1]
    told = [f"step {last.step:,} of {started.total_steps:,}"]
    told += [f"epoch {last.epoch:.3g}"] if last.epoch else []
    told.append(f"loss {last.loss:.4g}")
    recent = steps[-RECENT:]
    seconds = sum(row.seconds for row in recent[1:])
    if seconds > 0:
        told.append(f"{(recent[-1].samples - recent[0].samples) / seconds:,.0f} samples/s")
    validated: Validated | None = next(iter(log.validations[-1:]), None)
    if validated is not None:
        told += [f"{name} {value:.4g}" for name, value in sorted(validated.metrics.items())]
    return ", ".join(told)


def left_s(log: TrainingLog, run_id: str) -> float | None:
    """Seconds to the last ordered step, at the rate of the last rows with all that came between them."""
    started, steps = _of_run(log, run_id)
    recent = steps[-RECENT:]
    if started is None or len(recent) < 2 or recent[-1].step == recent[0].step:
        return None
    each = seconds_between(recent[0].at, recent[-1].at) / (recent[-1].step - recent[0].step)
    return each * max(0, started.total_steps - recent[-1].step)


def _of_run(log: TrainingLog, run_id: str) -> tuple[Started | None, list[Steps]]:
    """The rows that one run has written."""
    begin = next(
        (n for n, row in enumerate(log.rows) if isinstance(row, Started) and row.run_id == run_id), None
    )
    if begin is None:
        return None, []
    started = log.rows[begin]
    assert isinstance(started, Started)
    return started, [row for row in log.rows[begin:] if isinstance(row, Steps)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else duration(seconds * 1e9)
