"""How far a campaign is that trains, from the log of the training: step, loss, throughput, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress

from harness.features.train.files import log_path
from harness.features.train.log import SavedCheckpoint, Started, Steps, TrainingLog, Validated, rows_of
from harness.launch.conduct import Deadline, seconds_text
from harness.launch.follow import LaunchState, LogTail
from harness.terminal.console import ProgressLine, Standing
from results.files import Content
from results.run import RunResult
from results.store import Study
from results.value_types import seconds_between

LOOK_S = 1.0
"""Seconds between two looks at the log of a training run."""
RECENT = 20
"""Number of rows from which throughput and time left are computed."""


class TrainingPace:
    """Shows the progress of a campaign that trains, with the methods of a `Pace`."""

    def __init__(
        self,
        line: ProgressLine,
        study: Study,
        cells: Mapping[str, str],
        *,
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cells` are the names, by id, of the cells that are not trained yet."""
        self._line, self._study, self._names, self._deadline = line, study, cells, deadline
        self._clock = clock
        self._began = clock()
        self._done: set[str] = set()
        self._look_at = 0.0
        self._shown: tuple[str, float | None] = "", None
        self._recent: dict[str, _Recent] = {}
        """The end of each cell's log, by cell."""

    def report(self, state: LaunchState) -> None:
        """Show the progress of the current launch."""
        doing, left = "starting workers", None
        if state.cell_id:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + LOOK_S
                tail = LogTail(log_path(self._study, state.cell_id))
                log = self._recent.setdefault(state.cell_id, _Recent(tail)).read()
                self._shown = standing(log, state.started[-1]), left_s(log, state.started[-1])
            shown, left = self._shown
            doing = shown or state.phase
            if len(self._names) > 1:
                doing = f"{doing} ({self._names.get(state.cell_id, state.cell_id)})"
        most = self._deadline.left_s
        if most is not None:
            left = most if left is None else min(left, most)
        self._line.show(
            Standing(
                done=len(self._done),
                total=len(self._names),
                doing=doing,
                left="?" if left is None else seconds_text(max(0.0, left)),
                elapsed=seconds_text(self._clock() - self._began),
                waits_for=state.waits_for,
            )
        )

    def done(self, results: Sequence[RunResult], closed: Container[str]) -> None:
        self._done |= {run.cell_id for run in results} | {cell for cell in self._names if cell in closed}

    def launch_over(self) -> None:
        self._shown = "", None


class _Recent:
    """The rows of a growing log that the live line needs.

    They are the rows of the last launch, of steps the last `RECENT`, and the last validation that counts.
    """

    def __init__(self, tail: LogTail) -> None:
        self._tail = tail
        self._started: Started | None = None
        self._steps: deque[Steps] = deque(maxlen=RECENT)
        self._validated: Validated | None = None
        self._saved: SavedCheckpoint | None = None

    def read(self) -> TrainingLog:
        """Read the new rows. A log that cannot be read now does not end the training that it describes."""
        lines: list[Content] = []
        with suppress(OSError):
            lines = self._tail.lines()
        for row in rows_of(lines):
            match row:
                case Started():
                    self._started, self._saved = row, None
                    self._steps.clear()
                    if self._validated is not None and self._validated.step > (row.resumed_step or 0):
                        self._validated = None
                case Steps():
                    self._steps.append(row)
                case Validated():
                    self._validated = row
                case SavedCheckpoint():
                    self._saved = row
        rows = (self._started, self._validated, *self._steps, self._saved)
        return TrainingLog(tuple(row for row in rows if row is not None))


def standing(log: TrainingLog, run_id: str) -> str:
    """`step 120/400, loss 0.412, val_loss 0.5, 812 samples/s, epoch 1.2`; empty before a run has a row.

    The most important figures are first, as a narrow terminal cuts the end.
    """
    started, steps = _of_run(log, run_id)
    if started is None or not steps:
        return ""
    last = steps[-1]
    parts = [f"step {last.step:,}/{started.total_steps:,}", f"loss {last.loss:.4g}"]
    validated: Validated | None = next(iter(log.validations[-1:]), None)
    if validated is not None:
        parts += [f"{name} {value:.4g}" for name, value in sorted(validated.metrics.items())]
    recent = steps[-RECENT:]
    seconds = sum(row.seconds for row in recent[1:])
    if seconds > 0:
        parts.append(f"{(recent[-1].samples - recent[0].samples) / seconds:,.0f} samples/s")
    parts += [f"epoch {last.epoch:.3g}"] if last.epoch else []
    saved = log.saves[-1] if log.saves else None
    if saved is not None and saved.failed is not None:
        parts.append(f"no checkpoint of step {saved.step:,}: {saved.failed}")
    return ", ".join(parts)


def left_s(log: TrainingLog, run_id: str) -> float | None:
    """Seconds to the last ordered step, by the mean time of a step over the last rows, pauses included."""
    started, steps = _of_run(log, run_id)
    recent = steps[-RECENT:]
    if started is None or len(recent) < 2 or recent[-1].step == recent[0].step:
        return None
    each = seconds_between(recent[0].at, recent[-1].at) / (recent[-1].step - recent[0].step)
    return each * max(0, started.total_steps - recent[-1].step)


def _of_run(log: TrainingLog, run_id: str) -> tuple[Started | None, list[Steps]]:
    """The first row of a run, and its rows of steps."""
    for number, row in enumerate(log.rows):
        if isinstance(row, Started) and row.run_id == run_id:
            return row, [later for later in log.rows[number:] if isinstance(later, Steps)]
    return None, []
