"""`bench train` for real: 2 ranks, killed ranks and a killed bench, and input that it refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.features.train.files import checkpoints_folder, weights_path
from harness.features.train.log import SavedCheckpoint, Started, TrainingLog, training_log
from results.outcome import Outcome
from results.record import RankRecord
from results.store import Study
from workloads.build import build_workload

pytestmark = pytest.mark.slow

MODEL = Path(__file__).with_name("trainable.py")
WORK = (
    *("--dataset", "own", "--gpus", "2", "--strategy", "scratch-ddp", "--batch-size", "4"),
    *("--clip-norm", "1", "--oversubscribe", "--no-report", "--out", "study"),
)
ORDER = ("--epochs", "3", "--checkpoint-every", "5", "--best", "val_accuracy", "--schedule", "cosine")


class Place:
    """A folder with the model, and `bench train` in it."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        shutil.copy(MODEL, folder)
        (folder / "faults").write_text("".join(f"{fault}\n" for fault in faults))

    def train(self, *words: str, workload: str = "build") -> tuple[int, str]:
        bench = (sys.executable, "-P", "-c", "from harness.cli import main; main()")
        done = subprocess.run(
            [*bench, "train", "--workload", f"py:trainable:{workload}", *WORK, *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
            check=False,
        )
        return done.returncode, done.stdout

    @property
    def study(self) -> Study:
        return Study(self.folder / "study")

    @property
    def cell(self) -> str:
        (cell,) = self.study.cell_ids()
        return cell

    @property
    def log(self) -> TrainingLog:
        return training_log(self.study, self.cell)

    def last_records(self) -> list[RankRecord]:
        study = self.study
        last = self.log.launches[-1].run_id
        return study.rank_records(self.cell, last)

    def checkpoints(self) -> set[str]:
        return {path.name for path in checkpoints_folder(self.study, self.cell).iterdir()}


def test_training_through_two_kills_comes_to_the_parameters_of_an_undisturbed_run(bench_in, tmp_path) -> None:
    calm = Place(tmp_path / "calm")
    code, said = calm.train(*ORDER, "--tensorboard")
    assert code == 0, said
    assert "ended: 3 epochs, 24 steps" in said
    # The rates of the live scalars are those of the log.
    started, steps = calm.log.launches[-1], calm.log.steps
    scalars = EventAccumulator(str(calm.study.scalars_folder(started.launch_id, 0, calm.cell)))
    scalars.Reload()
    before = [0, *(row.samples for row in steps)]
    rates = [
        (row.step, (row.samples - begun) / row.seconds) for row, begun in zip(steps, before, strict=False)
    ]
    assert [(one.step, one.value) for one in scalars.Scalars("samples_per_s")] == [
        (step, pytest.approx(rate)) for step, rate in rates
    ]

    # Of the second launch it is the 7th step.
    killed = Place(tmp_path / "killed", "12 rank", "7 bench")
    code, said = killed.train(*ORDER)
    assert code == -signal.SIGKILL, said
    assert "rank 1 was killed by SIGKILL" in said
    assert "continues from its last checkpoint" in said
    # What it has started ends by itself, and holds the study's lock until then.
    bench_in(killed.folder).wait_for_processes()
    code, said = killed.train(*ORDER)
    assert code == 0, said

    started = [row for row in killed.log.rows if isinstance(row, Started)]
    # The last checkpoint may not have been written when its run was killed: that of step 5 was, since the one
    # after it waits for it. Those after an epoch are the best so far.
    first, second = (row.resumed_step or 0 for row in started[1:])
    assert 5 <= first <= second <= 15
    assert [row.total_steps for row in started] == [24] * 3
    assert (killed.log.restarts, killed.log.step) == (2, 24)
    assert [record.outcome for record in killed.last_records()] == [Outcome.OK] * 2
    assert [record.parameters_hash for record in killed.last_records()] == [
        record.parameters_hash for record in calm.last_records()
    ]
    # What is written at the end is the model of the bare module, and the same of both.
    weights = [torch.load(weights_path(place.study, place.cell)) for place in (calm, killed)]
    bare = build_workload("py:trainable:build", source_folder=calm.folder).module
    before = {name: value.clone() for name, value in bare.state_dict().items()}
    bare.load_state_dict(weights[0])
    assert all(torch.equal(value, weights[1][name]) for name, value in bare.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in bare.state_dict().items())
    assert f"weights of the end: {Path('study') / 'cells' / killed.cell}" in " ".join(said.split())
    # Of a step done twice the log has one row, and its figures are those of the undisturbed run.
    losses = {row.step: row.metrics for row in killed.log.validations}
    assert losses == {row.step: row.metrics for row in calm.log.validations}
    best = killed.log.best("val_accuracy")
    assert f"step-{best[0]:09d}" in killed.checkpoints()

    assert bench_in(killed.folder)("report", "study").code == 0
    page = (killed.study.root / "report.html").read_text()
    assert "goodput" in page
    assert f"torch {torch.__version__}" in " ".join(re.sub("<[^>]*>", " ", page).split())

    # The same command has nothing left to do, and more epochs go on from there.
    code, said = killed.train(*ORDER)
    assert code == 0, said
    assert len(killed.log.launches) == 3
    code, said = killed.train("--epochs", "4", "--target", "val_loss<=1e9", "--checkpoint-every", "5")
    assert code == 0, said
    assert killed.log.launches[-1].resumed_step == 24
    assert killed.log.ended.why == "target"


@pytest.mark.long
def test_digits_reach_their_target_through_two_kills(bench_in, tmp_path) -> None:
    # In the 30th step, and in the validation after the 45th: an epoch of 1437 images has 22.5 steps of 64.
    place = Place(tmp_path / "digits", "30 rank", "25 validation")
    work = ("--dataset", "digits", "--batch-size", "32", "--optimizer", "sgd:lr=0.05")
    order = ("--epochs", "15", "--checkpoint-every", "10", "--schedule", "cosine", "--warmup-steps", "20")
    code, said = place.train(*work, *order, "--target", "val_accuracy>=0.97", workload="digits")
    assert code == 0, said
    assert said.count("rank 1 was killed by SIGKILL") == 2
    log = place.log
    assert log.ended.words == f"val_accuracy>=0.97 was reached at step {log.step}"
    assert log.validations[-1].metrics["val_accuracy"] >= 0.97
    assert log.restarts == 2
    # A checkpoint waits for the one before: that of step 10 is written when step 30 begins, and that of step
    # 30 after step 45.
    assert log.launches[1].resumed_step in (10, 20)
    assert log.launches[2].resumed_step in (30, 40)
    assert f"step-{log.step:09d}" in place.checkpoints()
    # Every step counts once, whatever was done again.
    assert [row.samples for row in log.steps] == [64 * row.step for row in log.steps]
    assert log.wasted_steps > 0

    assert bench_in(place.folder)("report", "study").code == 0
    page = (place.study.root / "report.html").read_text()
    assert page.count('id="training-gradient-norm-title"') == 1


def test_what_cannot_be_trained_is_refused_with_the_fix_and_nothing_is_lost(tmp_path) -> None:
    place = Place(tmp_path / "nan", "12 nan")
    code, said = place.train("--steps", "24", "--checkpoint-every", "5")
    assert code == 1, said
    kept = checkpoints_folder(place.study, place.cell)
    assert f"the last good checkpoint is {kept / 'step-000000010'}: lower the rate" in said
    assert "is not trained on: it would diverge again from the same checkpoint" in said
    assert len(place.log.launches) == 1
    assert "step-000000010" in place.checkpoints()
    assert all(row.failed is None for row in place.log.rows if isinstance(row, SavedCheckpoint))

    # Its first launch ends in the first step, and leaves the folder of the cell.
    other = Place(tmp_path / "other", "1 raise")
    code, said = other.train("--steps", "24", "--restarts", "0", workload="wide")
    assert code == 1, said
    assert "as it was told" in said
    shutil.copytree(kept, checkpoints_folder(other.study, other.cell))
    code, said = other.train("--steps", "24", "--restarts", "0", workload="wide")
    assert code == 1, said
    assert "belongs to another model: this one has 0.weight [32, 2]" in said
    assert other.checkpoints() == place.checkpoints()


def test_elastic_training_goes_on_on_the_nodes_that_are_left(links, tmp_path) -> None:
    place = Place(tmp_path / "nodes", "12 torchrun")
    code, said = place.train(*ORDER, "--link", "1gbit", "--elastic", "1:2")
    assert code == 0, said
    assert "continues on 1 of 2 nodes" in said
    started = [row for row in place.log.rows if isinstance(row, Started)]
    assert [(row.gpus, row.replicas) for row in started] == [(2, 2), (1, 1)]
    # That of step 10 may not have been written when its ranks were killed: the one before it was (of step 8,
    # the best, after the first epoch), since a checkpoint waits for the one before.
    assert started[0].resumed_step is None
    assert started[1].resumed_step in (8, 10)
    # The global batch is kept: as many samples in each step, and the same steps in all.
    assert [row.total_steps for row in started] == [24, 24]
    assert [row.samples for row in place.log.steps] == [8 * row.step for row in place.log.steps]


@pytest.mark.long
@pytest.mark.needs("tune")
def test_training_probes_train_with_a_validation(bench_in, tmp_path) -> None:
    """The limit is generous: the number of samples to train on bounds the batch."""
    call = ("train", "--workload", "mlp", "--dataset", "digits", "--strategy", "ddp", "--gpus", "2")
    limits = ("--device", "cpu", "--batch-size", "auto", "--memory-limit-mb", "400", "--oversubscribe")
    done = bench_in(tmp_path)(*call, *limits, "--steps", "4", "--out", "study")
    assert done.code == 0, done.stderr
    inner = Study(tmp_path / "study" / "batch")
    logs = [training_log(inner, cell) for cell in inner.cell_ids()]
    assert any(log.validations for log in logs)
    assert not list(inner.root.glob("cells/*/training/checkpoints/step-*"))
    [batch] = Study(tmp_path / "study").plan(1).request.batches or ()
    assert batch.basis == "measured"
