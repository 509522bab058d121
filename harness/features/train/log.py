"""The log of a training run, and figures derived from it. Rank 0 of every launch writes a JSON object a line.

A checkpoint ends a row of steps, so a launch always resumes from the end of a row.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Literal

import msgspec

from harness.features.train.files import log_path
from harness.features.train.order import MetricName, TrainOrder, larger_is_better
from results import files
from results.errors import StoreError
from results.files import FULL, Content, DamagedError
from results.store import Study
from results.value_types import require_times, seconds_between

EndReason = Literal["epochs", "steps", "target", "patience"]


class _Dated(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    at: str
    """UTC, as are all times of the log."""

    def __post_init__(self) -> None:
        require_times(self.at)


class Started(_Dated, frozen=True, kw_only=True, tag="started"):
    """A launch starts or resumes the training."""

    run_id: str
    launch_id: str
    gpus: int
    replicas: int
    resumed_step: int | None
    """The step of the checkpoint that it resumes; None: it starts from the beginning."""
    order: TrainOrder
    total_steps: int
    """Updates of the complete order."""
    unit: str = "samples"
    """The workload's unit of throughput."""
    units_per_sample: int = 1


class Steps(_Dated, frozen=True, kw_only=True, tag="steps"):
    """Some consecutive steps."""

    step: int
    """Updates so far."""
    epoch: float
    """Epochs so far; 0 for data without epochs."""
    samples: int
    """Samples of all replicas, so far."""
    loss: float
    """Mean over the replicas and over the steps since the last row."""
    seconds: float
    """Time of these steps, without validation and without the time blocked by a checkpoint."""
    learning_rate: float
    """Rate of the first group of parameters, at the last step."""
    gradient_norm: float | None = None
    """Norm of the last step; None unless it is clipped."""


class Validated(_Dated, frozen=True, kw_only=True, tag="validated"):
    """A pass over the held-out samples."""

    step: int
    epoch: float
    metrics: dict[str, float]
    seconds: float
    not_finite: tuple[str, ...] = ()
    """Metrics that were NaN or infinite."""


