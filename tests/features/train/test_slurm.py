"""`bench train` on a real Slurm: a requeued job resumes from its last checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.features.train.log import Started, training_log

MODEL = Path(__file__).with_name("trainable.py")
CALL = (
    *("train", "--workload", "py:trainable:build", "--dataset", "own", "--strategy", "ddp", "--gpus", "2"),
    *("--gpus-per-node", "1", "--batch-size", "4", "--steps", "24", "--checkpoint-every", "5"),
    *("--launcher", "slurm", "--device", "cpu", "--time", "10m", "--out", "study"),
)


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_a_requeued_job_goes_on_from_its_last_checkpoint(lab, bench_in, tmp_path) -> None:
    bench = bench_in(tmp_path, lab)
    shutil.copy(MODEL, bench.folder)
    # A process that has done its tenth step waits as long as this is there.
    slow = bench.folder / "slow"
    slow.touch()
    done = bench(*CALL)
    assert done.code == 0, done.stderr
    (job,) = bench.jobs()
    kept = bench.folder / "study" / "cells"
    lab.wait(lambda: any(kept.glob("*/training/checkpoints/step-000000010")), "its second checkpoint")
    lab.command("scontrol", "requeue", str(job))
    slow.unlink()
    bench.settle()
    study = bench.study()
    (cell,) = study.cell_ids()
    log = training_log(study, cell)
    started = [row for row in log.rows if isinstance(row, Started)]
    assert [row.resumed_step for row in started] == [None, 10]
    assert (log.ended.why, log.step) == ("steps", 24)
    assert {row.launch_id for row in started} == {launch.launch_id for launch in study.launches()}
    # Nothing is left to do, and the job was the same.
    assert "nothing to submit" in bench(*CALL).stderr
    assert bench.jobs() == [job]
