"""Losses where the data is real: smoothing, the target that all reach, and the time to it."""

from __future__ import annotations

import re

import msgspec
import pytest

from reports.analysis.losses import LossCurve, loss_group, trained_samples
from reports.analysis.study import StudyFigures, analyse
from reports.page.render import render_figures


def analysed(planted, losses: dict[str, tuple[float, ...]], first_steps: int | None = None) -> StudyFigures:
    """The study with these losses in the runs of each strategy."""
    cells = {cell.id: cell for plan in planted.study.plans() for cell in plan.cells}
    results = []
    for run in planted.study.collect():
        kept = losses.get(cells[run.cell_id].strategy, ())
        changed = {"losses": kept, "losses_every": 1, "first_steps": first_steps}
        steps = {"warmup_steps": 4, "steps": len(kept) - 4} if kept else {}
        results.append(msgspec.structs.replace(run, **changed, **steps))
    return planted.analysed(results)


@pytest.fixture
def real(planted):
    """Two strategies on digits, on 2 and on 4; steps of 10 ms and of 20 ms."""
    for strategy, ms in (("ddp", 10.0), ("local-sgd", 20.0)):
        planted.points(strategy, {2: ms, 4: ms}, dataset="digits")
        planted.plan(repeats=1)
    return planted


# Twenty points, so that two are a tenth: 20, 19, ..., 1 and 20, 20, 19, 19, ..., 11, 11.
QUICK = tuple(float(20 - place) for place in range(20))
SLOW = tuple(float(20 - place // 2) for place in range(20))


def test_the_target_is_the_worst_loss_after_the_common_samples_and_each_curve_reaches_it(real) -> None:
    group = loss_group(analysed(real, {"ddp": QUICK, "local-sgd": SLOW}).curves)
    assert group.gpus == 4
    # Batch 8 on each of 4, for 20 steps.
    assert group.samples == 640
    quick, slow = group.curves
    # The mean of the last two: (2 + 1) / 2 and (11 + 11) / 2.
    assert (group.final(quick), group.final(slow)) == (1.5, 11.0)
    assert group.target == 11.0
    # The mean of points 10 and 11 of the quick one is (11 + 10) / 2 = 10.5, the one before it (12 + 11) / 2.
    assert group.steps_to_target(quick) == 11
    assert group.ns_to_target(quick) == pytest.approx(11 * 10e6)
    # The slow one is there with its last point alone.
    assert group.steps_to_target(slow) == 20
    assert group.ns_to_target(slow) == pytest.approx(20 * 20e6)


def test_a_curve_that_was_trained_for_longer_is_compared_where_the_shortest_ends(real) -> None:
    # Alike for 10 steps, and then the one goes on: 20, 19, ..., 11 and further down to 1.
    study = analysed(real, {"ddp": QUICK, "local-sgd": QUICK[:10]})
    group = loss_group(study.curves)
    longer, shorter = group.curves
    assert group.samples == 320
    # A tenth of 10 steps is one.
    assert group.final(longer) == group.final(shorter) == group.target == 11.0
    assert group.steps_to_target(longer) == group.steps_to_target(shorter) == 10
    html = render_figures(study)
    assert "loss after 320 samples" in html


def test_losses_of_several_steps_are_compared_at_a_sample_between_them(real) -> None:
    # Of 2 steps each, but for the last: 9 steps in all.
    figures = next(iter(analysed(real, {"ddp": QUICK}).cells.values()))
    kept = {"losses": (5.0, 4.0, 3.0, 2.0, 1.0), "losses_every": 2, "warmup_steps": 0, "steps": 9}
    curve = LossCurve(figures=figures, run=msgspec.structs.replace(figures.newest, **kept))
    batch = curve.global_batch
    assert curve.steps == [2, 4, 6, 8, 9]
    # Of steps 4 to 7: two of the third loss, and one each of the second and the fourth.
    assert curve.loss_after(7 * batch, window=4 * batch) == pytest.approx((4 + 3 + 3 + 2) / 4)
    # Of steps 8 and 9.
    assert curve.loss_after(9 * batch, window=2 * batch) == pytest.approx((2 + 1) / 2)


def test_steps_that_a_proof_checks_come_before_the_first_loss(real) -> None:
    study = analysed(real, {"ddp": QUICK, "local-sgd": SLOW}, first_steps=3)
    group = loss_group(study.curves)
    quick = group.curves[0]
    assert quick.steps[:2] == [4, 5]
    # A tenth of 23 steps: (0.3 x 12 + 11 + 11) / 2.3 of the slow one. With 10 as the last loss the quick one
    # has (10 + 11 + 0.3 x 12) / 2.3 = 10.7, a step before it a whole one more.
    assert group.target == pytest.approx(25.6 / 2.3)
    assert group.steps_to_target(quick) == 14
    [run, *_] = quick.figures.runs
    assert trained_samples(quick.figures.cell, run) == 23 * 32


def test_a_curve_that_begins_after_another_has_ended_is_left_out_by_name(real) -> None:
    study = analysed(real, {"ddp": QUICK, "local-sgd": SLOW})
    results = [
        msgspec.structs.replace(run, first_steps=66) if "local-sgd" in run.cell_id else run
        for one in study.pools.values()
        for run in one.runs
    ]
    study = analyse("study", study.plans, results)
    group = loss_group(study.curves)
    # ddp has 20 steps of 32 samples; the first loss of the other is of step 67.
    assert [curve.label for curve in group.curves] == ["ddp"]
    assert [curve.label for curve in group.late] == ["local-sgd"]
    assert "local-sgd (after 66 steps)" in render_figures(study)


def test_the_size_is_the_largest_that_most_series_have(real) -> None:
    real.points("ddp", {8: 10.0}, dataset="digits")
    group = loss_group(analysed(real, {"ddp": QUICK, "local-sgd": SLOW}).curves)
    assert group.gpus == 4
    assert len(group.curves) == 2


def test_synthetic_samples_have_no_loss_curve(planted) -> None:
    cell = planted.points("ddp", {2: 10.0})[0]
    planted.plan(repeats=1)
    study = analysed(planted, {"ddp": QUICK})
    assert cell.synthetic
    assert loss_group(study.curves) is None
    html = render_figures(study)
    assert "The samples are synthetic" in html
    assert "Training loss by step" not in html


def test_real_data_is_drawn_with_its_target_and_accuracy_is_said_not_to_be_measured(real) -> None:
    html = render_figures(analysed(real, {"ddp": QUICK, "local-sgd": SLOW}))
    assert "Training loss by step" in html
    assert "Time to a loss of 11.00" in html
    row = re.search(
        r"<td[^>]*>(?:<span>)?local-sgd(?:</span>)?</td>\s*"
        r"<td[^>]*><span>11.00</span></td>\s*<td[^>]*><span>20</span>",
        html,
    )
    assert row is not None
    assert "The samples are synthetic" not in html
    assert "Accuracy is not measured" in html


def test_real_data_without_losses_is_said_so(real) -> None:
    html = render_figures(analysed(real, {}))
    assert "no counted run kept a loss" in html
    assert "Training loss by step" not in html
