"""The folder of a run's checkpoints: which of them go."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.checkpoint import Checkpoint, LaidOut
from strategies.saving.run_folder import RunFolder, best_of


def _write(run: RunFolder, step: int, metric: float | None, name: str | None) -> None:
    manifest = Checkpoint(
        step=step,
        session="s",
        laid_out=LaidOut(strategy="ddp", compression="none", collective="default", ranks=2),
        optimizer="SGD",
        own_replicas=False,
        conditions={},
        files={},
        metric=metric,
        metric_name=name,
    )
    run.finish(run.begin(step, "s", {(step - 1, "s")}), manifest)


@pytest.mark.parametrize(
    ("written", "stay"),
    [
        ([(0.3, None), (0.2, None), (0.4, None), (0.5, None)], [2, 4]),
        # A negated accuracy is less than any loss: the best of the metric that is asked for now stays.
        ([(-0.9, "val_accuracy"), (0.3, "val_loss"), (0.4, "val_loss"), (0.5, "val_loss")], [2, 4]),
        ([(-0.9, "val_accuracy"), (-0.8, "val_accuracy"), (None, None), (None, None)], [1, 4]),
    ],
)
def test_the_last_and_the_best_by_the_metric_of_the_newest_stay(
    written: list[tuple[float | None, str | None]], stay: list[int], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    for step, (metric, name) in enumerate(written, start=1):
        _write(run, step, metric, name)
    run.forget(1)
    assert [kept.manifest.step for kept in run.kept()] == stay
    best = best_of(run.kept())
    assert best is not None
    assert best.manifest.step == stay[0]
