"""Decisions and refusals of `bench train`, without a launch: every figure is worked out by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from builders import a_cell
from torch.optim import Optimizer, lr_scheduler
from training_rows import at, started, steps, validated

from harness.cli import run
from harness.features.train.call import Train
from harness.features.train.conduct import FailedLaunch, lost_checkpoints, nodes_left, pause_s, why_not_again
from harness.features.train.files import checkpoints_folder, log_path
from harness.features.train.log import (
    Ended,
    SavedCheckpoint,
    Started,
    TrainingLog,
    TrainingLogWriter,
)
from harness.features.train.order import TrainOrder
from harness.features.train.progress import TrainingPace, left_s, standing
from harness.features.train.worker.loop import Rate
from harness.features.train.worker.rules import (
    cell_on,
    is_best,
    out_of_patience,
    rate_at,
    rate_scale,
    row_steps,
    total_steps,
)
from harness.launch.conduct import Deadline
from harness.launch.follow import LaunchState
from harness.matrix import Matrix
from harness.plan.study_file import StudyFile
from harness.terminal.console import Standing
from results.checkpoint import Checkpoint, LaidOut
from results.errors import UsageError
from results.outcome import Ending, Outcome
from results.store import Study
from strategies.saving.run_folder import RunFolder, sum_of


def test_steps_follow_from_epochs_wherever_training_goes_on() -> None:
    order = TrainOrder(epochs=3)
    # 100 samples, 8 a step: 37.5 steps, the last one in full.
    assert total_steps(order, step=0, samples=0, per_epoch=100, per_step=8) == 38
    assert total_steps(order, step=13, samples=104, per_epoch=100, per_step=8) == 38
    # 196 samples are left for steps of 4.
    assert total_steps(order, step=13, samples=104, per_epoch=100, per_step=4) == 13 + 49
    assert total_steps(order, step=40, samples=320, per_epoch=100, per_step=8) == 40
    assert total_steps(TrainOrder(steps=7), step=0, samples=0, per_epoch=None, per_step=8) == 7
    with pytest.raises(UsageError, match="do not say how long an epoch is"):
        total_steps(order, step=0, samples=0, per_epoch=None, per_step=8)


def test_a_schedule_warms_up_and_falls_to_nothing() -> None:
    plain = rate_at(TrainOrder(steps=10), 10, 0.5)
    assert {plain(step) for step in range(10)} == {0.5}
    factor = rate_at(TrainOrder(steps=12, schedule="cosine", warmup_steps=3), 12, 2.0)
    assert [factor(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert factor(12) == pytest.approx(0.0)
    # A third of the way down the cosine: (1 + cos 60 degrees) / 2.
    assert factor(6) == pytest.approx(2 * 0.75)


def test_patience_counts_validations_since_the_best_one() -> None:
    assert not out_of_patience([3.0, 2.0, 2.5], "val_loss", 2)
    assert out_of_patience([3.0, 2.0, 2.5, 2.0], "val_loss", 2)
    assert out_of_patience([0.5, 0.4], "val_accuracy", 1)
    assert not out_of_patience([0.4, 0.5], "val_accuracy", 1)
    assert not out_of_patience([0.4, 0.4, 0.4], "val_accuracy", None)
    assert not out_of_patience([], "val_loss", 1)
    # NaN and infinity are no better value, nor a bar that no other value takes.
    nan, inf = float("nan"), float("inf")
    assert not out_of_patience([nan, 3.0, 2.0], "val_loss", 2)
    assert out_of_patience([3.0, nan, -inf], "val_loss", 2)
    assert out_of_patience([nan, nan], "val_loss", 2)
    assert not out_of_patience([nan], "val_loss", 2)


def test_the_best_value_is_finite() -> None:
    nan, inf = float("nan"), float("inf")
    assert is_best(2.0, [nan, 3.0, 2.0], "val_loss")
    assert is_best(0.5, [inf, 0.4, 0.5], "val_accuracy")
    assert not is_best(3.0, [2.0, 3.0], "val_loss")
    assert not is_best(-inf, [2.0, -inf], "val_loss")
    assert not is_best(nan, [nan], "val_loss")


def test_a_row_has_the_steps_of_a_second_and_at_least_ten() -> None:
    assert [row_steps(seconds) for seconds in (0.01, 0.03, 2.0, 0.0)] == [100, 34, 10, 10]


def test_another_number_of_workers_keeps_the_global_batch_or_scales_the_rate() -> None:
    cell = a_cell(dataset="digits", gpus=4)
    two, three, one = (cell_on(cell, gpus, "global") for gpus in (2, 4, 1))
    assert (two.micro_batch, two.accumulation, two.global_batch) == (8, 2, 32)
    assert three is cell
    assert (one.micro_batch, one.accumulation, one.global_batch) == (8, 4, 32)
    # More workers than planned: the micro-batch shrinks.
    assert (cell_on(cell, 16, "global").micro_batch, cell_on(cell, 16, "global").accumulation) == (2, 1)
    with pytest.raises(UsageError, match=r"32 cannot be divided over 3 replicas: .* --batch-rule rate"):
        cell_on(cell, 3, "global")
    scaled = cell_on(cell, 3, "rate")
    assert (scaled.micro_batch, scaled.accumulation) == (8, 1)
    assert (rate_scale(cell, scaled, "rate"), rate_scale(cell, two, "global")) == (0.75, 1.0)


def test_a_launch_follows_a_failed_one_unless_it_would_fail_alike() -> None:
    killed = FailedLaunch(10, Ending(Outcome.CRASHED, "rank 1 was killed by SIGKILL"))
    assert why_not_again([killed], restarts=3) is None
    assert why_not_again([killed, killed], restarts=3) == "it failed twice in the same way at step 10"
    later = FailedLaunch(20, Ending(Outcome.CRASHED, killed.ending.reason))
    assert why_not_again([killed, later], restarts=3) is None
    assert (
        why_not_again([killed, later], restarts=1)
        == "no more launches may follow a failed one (--restarts 1)"
    )
    # Numbers in the reason are those of ranks, steps and ports.
    alike = FailedLaunch(10, Ending(Outcome.CRASHED, "rank 0 was killed by SIGKILL"))
    assert why_not_again([killed, alike], restarts=3) == "it failed twice in the same way at step 10"
    # A loss that was not finite is so again after the same steps.
    diverged = FailedLaunch(12, Ending(Outcome.DIVERGED, "the loss is not finite"))
    assert why_not_again([diverged], restarts=3) == "it would diverge again from the same checkpoint"
    refused = FailedLaunch(0, Ending(Outcome.SKIPPED, "rank 0: --epochs 2: these data do not say"))
    assert why_not_again([refused], restarts=3) is not None
    # The cluster's fault, not the program's.
    lost = FailedLaunch(10, Ending(Outcome.NODE_FAILED, "a node failed"))
    assert why_not_again([lost, lost], restarts=3) is None
    # Elastic: one node less for each that was lost, and never fewer than the least.
    assert [nodes_left((1, 3), 3, [killed] + [lost] * times) for times in range(4)] == [3, 2, 1, 1]
    assert [pause_s(failures) for failures in (1, 2, 3, 20)] == [1.0, 2.0, 4.0, 60.0]


def _begin(launch: str = "r", resumed: int | None = None) -> Started:
    return started(0, launch, resumed, TrainOrder(steps=400))


ROWS = [steps(10 * n, 40 * n, 1 / n, seconds=8.0) for n in (1, 2, 3)]
CHECKED = validated(30, 120, 0.875)
LINE = "step 120/400, loss 0.3333, val_accuracy 0.875, val_loss 0.125, 40 samples/s, epoch 12"


def test_the_live_line_has_step_loss_throughput_and_the_time_left() -> None:
    log = TrainingLog((_begin(), *ROWS, CHECKED))
    assert standing(log, "run-r") == LINE
    # 80 steps took 20 s with all that came between them, and 280 are left.
    assert left_s(log, "run-r") == 70
    assert standing(log, "another run") == ""
    assert left_s(log, "another run") is None


def test_the_live_line_reads_what_was_appended(tmp_path) -> None:
    shown: list[str] = []

    class Line:
        def show(self, standing: Standing) -> None:
            shown.append(standing.doing)

    study = Study(tmp_path)
    path = log_path(study, "cell")
    writer = TrainingLogWriter(path)
    clock = iter(range(0, 200, 10))
    deadline = Deadline(None, "over")
    pace = TrainingPace(Line(), study, {"cell": "mlp"}, deadline=deadline, clock=lambda: next(clock))
    state = LaunchState(cell_id="cell", started=["run-r"])
    for row in (_begin(), *ROWS, CHECKED):
        writer.write(row)
    pace.report(state)
    assert shown[-1] == LINE
    # What was read is not read again: it may be anything by now.
    path.write_bytes(b"-" * (path.stat().st_size - 1) + b"\n")
    writer.write(SavedCheckpoint(at=at(31), step=120, seconds=1, failed="the disk is full"))
    pace.report(state)
    assert shown[-1] == f"{LINE}, no checkpoint of step 120: the disk is full"
    # What cannot be read for a while changes nothing.
    path.rename(tmp_path / "away")
    path.mkdir()
    pace.report(state)
    assert shown[-1] == shown[-2]
    path.rmdir()
    (tmp_path / "away").rename(path)
    # Another launch goes on from step 80, which was not validated.
    state.started.append("run-next")
    writer.write(_begin("next", 80))
    writer.write(ROWS[2])
    pace.report(state)
    assert shown[-1] == "step 120/400, loss 0.3333, epoch 12"


def step_lr(optimizer: Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, steps // 4, gamma=0.5)


def one_cycle(optimizer: Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps + 1)


def in_parts(optimizer: Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cool = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 3)
    return lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[3])


@pytest.mark.parametrize("make", [step_lr, one_cycle, in_parts])
def test_rates_are_those_of_the_workloads_schedule_wherever_a_launch_begins(make) -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    schedule, rates = make(plain, 12), list[float]()
    for _ in range(12):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        schedule.step()
    assert len(set(rates)) > 2
    for begun in (0, 7):
        trained = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        rate = Rate(trained)
        # As the optimizer of a checkpoint has them.
        trained.load_state_dict(plain.state_dict())
        rate.follow(make, 12)
        assert [rate.put(step) for step in range(begun, 12)] == rates[begun:]


def test_a_schedule_that_goes_by_a_metric_is_refused_and_so_is_an_unknown_metric() -> None:
    trained = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match="made a ReduceLROnPlateau"):
        Rate(trained).follow(lambda optimizer, steps: lr_scheduler.ReduceLROnPlateau(optimizer), 12)
    order = TrainOrder(steps=5, best="f1", target="word_error<=0.1")
    order.require_metrics(["f1", "word_error"])
    with pytest.raises(UsageError, match="unknown metric 'f1'; metrics are val_loss, val_accuracy, loss"):
        TrainOrder(steps=5, best="f1").require_metrics(())
    with pytest.raises(UsageError, match="a target for word_error needs <="):
        TrainOrder(steps=5, target="word_error>=0.1")


def test_an_ended_training_without_a_whole_checkpoint_is_lost(tmp_path) -> None:
    study = Study(tmp_path)
    writer = TrainingLogWriter(log_path(study, "cell"))
    run = RunFolder(checkpoints_folder(study, "cell"))
    for row in (_begin(), *ROWS):
        writer.write(row)
    # Nothing was written before the launch ended: the next one begins anew.
    assert lost_checkpoints(study, "cell") is None
    begun = run.begin(120, "session", ())
    (begun / "values").write_bytes(b"0123")
    where = LaidOut(strategy="ddp", compression="none", collective="default", ranks=2)
    manifest = Checkpoint(
        step=120,
        session="session",
        laid_out=where,
        optimizer="sgd",
        own_replicas=False,
        conditions={},
        files={"values": sum_of(begun / "values")},
    )
    whole = run.finish(begun, manifest)
    assert lost_checkpoints(study, "cell") is None
    # The only one is torn, then training has ended as well, then all are gone.
    (whole / "values").write_bytes(b"01")
    assert lost_checkpoints(study, "cell") is not None
    writer.write(Ended(at=at(60), step=120, why="steps", words="120 steps"))
    shutil.rmtree(run.path)
    assert f"rm -r {run.path.parent}" in (lost_checkpoints(study, "cell") or "")


CALL = ("train", "--workload", "mlp", "--gpus", "2", "--strategy", "ddp")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (CALL, "--epochs N and --steps N: neither was given"),
        ((*CALL, "--steps", "9", "--target", "val_accuracy>=0.9"), "synthetic data have no held-out samples"),
        ((*CALL, "--steps", "9", "--target", "f1>=1"), "unknown metric 'f1'; metrics are val_loss"),
        (
            (*CALL, "--epochs", "1", "--dataset", "digits,synthetic"),
            "synthetic data have no epochs; give --steps",
        ),
        *(
            pytest.param((*CALL, "--steps", "9", "--launcher", name), said, marks=pytest.mark.needs(name))
            for name, said in (
                ("manual", "bench train has no --launcher manual"),
                ("kubernetes", "bench train has no --launcher kubernetes"),
                ("slurm", "give its limit, such as --time 2h"),
            )
        ),
        ((*CALL, "--steps", "9", "--elastic", "2"), "--elastic '2': write MIN:MAX nodes, such as 1:2"),
        ((*CALL, "--steps", "9", "--elastic", "1:2", "--oversubscribe"), "such as --gpus 2 --link 1gbit has"),
        *(
            pytest.param(
                (*CALL, "--steps", "9", "--elastic", "1:2", "--launcher", name),
                "--elastic works only with virtual nodes of this host so far: leave --launcher "
                f"{name} or --elastic out",
                marks=pytest.mark.needs(name),
            )
            for name in ("slurm", "kubernetes", "manual")
        ),
        (("train", ".", "--steps", "9"), "is not the folder of a cell: name one such as runs/STUDY/cells/"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    words, told, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(list(words)) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bench_matrix_names_the_command_that_has_an_option(capsys) -> None:
    assert run(["matrix", "--epochs", "3"]) == 2
    assert "there is no option --epochs: bench train has it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        # On 2 nodes the accumulation grows to 2, which this option excludes.
        ("ddp:static_graph=true", r"continue on 2 workers \(micro-batch 8, accumulation 2\): ddp:static"),
        ("ddp", r"32 cannot be divided over 3 replicas"),
    ],
)
def test_elastic_training_is_refused_where_a_size_on_the_way_is_impossible(
    strategy, told, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.matrix.link_obstacle", lambda: None)
    options = StudyFile(
        workload="mlp", gpus="4", strategy=strategy, link="1gbit", batch_size="8", oversubscribe=True
    )
    train = Train(options, TrainOrder(steps=9, elastic=(2, 4)))
    with pytest.raises(UsageError, match=told):
        train._plans(Study(train._root))


def test_a_study_measures_or_trains(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = StudyFile(name="demo", workload="mlp", gpus="2", strategy="ddp", oversubscribe=True)
    matrix = Matrix(options, study_file=None)
    study = Study(tmp_path / "runs" / "demo")
    (plan,) = matrix._kept_plans(study)
    order = TrainOrder(steps=9)
    with pytest.raises(UsageError, match=r"cells in .* are measured, .* another folder with --name or --out"):
        Train(options, order)._kept_plans(study)
    # The cell itself is trained in a study of its own, exactly as it is.
    folder = study.cell_folder(plan.cells[0].id)
    with pytest.raises(UsageError, match="a cell is trained as it is: leave out --gpus"):
        Train(StudyFile(gpus="2"), order, cell=folder)
    train = Train(StudyFile(oversubscribe=True), order, cell=folder)
    (made,) = train._plans(Study(train._root))
    assert made.cells == plan.cells
    assert (made.order, made.request.repeats) == (order.stored, 1)
    assert train._root == Path("runs") / f"train-{plan.cells[0].id}"