class SavedCheckpoint(_Dated, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint was completed, or could not be written."""

    step: int
    seconds: float
    """The time for which training was blocked."""
    failed: str | None = None
    best: bool = False
    """Whether its metric is the best one so far."""


class Ended(_Dated, frozen=True, kw_only=True, tag="ended"):
    """Training ended regularly, for one of the `EndReason`s."""

    step: int
    why: EndReason
    words: str


Row = Started | Steps | Validated | SavedCheckpoint | Ended
_ROW = msgspec.json.Decoder(Row)


@dataclass(frozen=True)
class TrainingLog:
    """All rows of a run, in the order in which they were written."""

    rows: tuple[Row, ...] = ()
    damaged: str | None = None
    """A sentence on rows that were left out because a line before them is damaged; it names the file."""

    @classmethod
    def read(cls, path: Path) -> TrainingLog:
        """The rows of a file; a missing file is an empty log. A torn line, which a kill leaves, is left out,
        and so are rows without the start that they belong to.

        Raises StoreError if the file cannot be read.
        """
        try:
            rows = list(rows_of(files.read_lines(path)))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}; move it away") from error
        first = next((place for place, row in enumerate(rows) if isinstance(row, Started)), len(rows))
        damaged = (
            f"{path} was damaged or edited: {first} of its {len(rows)} rows have no start of a training "
            f"before them, and are left out"
        )
        return cls(tuple(rows[first:]), damaged if first else None)

    def without_words(self) -> TrainingLog:
        """The log without the system's messages on checkpoints that could not be written."""
        return TrainingLog(
            tuple(
                msgspec.structs.replace(row, failed="it could not be written")
                if isinstance(row, SavedCheckpoint) and row.failed
                else row
                for row in self.rows
            )
        )

    @cached_property
    def launches(self) -> tuple[Started, ...]:
        return tuple(row for row in self.rows if isinstance(row, Started))

    @cached_property
    def counted(self) -> tuple[Row, ...]:
        """The rows that training consists of now, without steps that a later launch did again."""
        kept: list[Row] = []
        for row in self.rows:
            if isinstance(row, Started):
                begin = row.resumed_step or 0
                kept = [one for one in kept if isinstance(one, Started) or one.step <= begin]
            kept.append(row)
        return tuple(kept)

    @property
    def steps(self) -> tuple[Steps, ...]:
        return tuple(row for row in self.counted if isinstance(row, Steps))

    @property
    def validations(self) -> tuple[Validated, ...]:
        return tuple(row for row in self.counted if isinstance(row, Validated))

    @property
    def saves(self) -> tuple[SavedCheckpoint, ...]:
        return tuple(row for row in self.counted if isinstance(row, SavedCheckpoint))

    @property
    def ended(self) -> Ended | None:
        """The row of training's regular end; None if a later launch resumed it."""
        last = next((row for row in reversed(self.rows) if isinstance(row, Started | Ended)), None)
        return last if isinstance(last, Ended) else None

    def done(self, order: TrainOrder) -> bool:
        """Whether training by `order` has ended regularly."""
        return self.ended is not None and bool(self.launches) and self.launches[-1].order.ends_as(order)

    @property
    def step(self) -> int:
        """Updates so far, of those that count."""
        return max((row.step for row in self.counted if not isinstance(row, Started)), default=0)

    @property
    def restarts(self) -> int:
        """Launches that resumed training that had not ended."""
        return sum(
            isinstance(row, Started) and index > 0 and not isinstance(self.rows[index - 1], Ended)
            for index, row in enumerate(self.rows)
        )

    @property
    def wasted_steps(self) -> int:
        """Steps that are in the log and were done again."""
        wasted = reached = 0
        for row in self.rows:
            if isinstance(row, Started):
                begin = row.resumed_step or 0
                wasted += max(0, reached - begin)
                reached = begin
            else:
                reached = max(reached, row.step)
        return wasted

    @property
    def counted_s(self) -> float:
        return sum(row.seconds for row in self.steps)

    @property
    def wall_s(self) -> float:
        """Seconds from the first row to the last, without the time from an end to a later order."""
        return sum(
            seconds_between(row.at, after.at)
            for row, after in pairwise(self.rows)
            if not isinstance(row, Ended)
        )

    @property
    def goodput(self) -> float | None:
        """Time of the counted steps over all time; None before the first step."""
        return min(1.0, self.counted_s / self.wall_s) if self.wall_s > 0 and self.steps else None

    def figures_at(self, step: int) -> dict[str, float]:
        """Loss and metrics of one step: the loss if it ended a row, metrics if it was validated."""
        found: dict[str, float] = {}
        for row in self.counted:
            if isinstance(row, Steps) and row.step == step:
                found |= {"loss": row.loss}
            elif isinstance(row, Validated) and row.step == step:
                found |= row.metrics
        return found

    def since_best_by(self, metric: MetricName) -> TrainingLog:
        """The counted rows since launches keep the best checkpoint by `metric`. Earlier launches used another
        metric, or did not keep the best one."""
        others = (
            place
            for place, row in enumerate(self.counted)
            if isinstance(row, Started) and row.order.best != metric
        )
        rows = self.counted[max(others, default=-1) + 1 :]
        return TrainingLog(tuple(dropwhile(lambda row: not isinstance(row, Started), rows)))

    def values(self, metric: MetricName) -> list[tuple[int, float]]:
        """The values of a metric that count, each with its step."""
        if metric == "loss":
            return [(row.step, row.loss) for row in self.steps]
        return [(row.step, row.metrics[metric]) for row in self.validations if metric in row.metrics]

    def best(self, metric: MetricName) -> tuple[int, float] | None:
        """The best value of a metric (of equal ones the latest, as for checkpoints), behind its step; None
        without one."""
        sign = -1.0 if larger_is_better(metric) else 1.0
        return min(self.values(metric), key=lambda value: (sign * value[1], -value[0]), default=None)


def training_log(study: Study, cell_id: str) -> TrainingLog:
    """The rows of a cell so far; the log of a cell that was never trained is empty."""
    return TrainingLog.read(log_path(study, cell_id))


class TrainingLogWriter:
    """Appends rows; each is in the file when `write` returns, unless the disk is full."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError if the file cannot be written."""
        self._path = path
        self._left = b""
        """Bytes for which the disk had no room."""
        self._told = False
        """Whether a warning has said that rows wait."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and files.read_end(path, 1).data not in (b"", b"\n"):
                # A line that a kill has cut off stays separate.
                self._left = b"\n"
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}; free some space there") from error

    def write(self, row: Row) -> None:
        """Write a row. If the disk is full, warn once and keep the row for the next call.

        Raises StoreError for any other error, and if an `Ended` cannot be written.
        """
        self._left += msgspec.json.encode(row) + b"\n"
        try:
            with open(self._path, "ab", buffering=0, opener=files.no_follow) as file:
                while self._left:
                    self._left = self._left[file.write(self._left) :]
                if isinstance(row, SavedCheckpoint | Ended):
                    os.fsync(file.fileno())
        except OSError as error:
            if isinstance(row, Ended) or error.errno not in FULL:
                raise StoreError(
                    f"cannot write {self._path}: {error.strerror}; free some space there"
                ) from error
            if not self._told:
                self._told = True
                warnings.warn(
                    f"{self._path} cannot be extended: {error.strerror}; training continues", stacklevel=2
                )
        else:
            self._told = False


def rows_of(lines: Iterable[Content]) -> Iterator[Row]:
    """The rows of complete lines of a log; lines that are not rows are left out."""
    for line in lines:
        with suppress(DamagedError):
            yield line.parsed(_ROW)
