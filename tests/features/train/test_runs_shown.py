"""Figures from the logs of training runs: recoveries, time to a target, and their page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import a_cell
from launching import a_launch, an_attempt
from training_rows import ORDER, at, started, steps, validated

from harness.features.train.files import log_path
from harness.features.train.log import (
    Ended,
    Row,
    SavedCheckpoint,
    TrainingLog,
    TrainingLogWriter,
    Validated,
)
from harness.features.train.section import accuracy_section, training_section
from harness.features.train.trained import (
    Recovery,
    Spread,
    TrainedCell,
    final_losses,
    races,
    reach,
    recoveries,
    spread,
)
from harness.reporting.assumptions import CostFlags
from harness.reporting.report import write_report
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from reports.analysis.next_run import next_run
from reports.page.render import render_figures
from reports.page.section import Table
from results.launch import Attempt, Slot
from results.outcome import Outcome


def not_finite(second: float, step: int) -> Validated:
    names = ("val_loss",)
    return Validated(at=at(second), step=step, epoch=step / 10, metrics={}, not_finite=names, seconds=0.5)


def attempt(launch: str, began: float | None, ended: float, **more: Any) -> Attempt:
    begun = None if began is None else at(began)
    return an_attempt(launch_id=launch, started_at=begun, ended_at=at(ended), exit_code=1, **more)


SAVED = SavedCheckpoint(at=at(21), step=20, seconds=0.25)
KILLED: list[Row] = [
    started(10, "first"),
    steps(20, 20),
    SAVED,
    steps(30, 40),
    steps(35, 45),
    # A rank is killed at 36 s, the launch ends at 38.5 s, the next starts at 40 s.
    started(47, "second", resumed=20),
    steps(48, 21),
    steps(60, 100),
    Ended(at=at(61), step=100, why="steps", words="all 100 steps"),
]
ATTEMPTS = {
    "run-first": attempt(
        "first", 4, 38.5, reasons={"run-first": "rank 1 was killed"}, heartbeats={"0": at(35.5), "1": at(30)}
    ),
    "run-second": attempt("second", 40, 62),
}


def test_a_recovery_is_told_from_the_last_sign_of_life() -> None:
    (found,) = recoveries(TrainingLog(tuple(KILLED)), ATTEMPTS)
    assert found == Recovery(
        noticed_s=3.0,
        started_s=4.5,
        ready_s=11.5,
        first_step_s=12.5,
        step=45,
        steps_lost=25,
        replicas=2,
        reason="rank 1 was killed",
    )


def test_unrecorded_moments_of_a_recovery_are_unknown() -> None:
    # The supervisor was killed too: nobody has written how the first launch ended, and the second still runs.
    (found,) = recoveries(TrainingLog(tuple(KILLED[:6])), {})
    assert (found.noticed_s, found.started_s, found.ready_s, found.first_step_s) == (None, None, 12.0, None)
    assert found.reason is None
    # Workers that torchrun has started again are of the same launch, which has not ended.
    again: list[Row] = [started(10, "one"), steps(20, 20), started(27, "one", resumed=None), steps(28, 1)]
    (found,) = recoveries(
        TrainingLog(tuple(again)), {"run-one": attempt("one", 4, 60, heartbeats={"0": at(59)})}
    )
    assert (found.ready_s, found.first_step_s, found.steps_lost) == (7.0, 8.0, 20)


def test_going_on_after_an_end_is_no_recovery() -> None:
    further: list[Row] = [*KILLED, started(100, "third", resumed=100)]
    assert len(recoveries(TrainingLog(tuple(further)), ATTEMPTS)) == 1


def trained(
    seed: int, *accuracies: float, compression: str = "none", pace: float = 1.0, ended: bool = True
) -> TrainedCell:
    """Validated every 10 steps, each row of which took `pace` seconds."""
    rows: list[Row] = [started(0, "only")]
    step = 0
    for number, accuracy in enumerate(accuracies, start=1):
        step = 10 * number
        rows += [steps(number, step, seconds=pace), validated(number, step, accuracy)]
    if ended:
        rows.append(Ended(at=at(60), step=step, why="steps", words="all steps"))
    cell = a_cell(seed=seed, compression=compression, dataset="digits")
    return TrainedCell(cell=cell, log=TrainingLog(tuple(rows)))


def test_time_to_the_target_is_of_the_steps_that_count() -> None:
    one = trained(3, 0.5, 0.92, 0.8, 0.95, pace=2.0)
    target = one.target
    assert target is not None
    found = reach(one, target)
    # The second validation is the first that is good enough, after 20 steps of 8 samples.
    assert (found.seed, found.reached, found.seconds, found.samples) == (3, True, 4.0, 160)
    assert not reach(trained(0, 0.5, 0.6), target).reached
    # Steps that were lost and done again count once: 20 + 1 + 79 steps in 3 rows of a second.
    again: list[Row] = [*KILLED[:-1], validated(60, 100, 0.9)]
    assert reach(TrainedCell(cell=one.cell, log=TrainingLog(tuple(again))), target).seconds == 3.0


@pytest.mark.parametrize(
    ("reached", "never", "so_far", "median", "low", "high"),
    [
        ([3.0, 1.0, 2.0], 0, [], 2.0, 1.0, 3.0),
        ([4.0], 0, [], 4.0, 4.0, 4.0),
        # One of three never: the longer of the other two is the median.
        ([3.0, 1.0], 1, [], 3.0, 1.0, None),
        ([1.0], 1, [], None, 1.0, None),
        ([], 2, [], None, None, None),
        # One goes on, and takes longer than the others already: it is as good as never for the median.
        ([3.0, 1.0], 0, [4.0], 3.0, 1.0, None),
        # It may still be anywhere from 2 on.
        ([3.0, 1.0], 0, [2.0], None, 1.0, None),
        # It may be the first.
        ([3.0, 1.0], 0, [0.5], None, None, None),
    ],
)
def test_a_run_that_never_reached_the_target_is_longer_than_all_others(
    reached, never, so_far, median, low, high
) -> None:
    assert spread(reached, never, so_far) == Spread(median=median, low=low, high=high, open=bool(so_far))


RUNS = [
    *(trained(seed, *[0.5] * wait, 0.9, compression="topk:0.01") for seed, wait in ((0, 3), (1, 5))),
    trained(2, 0.5, 0.6, compression="topk:0.01"),
    *(trained(seed, *[0.5] * wait, 0.9) for seed, wait in ((0, 1), (1, 2), (2, 3))),
    *(trained(seed, 0.1, compression="powersgd:2") for seed in (0, 1)),
    trained(0, 0.95, compression="int8"),
]


def test_ways_are_compared_with_the_one_that_compresses_nothing() -> None:
    (race,) = races(RUNS)
    assert (race.target, [way.label for way in race.ways]) == (
        "val_accuracy>=0.9",
        ["ddp", "ddp + topk:0.01", "ddp + powersgd:2", "ddp + int8"],
    )
    dense, topk, powersgd, int8 = race.ways
    # Rows of a second: after 2, 3 and 4 of them, and with topk after 4, 6 and never.
    assert dense.seconds == Spread(median=3.0, low=2.0, high=4.0)
    assert topk.seconds == Spread(median=6.0, low=4.0, high=None)
    assert topk.samples == Spread(median=480, low=320, high=None)
    assert [way.reached for way in race.ways] == [3, 2, 0, 1]
    assert race.ratio(topk) == Spread(median=2.0, low=1.0, high=None)
    assert race.ratio(int8) == Spread(median=1 / 3, low=1 / 4, high=1 / 2)
    assert race.ratio(dense) is race.ratio(powersgd) is None


def test_a_run_that_has_not_ended_has_not_missed_the_target() -> None:
    # Runs of 2 and 4 s, and one that goes on after 1, 3 or 5 s.
    ways = [
        races([trained(0, 0.5, 0.9), trained(1, 0.5, 0.5, 0.5, 0.9), trained(2, *[0.5] * n, ended=False)])
        for n in (1, 3, 5)
    ]
    found = [race.ways[0] for (race,) in ways]
    assert [(way.reached, len(way.never), len(way.unfinished)) for way in found] == [(2, 0, 1)] * 3
    assert [(way.seconds.median, way.seconds.low) for way in found] == [(None, None), (None, 2.0), (4.0, 2.0)]
    assert [(way.seconds.high, way.seconds.open) for way in found] == [(None, True)] * 3


def test_other_work_is_another_race_and_one_run_is_none() -> None:
    other = TrainedCell(cell=a_cell(gpus=4, dataset="digits"), log=RUNS[0].log)
    assert [len(race.ways) for race in races([*RUNS, other])] == [4]


def test_throughput_is_in_the_unit_of_the_workload(planted) -> None:
    planted.plan()
    # 16 samples in 2 s, each of 32 tokens.
    begun = msgspec.structs.replace(started(0, "only"), unit="tokens", units_per_sample=32)
    one = TrainedCell(cell=a_cell(), log=TrainingLog((begun, steps(2, 2, seconds=2.0))))
    section = training_section(replace(planted.analysed([]), added={"training": {"0": one}}))
    overview = next(block for block in section.blocks if isinstance(block, Table))
    assert "256 tokens/s" in overview.data.texts[0]


@pytest.mark.parametrize(("seeds", "words"), [((0, 1), "median over seeds"), ((0,), "of one seed each")])
def test_a_median_over_seeds_is_said_where_there_are_several(planted, seeds, words) -> None:
    planted.plan()
    ways = [trained(seed, 0.95, compression=name) for name in ("none", "int8") for seed in seeds]
    study = planted.analysed([])
    added = {"training": {str(n): way for n, way in enumerate(ways)}}
    section = accuracy_section(replace(study, added=added))
    [table] = [block for block in section.blocks if isinstance(block, Table)]
    assert words in table.caption


def plant(study: Any, folder: Path) -> None:
    """Two seeds of each of two ways, all interrupted once, and no measured run."""
    for compression in ("none", "topk:0.01"):
        for seed in (0, 1):
            fields = {"workload": "mlp", "dataset": "digits", "compression": compression, "seed": seed}
            (cell,) = study.series("weak", "ddp", [2], batch=32, **fields)
            writer = TrainingLogWriter(log_path(study.study, cell.id))
            late = compression != "none" and seed == 1
            middle = [validated(49, 21, 0.5), *([] if late else [validated(60.5, 100, 0.93)])]
            failed = SavedCheckpoint(
                at=at(60), step=90, seconds=0.5, failed=f"disk full at {folder}", best=False
            )
            norm = msgspec.structs.replace(steps(48, 21), gradient_norm=1.5)
            bad = not_finite(59, 60)
            for row in (*KILLED[:6], norm, middle[0], bad, KILLED[7], failed, *middle[1:], KILLED[8]):
                writer.write(row)
    study.plan(repeats=1, order=ORDER.stored)
    for one in ATTEMPTS.values():
        slot = Slot(cell_id=study.study.cell_ids()[0], run_id=f"run-{one.launch_id}", repeat=1)
        study.study.add_launch(a_launch(launch_id=one.launch_id, slots=(slot,)))
        study.study.add_attempt(one)


_CURVES = ("loss", "val-loss", "gradient-norm", "throughput")


def test_the_page_of_a_training_study_tells_curves_restarts_checkpoints_and_time_to_accuracy(
    planted, tmp_path
) -> None:
    plant(planted, tmp_path)
    root = planted.study.root
    (figures,) = read_figures([str(root)], CostFlags(), Console())
    page = render_figures(figures)
    assert [page.count(f'id="training-{name}-title"') for name in _CURVES] == [1] * 4
    assert "ddp, seed 0: val_loss was not finite (NaN or infinity) in 1 validation, first at step 60" in page
    for words in (
        "4 training runs, 4 of them ended by themselves",
        "rank 1 was killed",
        "12.5 s",
        "disk full at",
        "ddp + topk:0.01",
        "1 of 2",
        "half or more never",
        "seed 1 never reached the target",
        "Target: 0.9.",
        "Goodput",
    ):
        assert words in page, words
    assert "Nothing succeeded" not in page
    assert "nothing is missing: no run failed" in page
    (redacted,) = read_figures([str(root)], CostFlags(), Console(), redact=True)
    assert str(tmp_path) not in render_figures(redacted)


def test_a_run_that_diverged_is_over_unless_a_later_launch_goes_on(planted, new_timing) -> None:
    """One of three seeds reached the target, and two diverged after step 10; one of these was resumed."""
    fields = {"workload": "mlp", "dataset": "digits"}
    cells = [planted.series("weak", "ddp", [2], batch=32, seed=seed, **fields)[0] for seed in range(3)]
    planted.plan(repeats=1, order=ORDER.stored)
    for cell, diverged in zip(cells, (False, True, True), strict=True):
        outcome = Outcome.DIVERGED if diverged else Outcome.OK
        run_id = planted.run(cell, new_timing(step_ms=1.0, outcome=outcome))
        writer = TrainingLogWriter(log_path(planted.study, cell.id))
        writer.write(msgspec.structs.replace(started(0, "first"), run_id=run_id))
        writer.write(steps(1, 10))
        writer.write(validated(2, 10, 0.5 if diverged else 0.93))
        if not diverged:
            writer.write(Ended(at=at(3), step=10, why="target", words="the target"))
        if cell is cells[2]:
            writer.write(started(60, "second", resumed=10))
    (figures,) = read_figures([str(planted.study.root)], CostFlags(), Console())
    (race,) = races(figures.added["training"].values())
    (way,) = race.ways
    assert [[run.seed for run in runs] for runs in (way.never, way.unfinished)] == [[1], [2]]
    section = training_section(figures)
    overview = next(block for block in section.blocks if isinstance(block, Table))
    assert [row[-1] for row in overview.data.texts] == ["the target", "diverged", "has not ended"]


def test_the_page_of_a_training_that_never_began_says_why(planted, new_timing, capsys) -> None:
    (cell,) = planted.series("weak", "ddp", [2], batch=8)
    planted.plan(repeats=1, order=ORDER.stored)
    planted.run(cell, new_timing(step_ms=1.0, outcome=Outcome.CRASHED, reason="it fell over"))
    assert next_run(planted.analysed()) is None
    (figures,) = read_figures([str(planted.study.root)], CostFlags(), Console())
    write_report(planted.study, figures, Console())
    said = capsys.readouterr().out
    assert "Cells with a figure: 0 of 1; without one: 1 crashed" in said
    assert f"--cell {cell.id}" in said
    page = (planted.study.root / "report.html").read_text()
    assert "Nothing succeeded" in page
    assert "it fell over" in page


def test_the_final_loss_is_the_mean_of_the_last_fifth_of_all_steps(planted) -> None:
    """The last 20 of 100 steps are 15 of a row at 2 and 5 of a row at 1: (15 * 2 + 5) / 20 is 1.75."""
    (cell,) = planted.points("ddp", {1: [10.0]})
    planted.plan()
    runs = planted.study.results()
    assert final_losses(planted.study, runs) == {}
    writer = TrainingLogWriter(log_path(planted.study, cell.id))
    for row in (started(0, "a"), steps(1, 50, loss=9.0), steps(2, 95, loss=2.0)):
        writer.write(row)
    assert final_losses(planted.study, runs) == {}
    diverged = [msgspec.structs.replace(runs[0], outcome=Outcome.DIVERGED)]
    assert final_losses(planted.study, diverged) == {100: None}
    writer.write(steps(3, 100, loss=1.0))
    writer.write(Ended(at=at(4), step=100, why="steps", words="100 steps"))
    assert final_losses(planted.study, runs) == {100: 1.75}
