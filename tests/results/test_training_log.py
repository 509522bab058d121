"""The log of a training run, and what follows from its rows: every figure worked out by hand."""

from __future__ import annotations

from pathlib import Path

from results.train_order import TrainOrder
from results.training_log import (
    Best,
    Ended,
    Row,
    SavedCheckpoint,
    Started,
    Steps,
    TrainingLog,
    TrainingLogWriter,
    Validated,
)

ORDER = TrainOrder(steps=30)


def _at(second: int) -> str:
    return f"2026-01-02T03:04:{second:02d}.000Z"


def _started(second: int, resumed: int | None = None, order: TrainOrder = ORDER) -> Started:
    return Started(
        at=_at(second),
        run_id=f"run-{second}",
        launch_id=f"launch-{second}",
        gpus=2,
        replicas=2,
        resumed_step=resumed,
        order=order,
        total_steps=30,
    )


def _steps(second: int, step: int, loss: float) -> Steps:
    return Steps(
        at=_at(second),
        step=step,
        epoch=step / 10,
        samples=8 * step,
        loss=loss,
        seconds=2.0,
        learning_rate=0.1,
    )


def _validated(second: int, step: int, accuracy: float) -> Validated:
    metrics = {"val_loss": 1 - accuracy, "val_accuracy": accuracy}
    return Validated(at=_at(second), step=step, epoch=step / 10, metrics=metrics, seconds=0.5)


KILLED: tuple[Row, ...] = (
    _started(0),
    _steps(2, 10, 2.0),
    _validated(2, 10, 0.5),
    SavedCheckpoint(at=_at(3), step=10, seconds=0.1),
    _steps(5, 20, 1.0),
    _validated(5, 20, 0.9),
    _steps(7, 25, 0.5),
    _started(12, resumed=10),
    _steps(14, 20, 1.2),
    _validated(14, 20, 0.8),
    _steps(16, 30, 0.8),
)
DONE = (*KILLED, Ended(at=_at(16), step=30, why="steps", words="30 steps"))


def test_of_a_step_done_twice_the_later_one_counts() -> None:
    log = TrainingLog(DONE)
    assert [(row.step, row.loss) for row in log.steps] == [(10, 2.0), (20, 1.2), (30, 0.8)]
    assert [row.metrics["val_accuracy"] for row in log.validations] == [0.5, 0.8]
    assert log.best("val_accuracy") == Best(20, 0.8)
    assert log.best("loss") == Best(30, 0.8)
    assert TrainingLog().best("loss") is None


def test_what_a_restart_cost_is_in_the_log() -> None:
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
    longer = TrainingLog((*DONE, _started(20, resumed=30, order=TrainOrder(steps=40))))
    assert longer.ended is None
    assert longer.restarts == 1, "an order for more is no restart"


def test_what_is_written_is_read_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "training" / "log.jsonl"
    assert TrainingLog.read(path) == TrainingLog()
    writer = TrainingLogWriter(path)
    for row in KILLED:
        writer.write(row)
    writer.close()
    path.write_bytes(path.read_bytes()[:-20])
    assert TrainingLog.read(path).rows == KILLED[:-1]
    writer = TrainingLogWriter(path)
    for row in DONE[-2:]:
        writer.write(row)
    writer.close()
    assert TrainingLog.read(path) == TrainingLog(DONE)
