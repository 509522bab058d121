"""What a shown figure is sorted by: the number it stands for, in one unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.page.magnitudes import magnitude
from reports.text import duration, number, percent, rate, si, size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("812 us", 812e3),
        ("1.23 s", 1.23e9),
        ("-4.5 ms", -4.5e6),
        ("2 min 05 s", 125e9),
        ("3 h 20 min", 12_000e9),
        ("97.5 MiB", 97.5 * 2**20),
        ("1,234 images/s", 1234),
        ("1.23 M tokens/s", 1.23e6),
        ("4.12 GFLOP", 4.12e9),
        ("96.0 MB/s", 96e6),
        ("94.1 % (92.0 to 95.3)", 94.1),
        ("16 / 64", 16),
        ("3 of 5 runs", 3),
        ("1.60 x", 1.6),
        ("$2.50", 2.5),
        ("-$2.50", -2.5),
        ("-", None),
        ("baseline", None),
        ("none: emulated", None),
        ("12.1 to 12.6, range of 3", None),
        ("1e999", None),
    ],
)
def test_figures_in_words(text: str, value: float | None) -> None:
    assert magnitude(text) == (None if value is None else pytest.approx(value))


@given(st.floats(min_value=1, max_value=9e13))
def test_durations_are_read_back_to_what_is_shown_of_them(ns: float) -> None:
    # Three digits: half of the last is at most 0.5 %; from 100 s on to the second, then to the minute.
    coarse = 0 if ns < 100e9 else 0.5e9 if ns < 3599e9 else 60e9
    assert magnitude(duration(ns)) == pytest.approx(ns, rel=0.0051, abs=max(0.51, coarse))


@given(st.floats(min_value=1, max_value=1e15))
def test_sizes_rates_and_si_units_are_read_back(value: float) -> None:
    for text in (size(value), rate(value, "tokens"), si(value, "FLOP/s"), number(value)):
        assert magnitude(text) == pytest.approx(value, rel=0.0051, abs=0.51)
    assert magnitude(percent(value / 1e15)) == pytest.approx(value / 1e13, abs=0.051)
