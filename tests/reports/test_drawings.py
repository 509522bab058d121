"""Drawings: what failed is not among the values, and no drawing collapses."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes

from reports.page import bars, curves
from reports.page.curves import speed_up_ticks
from reports.page.render import render
from results.outcome import Outcome


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every curve that is drawn from now on."""
    found: list[Axes] = []
    finish = curves.inline

    def inline(axes: Axes, **words: str) -> object:
        svg = finish(axes, **words)
        found.append(axes)
        return svg

    monkeypatch.setattr(curves, "inline", inline)
    return found


def marks(axes: Axes) -> list[tuple[str, float]]:
    """Marker and height on the canvas of what is marked as missing."""
    lines = [line for line in axes.lines if line.get_marker() in ("x", "|")]
    return [
        (str(line.get_marker()), float(line.get_transform().transform((1, line.get_ydata()[0]))[1]))
        for line in lines
    ]


def test_failures_and_skips_are_below_every_value(planted, new_timing, drawn) -> None:
    ddp = planted.series("weak", "ddp", [2, 4, 8], batch=8)
    fsdp = planted.series("weak", "fsdp", [2, 4, 8], batch=8)
    planted.skip("ddp", 16, "not here", batch=8)
    planted.plan(repeats=1)
    for cell in (*ddp[:2], *fsdp[:2]):
        planted.runs(cell, [10.0])
    for cell in (ddp[2], fsdp[2]):
        planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    render(planted.study, planted.study.collect())
    assert len(drawn) == 3
    for axes in drawn:
        low, high = axes.spines["left"].get_bounds()
        bottom, floor, top = (
            float(axes.transData.transform((1, y))[1]) for y in (axes.get_ylim()[0], low, high)
        )
        found = marks(axes)
        assert sorted(marker for marker, _ in found) == ["x", "x", "|"]
        # Two failed at 8: above each other, and a row of nothing between the upper one and the values.
        heights = [height for _, height in found]
        row = max(heights) - min(heights)
        assert len({round(height, 6) for height in heights}) == 2
        assert min(heights) - bottom == pytest.approx(row / 2)
        assert floor - max(heights) == pytest.approx(1.5 * row)
        assert top > floor
        assert min(axes.yaxis.get_majorticklocs()) >= low


def test_where_nothing_is_missing_nothing_is_kept_free(planted, drawn) -> None:
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan(repeats=1)
    for cell in cells:
        planted.runs(cell, [10.0])
    render(planted.study, planted.study.collect())
    assert len(drawn) == 3
    assert [axes.spines["left"].get_bounds() for axes in drawn] == [None] * 3
    assert [axes.patches[:] for axes in drawn] == [[]] * 3


def test_many_failures_of_one_size_leave_the_values_their_room(planted, new_timing, drawn) -> None:
    planted.runs(planted.series("weak", "ddp", [2], batch=8)[0], [10.0])
    failed = [planted.series("weak", f"ddp:bucket_mb={size}", [2], batch=8)[0] for size in range(1, 21)]
    planted.plan(repeats=1)
    for cell in failed:
        planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="it fell over"))
    render(planted.study, planted.study.collect())
    (axes,) = drawn
    found = [height for _, height in marks(axes)]
    assert len(set(found)) == 20
    # At most 0.36 of the height, less half a row of it.
    box = axes.get_window_extent()
    assert (max(found) - box.y0) / box.height == pytest.approx(0.36 * 19.5 / 20)


@pytest.mark.parametrize(
    ("low", "high", "ideal", "ticks"),
    [
        (0.9, 17, 16, [1, 2, 4, 8, 16]),
        # A small range, and values below the baseline.
        (0.9, 2.2, 2, [1, 2]),
        (0.24, 2.2, 2, [0.25, 0.5, 1, 2]),
        # The end of the ideal in place of a power of two that is too near: 5 for 4, and 6 beside 4.
        (0.9, 5.5, 5, [1, 2, 5]),
        (0.9, 6.5, 6, [1, 2, 4, 6]),
        # Twelve powers of two: every second.
        (0.9, 2100, 2048, [1, 4, 16, 64, 256, 1024, 2048]),
        # Faster than ideal.
        (0.9, 4.1, 2, [1, 2, 4]),
        # Nothing but the baseline.
        (0.9, 1.1, 1, [1]),
    ],
)
def test_speed_up_has_ticks_at_one_and_at_the_ideal(
    low: float, high: float, ideal: float, ticks: list[float]
) -> None:
    assert speed_up_ticks(low, high, ideal) == ticks


def test_a_budget_of_one_bar_has_room_for_it(planted, new_timing, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Axes] = []
    finish = bars.inline

    def inline(axes: Axes, **words: str) -> object:
        svg = finish(axes, **words)
        found.append(axes)
        return svg

    monkeypatch.setattr(bars, "inline", inline)
    cell = planted.series("weak", "single", [1], batch=8)[0]
    planted.plan(repeats=1)
    planted.runs(cell, [10.0])
    render(planted.study, planted.study.collect())
    heights = [axes.get_window_extent().height for axes in found if "ms" in axes.get_title(loc="left")]
    # In points: a bar is two thirds of it, and a row of more bars 17.
    assert len(heights) == 1
    assert heights[0] > 25
