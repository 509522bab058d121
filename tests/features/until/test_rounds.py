"""A study that grows by rounds, with planted step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from builders import an_environment
from msgspec.structs import replace as with_fields
from study_fixtures import PlantedStudy, Timing

from harness.features.until.rounds import grow, growing
from harness.launch.tally import Conditions, Tally, study_tally
from harness.matrix import Matrix, Rounds
from harness.plan.study_file import StudyFile
from harness.terminal.console import QuietConsole
from reports.analysis.size_to_buy import sizes_to_buy
from reports.analysis.study import analyse
from reports.page.render import render_figures
from results.errors import UsageError
from results.job import RunOptions
from results.outcome import Outcome
from results.plan import Plan

STEP_MS = {1: 100.0, 2: 104.0, 4: 108.0, 8: 190.0, 16: 400.0}
"""Growing pays up to 4."""


class Cluster:
    """Runs what is left of plans, with planted step times of 1 % noise."""

    def __init__(self, root: Path, *, fails: int | None = None, most: int | None = None) -> None:
        """The size `fails` crashes; after `most` runs the call ends as if it was interrupted."""
        maker = PlantedStudy(root / "plan", device="cuda")
        maker.series("weak", "single", [1], batch=8, optimizer="sgd:lr=0.1")
        maker.series("weak", "ddp", [size for size in STEP_MS if size > 1], batch=8, optimizer="sgd:lr=0.1")
        self.plan = maker.plan()
        self.planted = PlantedStudy(root / "study", device="cuda")
        self.study = self.planted.study
        self.most, self._fails = most, fails
        self._random = random.Random(5)

    def tallies(self, plans: Sequence[Plan]) -> list[Tally]:
        conditions = Conditions(code_hash=an_environment().code.code_hash)
        results = self.study.results()
        return [study_tally(self.study, plan, results, conditions, RunOptions()) for plan in plans]

    def run(self, plans: Sequence[Plan]) -> int | None:
        for plan, so_far in zip(plans, self.tallies(plans), strict=True):
            if all(one.round != plan.round for one in self.study.plans()):
                self.study.add_plan(plan)
            for launch in so_far.planned("launch"):
                for cell in launch.cells:
                    if self.most == 0:
                        return 130
                    self.most = None if self.most is None else self.most - 1
                    ms = STEP_MS[cell.gpus] * self._random.lognormvariate(0, 0.01)
                    crash = (
                        {"outcome": Outcome.CRASHED, "reason": "a bug"} if cell.gpus == self._fails else {}
                    )
                    self.planted.run(cell, Timing(step_ms=ms, repeat=launch.repeat, **crash), sync=False)
            self.study.collect()
        return None

    def grow(
        self, run: Callable[[Sequence[Plan]], int | None] | None = None
    ) -> tuple[list[Plan], int | None]:
        rounds = Rounds(tallies=self.tallies, hours=lambda plans: 1.0, run=run, console=QuietConsole())
        return grow(self.study, [self.plan], 0.95, rounds)

    @property
    def runs(self) -> Mapping[int, int]:
        return {cell.gpus: len(self.study.run_ids(cell.id)) for cell in self.study.plans()[-1].cells}

    @property
    def rounds(self) -> int:
        return len(self.study.plans())


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    return Cluster(tmp_path)


def test_a_study_stops_at_its_knee_and_leaves_larger_sizes_out(cluster) -> None:
    plans, exit_code = cluster.grow(cluster.run)
    assert exit_code is None
    figures = analyse("study", cluster.study.plans(), cluster.study.results())
    (ladder,) = growing(figures, plans)
    assert (ladder.step.end, ladder.step.knee.size) == ("certain", 4)
    assert cluster.runs[16] == 0
    assert min(cluster.runs[size] for size in (2, 4, 8)) >= 3
    assert figures.failures == ()
    (curve,) = [one for one in figures.curves if one.key.strategy == "ddp"]
    assert [(gap.gpus, gap.skipped) for gap in curve.gaps] == [(16, True)]
    (size,) = [one for one in sizes_to_buy(figures) if one.choice]
    assert (size.choice.gpus, size.confidence) == (4, "high"), "the odds count the runs already"
    page = render_figures(figures)
    assert 'id="growth"' in page
    assert "adaptive" in page


def test_the_runs_of_a_round_have_its_number(cluster) -> None:
    cluster.grow(cluster.run)
    numbers = sorted({run.repeat for run in cluster.study.results()})
    assert numbers == list(range(1, cluster.rounds + 1))


def test_an_interrupted_round_is_completed_before_the_next_one(cluster, tmp_path) -> None:
    whole = Cluster(tmp_path / "whole")
    whole.grow(whole.run)
    cluster.most = 4
    assert cluster.grow(cluster.run)[1] == 130
    begun = cluster.rounds
    plans, _ = cluster.grow()
    assert plans[0].round == cluster.study.plans()[-1].round, "the round lacks runs"
    cluster.most = None
    cluster.grow(cluster.run)
    assert cluster.rounds >= begun
    assert {size for size, runs in cluster.runs.items() if runs} == {
        size for size, runs in whole.runs.items() if runs
    }


def test_a_study_that_has_stopped_plans_nothing_more(cluster) -> None:
    cluster.grow(cluster.run)
    before = cluster.rounds
    plans, _ = cluster.grow(cluster.run)
    assert cluster.rounds == before
    assert not any(so_far.planned("launch") for so_far in cluster.tallies(plans))


def test_another_size_continues_the_rounds(cluster) -> None:
    cluster.grow(cluster.run)
    before = cluster.rounds
    single, series = cluster.plan.series
    series = with_fields(series, cells=series.cells[:-1])
    cluster.plan = with_fields(cluster.plan, cells=cluster.plan.cells[:-1], series=(single, series))
    plans, _ = cluster.grow()
    assert plans[0].round.number == before
    assert plans[0].round.runs == {cell.id: cluster.runs[cell.gpus] for cell in cluster.plan.cells}


def test_one_size_cannot_grow(tmp_path) -> None:
    options = StudyFile(
        gpus=[2], strategy=["ddp"], baseline=False, until="certain", out=str(tmp_path / "out")
    )
    with pytest.raises(UsageError, match="fewer than two"):
        Matrix(options, study_file=None).run(report=False)
    assert not (tmp_path / "out").exists()


def test_without_a_run_the_first_round_is_planned_and_nothing_is_written(cluster) -> None:
    (plan,), _ = cluster.grow()
    sizes = sorted(cell.gpus for cell in plan.cells if plan.wanted(cell.id))
    assert (sizes, plan.round.number) == ([1, 2], 1)
    assert cluster.study.plans() == []


def test_a_failed_size_beside_the_knee_leaves_it_uncertain(tmp_path) -> None:
    cluster = Cluster(tmp_path, fails=8)
    plans, _ = cluster.grow(cluster.run)
    (ladder,) = growing(analyse("study", cluster.study.plans(), cluster.study.results()), plans)
    assert ladder.step.end == "hole"
    assert "8" in ladder.sentence


def test_runs_of_a_full_matrix_count(cluster) -> None:
    cluster.study.add_plan(cluster.plan)
    cells = {cell.gpus: cell for cell in cluster.plan.cells}
    for size, ms in STEP_MS.items():
        for repeat in (1, 2, 3):
            timing = Timing(step_ms=ms * (1 + repeat / 1000), repeat=repeat)
            cluster.planted.run(cells[size], timing, sync=False)
    cluster.study.collect()
    plans, _ = cluster.grow(cluster.run)
    assert cluster.rounds == 1, "the size is certain already"
    assert plans[0].round.runs == {cell.id: 3 for cell in cluster.plan.cells}


@pytest.mark.parametrize("changed", [{"repeats": 2}, {"until": "0.3"}, {"until": "soon"}])
def test_odds_and_repeats_that_say_nothing_are_refused(changed, tmp_path) -> None:
    options = StudyFile(gpus=[1, 2], until="certain", out=str(tmp_path / "out"))
    with pytest.raises(UsageError, match="--until"):
        Matrix(with_fields(options, **changed), study_file=None)
