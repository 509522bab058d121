"""Live scalars, read back by TensorBoard's own reader."""

from __future__ import annotations

import builtins
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.worker.measure.scalars import Scalars
from results.record import StepColumns

FIRST = StepColumns(
    step_ns=[10_000_000, 9_000_001],
    data_ns=[1_000_000, 1_000_000],
    forward_ns=[2_000_000, 2_500_000],
    backward_ns=[4_000_000, 3_000_000],
    optimizer_ns=[1_000_000, 500_000],
    loss=[2.5, 2.25],
)
SECOND = StepColumns(
    step_ns=[8_123_456_789],
    data_ns=[0],
    forward_ns=[3],
    backward_ns=[123_456],
    optimizer_ns=[7_000_000],
    loss=[None],
)


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every tag in an event file."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def test_a_training_run_has_values_at_steps_of_its_own(tmp_path) -> None:
    with closing(Scalars(tmp_path)) as scalars:
        scalars.point(20, {"loss": 2.5, "learning_rate": 0.5})
        scalars.point(40, {"loss": 2.25})
    with closing(Scalars(None)) as nothing:
        nothing.point(20, {"loss": 2.5})
    assert scalars.absent == nothing.absent == {}
    assert scalars_of(tmp_path) == {"loss": [(20, 2.5), (40, 2.25)], "learning_rate": [(20, 0.5)]}


def test_each_step_has_its_loss_and_its_times(tmp_path) -> None:
    with closing(Scalars(tmp_path)) as scalars:
        for columns in (FIRST, SECOND, FIRST):
            scalars.write(columns)
    assert scalars.absent == {}
    values = {
        # The third step's loss is not finite.
        "loss": [2.5, 2.25, None, 2.5, 2.25],
        "time/step_ms": [10.0, 9.000001, 8123.456789, 10.0, 9.000001],
        "time/data_ms": [1.0, 1.0, 0.0, 1.0, 1.0],
        "time/forward_ms": [2.0, 2.5, 0.000003, 2.0, 2.5],
        "time/backward_ms": [4.0, 3.0, 0.123456, 4.0, 3.0],
        "time/optimizer_ms": [1.0, 0.5, 7.0, 1.0, 0.5],
    }
    assert scalars_of(tmp_path) == {
        tag: [(step, float(np.float32(value))) for step, value in enumerate(column) if value is not None]
        for tag, column in values.items()
    }


def test_a_block_is_in_the_file_when_the_call_returns(tmp_path) -> None:
    scalars = Scalars(tmp_path)
    scalars.write(FIRST)
    assert len(scalars_of(tmp_path)["loss"]) == 2
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    scalars.close()
    # Nothing had been left for later, when a block is timed.
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size


def test_without_the_package_the_run_goes_on_and_says_so(tmp_path, monkeypatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with closing(Scalars(tmp_path / "scalars")) as scalars:
        scalars.write(FIRST)
    assert scalars.absent == {
        "tensorboard": "No module named 'tensorboard'; is the package tensorboard installed here?"
    }
    assert not (tmp_path / "scalars").exists()


def test_a_disk_that_fills_up_ends_the_scalars_and_not_the_run(tmp_path, monkeypatch) -> None:
    scalars = Scalars(tmp_path)
    writer = scalars._writer
    assert writer is not None

    def full() -> None:
        raise OSError(28, "No space left on device")

    scalars.write(FIRST)
    monkeypatch.setattr(writer, "flush", full)
    scalars.write(SECOND)
    scalars.write(FIRST)
    monkeypatch.undo()
    scalars.close()
    writer.close()
    assert scalars.absent == {"tensorboard": "OSError: [Errno 28] No space left on device"}
    # The block after the failure was not tried.
    assert max(step for step, _ in scalars_of(tmp_path)["time/step_ms"]) == 2
