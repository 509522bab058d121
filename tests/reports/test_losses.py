"""Losses where the data is real: smoothing, the target that all reach, and the time to it."""

from __future__ import annotations

import re

import msgspec
import pytest

from reports.analysis.losses import is_real, loss_group
from reports.analysis.study import StudyFigures, analyse
from reports.page.render import render_figures


def analysed(
    planted, losses: dict[str, tuple[float, ...]], every: int = 1, first_steps: int | None = None
) -> StudyFigures:
    """The study with these losses in the runs of each strategy."""
    cells = {cell.id: cell for plan in planted.study.plans() for cell in plan.cells}
    results = [
        msgspec.structs.replace(
            run,
            losses=losses.get(cells[run.cell_id].strategy, ()),
            losses_every=every,
            first_steps=first_steps,
        )
        for run in planted.study.collect()
    ]
    return analyse("study", planted.study.plans(), results)


@pytest.fixture
def real(planted):
    """Two strategies on digits, on 2 and on 4; steps of 10 ms and of 20 ms."""
    for strategy, ms in (("ddp", 10.0), ("local-sgd", 20.0)):
        cells = planted.series("weak", strategy, [2, 4], batch=8, dataset="digits")
        planted.plan(repeats=1)
        for cell in cells:
            planted.runs(cell, [ms])
    return planted


# Twenty points, so that two are a tenth: 20, 19, ..., 1 and 20, 20, 19, 19, ..., 11, 11.
QUICK = tuple(float(20 - place) for place in range(20))
SLOW = tuple(float(20 - place // 2) for place in range(20))


def test_the_target_is_the_worst_final_loss_and_each_curve_reaches_it(real) -> None:
    group = loss_group(analysed(real, {"ddp": QUICK, "local-sgd": SLOW}).curves)
    assert group is not None
    assert group.gpus == 4
    quick, slow = group.curves
    # The mean of the last two: (2 + 1) / 2 and (11 + 11) / 2.
    assert (quick.final, slow.final) == (1.5, 11.0)
    assert group.target == 11.0
    # The mean of points 10 and 11 of the quick one is (11 + 10) / 2 = 10.5, the one before it (12 + 11) / 2.
    assert quick.steps_to(11.0) == 11
    assert quick.ns_to(11.0) == pytest.approx(11 * 10e6)
    # The slow one is there with its last point alone.
    assert slow.steps_to(11.0) == 20
    assert slow.ns_to(11.0) == pytest.approx(20 * 20e6)
    assert quick.steps_to(0.5) is None
    assert quick.ns_to(0.5) is None


def test_losses_that_are_not_of_every_step_count_the_steps_between_them(real) -> None:
    group = loss_group(analysed(real, {"ddp": QUICK}, every=5).curves)
    assert group is not None
    # Each point is the mean of five steps, and known when the last of them is done.
    assert group.curves[0].steps[:3] == [5, 10, 15]
    assert group.curves[0].steps_to(11.0) == 55


def test_steps_that_a_proof_checks_come_before_the_first_loss(real) -> None:
    group = loss_group(analysed(real, {"ddp": QUICK}, first_steps=3).curves)
    assert group is not None
    assert group.curves[0].steps[:2] == [4, 5]
    assert group.curves[0].steps_to(11.0) == 14


def test_the_size_is_the_largest_that_most_series_have(real) -> None:
    real.runs(real.series("weak", "ddp", [8], batch=8, dataset="digits")[0], [10.0])
    real.plan(repeats=1)
    group = loss_group(analysed(real, {"ddp": QUICK, "local-sgd": SLOW}).curves)
    assert group is not None
    assert group.gpus == 4
    assert len(group.curves) == 2


def test_synthetic_samples_have_no_loss_curve(planted) -> None:
    cell = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan(repeats=1)
    planted.runs(cell, [10.0])
    study = analysed(planted, {"ddp": QUICK})
    assert not is_real(cell)
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
