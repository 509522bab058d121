"""The live line of a training run: step, loss, throughput, validation and time left, read from its log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from harness.launch.deadline import Deadline
from harness.launch.follow import LaunchState, LogTail
from harness.terminal.console import ProgressLine, Standing
from reports.text import duration
from results.store import Study
from results.training_log import (
    SavedCheckpoint,
    Started,
    Steps,
    TrainingLog,
    Validated,
    rows_of,
    seconds_between,
)

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
        self._recent: dict[str, _Recent] = {}
        """By cell."""

    def report(self, state: LaunchState) -> None:
        """Show where the launch in progress is."""
        doing, left = "starting workers", None
        if state.cell_id:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + LOOK_S
                log = self._look(state.cell_id)
                self._told = standing(log, state.started[-1]), left_s(log, state.started[-1])
            told, left = self._told
            name = self._names.get(state.cell_id, state.cell_id)
            doing = f"{told or state.phase} ({name})" if len(self._names) > 1 else told or state.phase
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

    def _look(self, cell_id: str) -> TrainingLog:
        """The end of a cell's log, of which what is new is read."""
        path = self._study.training_log_path(cell_id)
        recent = self._recent.setdefault(cell_id, _Recent(LogTail(path)))
        recent.read()
        return recent.log

    def done(self, runs: int) -> None:
        self._done += runs

    def launch_over(self) -> None:
        self._told = "", None


class _Recent:
    """What the live line needs of a growing log: the rows of the last launch, of steps the last `RECENT`, and
    the last validation that counts."""

    def __init__(self, tail: LogTail) -> None:
        self._tail = tail
        self._started: Started | None = None
        self._steps: deque[Steps] = deque(maxlen=RECENT)
        self._validated: Validated | None = None
        self._saved: SavedCheckpoint | None = None

    def read(self) -> None:
        """Take what is new. A log that cannot be read now does not end the training that it tells of."""
        lines: list[bytes] = []
        with suppress(OSError):
            lines = self._tail.lines()
        for row in rows_of(lines):
            match row:
                case Started():
                    self._begin(row)
                case Steps():
                    self._steps.append(row)
                case Validated():
                    self._validated = row
                case SavedCheckpoint():
                    self._saved = row

    def _begin(self, row: Started) -> None:
        self._started, self._saved = row, None
        self._steps.clear()
        if self._validated is not None and self._validated.step > (row.resumed_step or 0):
            self._validated = None

    @property
    def log(self) -> TrainingLog:
        rows = (self._started, self._validated, *self._steps, self._saved)
        return TrainingLog(tuple(row for row in rows if row is not None))


def standing(log: TrainingLog, run_id: str) -> str:
    """`step 120/400, loss 0.412, val_loss 0.5, 812 samples/s, epoch 1.2`: what a narrow terminal must show
    comes first. Empty before a run has a row."""
    started, steps = _of_run(log, run_id)
    if started is None or not steps:
        return ""
    last = steps[-1]
    told = [f"step {last.step:,}/{started.total_steps:,}", f"loss {last.loss:.4g}"]
    validated: Validated | None = next(iter(log.validations[-1:]), None)
    if validated is not None:
        told += [f"{name} {value:.4g}" for name, value in sorted(validated.metrics.items())]
    recent = steps[-RECENT:]
    seconds = sum(row.seconds for row in recent[1:])
    if seconds > 0:
        told.append(f"{(recent[-1].samples - recent[0].samples) / seconds:,.0f} samples/s")
    told += [f"epoch {last.epoch:.3g}"] if last.epoch else []
    saved = log.saves[-1] if log.saves else None
    if saved is not None and saved.failed is not None:
        told.append(f"no checkpoint of step {saved.step:,}: {saved.failed}")
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
