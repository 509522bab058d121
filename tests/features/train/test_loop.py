"""The loop of a training run on two ranks, where a checkpoint, a validation or an order is bad."""

from __future__ import annotations

import errno
import io
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from rank_builders import a_context

from harness.features.train.files import log_path
from harness.features.train.log import Ended, SavedCheckpoint, TrainingLog, training_log
from harness.features.train.order import TrainOrder
from harness.features.train.worker import loop as training_loop
from harness.features.train.worker.loop import train_cell
from harness.worker.rank import log as rank_log
from harness.worker.rank.context import Run
from harness.worker.rank.log import RankLog, Watchdog
from results.cell import Cell
from results.launch import Slot
from results.outcome import Outcome
from results.record import RankRecord
from results.store import Study
from strategies.saving.run_folder import RunFolder

Train = Callable[..., list[tuple[Outcome, str | None]]]
PATIENCE_S = 30.0


def record_of(rank: int, folder: str, order: TrainOrder, model: str, fault: str | None) -> RankRecord:
    """On a rank: the record of a cell's training; `fault` is a function below, called for each checkpoint."""
    cell = Cell(
        workload=f"py:trained:{model}",
        dataset="own",
        strategy="scratch-ddp",
        gpus=2,
        micro_batch=2,
        device="cpu",
        backend="gloo",
        optimizer="sgd:lr=0.01",
    )
    log = Path(folder) / f"{rank}.jsonl"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(redirect_stderr(io.StringIO()))
        if fault is not None:
            stack.enter_context(patch.object(RunFolder, "finish", _with(globals()[fault], log)))
            stack.enter_context(patch.object(rank_log, "HEARTBEAT_S", 0.0))
        if fault == "slow":
            stack.enter_context(patch.object(training_loop, "HEARTBEAT_S", 0.01))
        launch = {"source_folder": str(Path(__file__).parent), "order": order.stored}
        around = stack.enter_context(a_context(rank, folder, launch))
        run = Run(around, Slot(cell_id="cell", run_id="r", repeat=1), cell)
        return run.execute(partial(train_cell, values=order.stored.values))


def _with(fault: Callable[[int, Path], None], log: Path) -> Callable[..., Path]:
    finish = RunFolder.finish

    def finished(run: RunFolder, temporary: Path, manifest: Any) -> Path:
        fault(manifest.step, log)
        return finish(run, temporary, manifest)

    return finished


def full_at_the_end(step: int, log: Path) -> None:
    if step == 6:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")


def mark(step: int, log: Path) -> None:
    """Keep what the rank has said before its checkpoint is finished."""
    (log.parent / "before").write_text(log.read_text())


def slow(step: int, log: Path) -> None:
    """Not before the rank has given two more signs of life."""
    before, until = log.read_text().count("alive"), time.monotonic() + PATIENCE_S
    while log.read_text().count("alive") < before + 2:
        if time.monotonic() > until:
            raise TimeoutError("no sign of life")
        time.sleep(0.01)


@pytest.fixture
def trains(ranks, tmp_path) -> Train:
    def run(order: TrainOrder, *, model: str = "build", fault: str | None = None) -> Any:
        records = ranks(2, record_of, str(tmp_path), order, model, fault)
        return [(record.outcome, record.reason) for record in records]

    return run


def log_of(folder: Path) -> TrainingLog:
    return training_log(Study(folder), "cell")


ORDER = TrainOrder(steps=6, checkpoint_every=3)


def test_replicas_that_train_on_the_same_batches_are_warned_of(ranks, tmp_path) -> None:
    for model, warned in (("alike", True), ("build", False)):
        for record in ranks(2, record_of, str(tmp_path / model), ORDER, model, None):
            assert record.outcome is Outcome.OK
            assert any("replicas 0 and 1 read the same batches" in each for each in record.warnings) is warned


def test_training_has_not_ended_before_its_last_checkpoint_is_written(trains, tmp_path) -> None:
    (outcome, reason), other = trains(ORDER, fault="full_at_the_end")
    # The ranks that did not write know it too.
    assert outcome is other[0] is Outcome.CANCELLED
    assert "the disk is full" in str(reason)
    assert "training ended at step 6, and its last checkpoint was not written" in str(reason)
    log = log_of(tmp_path)
    assert log.ended is None
    assert [(row.step, row.failed is None) for row in log.saves] == [(3, True), (6, False)]

    assert [outcome for outcome, _ in trains(ORDER)] == [Outcome.OK] * 2
    log = log_of(tmp_path)
    assert (log.launches[-1].resumed_step, log.step) == (3, 6)
    assert log.done(ORDER)


def test_a_rank_that_waits_for_the_disk_gives_signs_of_life(trains, tmp_path) -> None:
    assert [outcome for outcome, _ in trains(ORDER, fault="slow")] == [Outcome.OK] * 2
    assert all(row.failed is None for row in log_of(tmp_path).rows if isinstance(row, SavedCheckpoint))


def test_a_rank_that_validates_gives_signs_of_life(trains, tmp_path) -> None:
    trains(TrainOrder(steps=1), fault="mark")
    # After the step, and after each of the 8 batches of 2 that a rank has of the 32 samples.
    assert (tmp_path / "before").read_text().count('"alive"') >= 9


def test_a_loss_of_validation_that_is_not_finite_is_never_the_best(trains, tmp_path) -> None:
    order = TrainOrder(steps=6, checkpoint_every=2, validate_every=2, keep=1, best="val_loss", patience=3)
    assert [outcome for outcome, _ in trains(order, model="bad")] == [Outcome.OK] * 2
    log = log_of(tmp_path)
    first, *later = log.validations
    assert (first.metrics, first.not_finite) == ({}, ("val_loss",))
    assert [sorted(row.metrics) for row in later] == [["val_loss"]] * 2
    best = log.best("val_loss")
    assert best is not None
    assert [row.best for row in log.saves if row.step == 2] == [False]
    assert [row.step for row in log.saves if row.best][-1] == best[0]


def test_a_target_of_the_loss_holds_where_a_kill_came_before_the_end(trains, tmp_path) -> None:
    order = TrainOrder(steps=6, checkpoint_every=1, target="loss<=1e9")
    trains(order)
    path = log_path(Study(tmp_path), "cell")
    *lines, end = path.read_bytes().splitlines(keepends=True)
    assert msgspec.json.decode(end, type=Ended).why == "target"
    path.write_bytes(b"".join(lines))
    trains(order)
    ended = log_of(tmp_path).ended
    assert (ended.why, ended.step) == ("target", 1)


def test_a_warm_up_as_long_as_the_epochs_is_refused(trains) -> None:
    # 16 samples are 4 steps of 4.
    order = TrainOrder(epochs=1, schedule="cosine", warmup_steps=4)
    (_, reason), _ = trains(order)
    assert "--warmup-steps 4 leaves nothing of 4 steps (--epochs 1)" in str(reason)


def test_a_rank_gives_signs_of_life_on_a_full_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rank_log, "HEARTBEAT_S", 0.0)
    touched = []
    monkeypatch.setattr(os, "utime", touched.append)
    lines = RankLog(Path("/dev/full"), 0, Watchdog(900))
    lines.heartbeat()
    assert len(touched) == 1
    with pytest.raises(OSError, match="No space left"):
        lines.event("trained")
    with pytest.raises(OSError, match="No space left"):
        lines.close()
