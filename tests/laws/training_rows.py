"""Rows of the log of a training run on two replicas, whose steps have 8 samples and whose epochs 10 steps."""

from __future__ import annotations

from harness.features.train.log import Started, Steps, Validated
from harness.features.train.order import TrainOrder

ORDER = TrainOrder(steps=100, target="val_accuracy>=0.9")


def at(seconds: float) -> str:
    """The moment `seconds` after four o'clock, less than an hour."""
    return f"2026-01-02T04:{int(seconds // 60):02d}:{seconds % 60:06.3f}Z"


def started(
    second: float, launch: str = "only", resumed: int | None = None, order: TrainOrder = ORDER
) -> Started:
    return Started(
        at=at(second),
        run_id=f"run-{launch}",
        launch_id=launch,
        gpus=2,
        replicas=2,
        resumed_step=resumed,
        order=order,
        total_steps=order.steps or 0,
    )


def steps(second: float, step: int, loss: float = 1.0, *, seconds: float = 1.0) -> Steps:
    return Steps(
        at=at(second),
        step=step,
        epoch=step / 10,
        samples=8 * step,
        loss=loss,
        seconds=seconds,
        learning_rate=0.1,
    )


def validated(second: float, step: int, accuracy: float) -> Validated:
    metrics = {"val_loss": 1 - accuracy, "val_accuracy": accuracy}
    return Validated(at=at(second), step=step, epoch=step / 10, metrics=metrics, seconds=0.5)
