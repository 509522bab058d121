"""The log of a training run, and what follows from its rows: every figure worked out by hand."""

from __future__ import annotations

import os
from functools import partial

import pytest
from training_rows import ORDER, at, started, steps, validated

from harness.features.train.log import (
    Ended,
    Row,
    SavedCheckpoint,
    Started,
    TrainingLog,
    TrainingLogWriter,
)
from harness.features.train.order import TrainOrder
from results import files
from results.errors import StoreError

_steps = partial(steps, seconds=2.0)


KILLED: tuple[Row, ...] = (
    started(0),
    _steps(2, 10, 2.0),
    validated(2, 10, 0.5),
    SavedCheckpoint(at=at(3), step=10, seconds=0.1),
    _steps(5, 20, 1.0),
    validated(5, 20, 0.9),
    _steps(7, 25, 0.5),
    started(12, resumed=10),
    _steps(14, 20, 1.2),
    validated(14, 20, 0.8),
    _steps(16, 30, 0.8),
)
DONE = (*KILLED, Ended(at=at(16), step=30, why="steps", words="30 steps"))


def test_the_later_of_two_rows_of_one_step_counts() -> None:
    log = TrainingLog(DONE)
    assert [(row.step, row.loss) for row in log.steps] == [(10, 2.0), (20, 1.2), (30, 0.8)]
    assert [row.metrics["val_accuracy"] for row in log.validations] == [0.5, 0.8]
    assert log.best("val_accuracy") == (20, 0.8)
    assert log.best("loss") == (30, 0.8)
    assert TrainingLog().best("loss") is None


def test_the_log_has_the_cost_of_a_restart() -> None:
    log = TrainingLog(DONE)
    assert (log.step, log.restarts, log.wasted_steps) == (30, 1, 15)
    assert (log.counted_s, log.wall_s) == (6.0, 16.0)
    assert log.goodput == 6 / 16
    assert TrainingLog().goodput is None


def test_training_is_done_when_it_ended_as_ordered() -> None:
    log = TrainingLog(DONE)
    assert log.done(ORDER)
    assert not TrainingLog(KILLED).done(ORDER)
    assert not log.done(TrainOrder(steps=40))
    longer = TrainingLog((*DONE, started(20, resumed=30, order=TrainOrder(steps=40))))
    assert longer.ended is None
    assert longer.restarts == 1, "an order for further steps does not count as a restart"
    # Nor is the time in which nothing was ordered a part of the run.
    assert longer.wall_s == 16.0
    assert TrainingLog((*longer.rows, _steps(23, 40, 0.7))).goodput == 8 / 19


def test_figures_of_a_step_are_those_that_count() -> None:
    log = TrainingLog(DONE)
    assert log.figures_at(20) == {"loss": 1.2, "val_accuracy": 0.8, "val_loss": pytest.approx(0.2)}
    assert log.figures_at(30) == {"loss": 0.8}
    assert log.figures_at(25) == {}


def test_the_best_is_told_since_launches_keep_it_by_one_metric() -> None:
    by_accuracy, by_loss = (TrainOrder(steps=30, best=name) for name in ("val_accuracy", "val_loss"))
    rows = (
        started(0, order=by_accuracy),
        validated(2, 10, 0.5),
        started(3, resumed=10, order=by_loss),
        validated(4, 20, 0.9),
        started(5, resumed=20, order=by_loss),
        validated(6, 30, 0.8),
    )
    assert [row.step for row in TrainingLog(rows).since_best_by("val_loss").validations] == [20, 30]
    assert TrainingLog(rows[:2]).since_best_by("val_accuracy").rows == rows[:2]
    assert TrainingLog(rows).since_best_by("val_accuracy").rows == ()


def _full_disk(name: str, flags: int) -> int:
    return os.open("/dev/full", flags)


def test_rows_wait_for_room_on_the_disk(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    writer = TrainingLogWriter(path)
    monkeypatch.setattr(files, "no_follow", _full_disk)
    with pytest.warns(UserWarning, match="No space left on device"):
        writer.write(DONE[0])
    # A second warning would be an error.
    writer.write(DONE[1])
    with pytest.raises(StoreError, match="No space left on device; free some space"):
        writer.write(DONE[-1])
    monkeypatch.undo()
    writer.write(DONE[2])
    assert TrainingLog.read(path).rows == (*DONE[:2], DONE[-1], DONE[2])


def test_each_disk_that_gets_full_is_told_also_behind_a_torn_line(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "st')
    writer = TrainingLogWriter(path)
    for row in (DONE[0], DONE[0]):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(files, "no_follow", _full_disk)
        with pytest.warns(UserWarning, match="No space left on device"):
            writer.write(row)
        monkeypatch.undo()
        writer.write(row)
    assert TrainingLog.read(path).rows == (DONE[0], DONE[0])


def test_rows_whose_start_is_damaged_are_left_out_with_a_sentence(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    writer = TrainingLogWriter(path)
    for row in DONE:
        writer.write(row)
    later = max(place for place, row in enumerate(DONE) if isinstance(row, Started))
    first, rest = path.read_bytes().split(b"\n", 1)
    for damaged in (first[:50], b'{"a":' * 100_000, b"\xff", b"[]"):
        path.write_bytes(damaged + b"\n" + rest)
        log = TrainingLog.read(path)
        assert log.rows == DONE[later:]
        assert log.damaged.startswith(f"{path} was damaged or edited: {later - 1} of its ")
    assert TrainingLog(log.rows).damaged is None


def test_what_is_written_is_read_and_a_torn_line_is_left_out(tmp_path) -> None:
    path = tmp_path / "training" / "log.jsonl"
    assert TrainingLog.read(path) == TrainingLog()
    writer = TrainingLogWriter(path)
    for row in KILLED:
        writer.write(row)
    path.write_bytes(path.read_bytes()[:-20])
    assert TrainingLog.read(path).rows == KILLED[:-1]
    writer = TrainingLogWriter(path)
    for row in DONE[-2:]:
        writer.write(row)
    assert TrainingLog.read(path) == TrainingLog(DONE)
