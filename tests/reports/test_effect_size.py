"""On which side of 1 a ratio lies: by its interval and by an effect that matters."""

from __future__ import annotations

import pytest

from reports.analysis.effect import side
from results.statistics import Metric


@pytest.mark.parametrize(
    ("low", "value", "high", "expected"),
    [
        (1.001, 1.02, 1.1, "above"),
        (1.001, 1.019, 1.1, None),
        (0.999, 1.05, 1.1, None),
        # 1 / 1.02 is 0.98039.
        (0.9, 0.980, 0.999, "below"),
        (0.9, 0.981, 0.999, None),
        (0.9, 0.95, 1.001, None),
        (None, 2.0, None, None),
    ],
)
def test_a_side_is_told_by_the_interval_and_from_two_percent_on(low, value, high, expected) -> None:
    kind = None if low is None else "range"
    ratio = Metric(value=value, unit="x", low=low, high=high, samples=3, interval=kind)
    assert side(ratio) == expected
