"""Interval arithmetic against exact fractions, and printed digits against hand-worked ends."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reports.audit.intervals import Interval, Printed, exactly, hull, printed

FINITE = st.floats(min_value=0, max_value=1e100, allow_subnormal=False)

unhurried = settings(deadline=None)
"""A busy machine is no failure."""


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    low, high = sorted((draw(FINITE), draw(FINITE)))
    return Interval(low, high)


@st.composite
def members(draw: st.DrawFn) -> tuple[Interval, Fraction]:
    """An interval and an exact number in it."""
    interval = draw(intervals())
    share = draw(st.fractions(min_value=0, max_value=1))
    low, high = Fraction(interval.low), Fraction(interval.high)
    return interval, low + (high - low) * share


@unhurried
@given(members(), members())
def test_a_product_holds_the_products_of_its_members(
    one: tuple[Interval, Fraction], other: tuple[Interval, Fraction]
) -> None:
    product = one[0] * other[0]
    assert Fraction(product.low) <= one[1] * other[1] <= Fraction(product.high)


@unhurried
@given(members(), members())
def test_a_quotient_holds_the_quotients_of_its_members(
    one: tuple[Interval, Fraction], other: tuple[Interval, Fraction]
) -> None:
    assume(other[1] > 0)
    quotient = one[0] / other[0]
    exact = one[1] / other[1]
    assert Fraction(quotient.low) <= exact
    assert math.isinf(quotient.high) or exact <= Fraction(quotient.high)


@unhurried
@given(intervals(), st.floats(min_value=0, max_value=0.9))
def test_widening_never_loses_a_number(interval: Interval, share: float) -> None:
    wide = interval.widened(share)
    assert wide.low <= interval.low
    assert wide.high >= interval.high


@unhurried
@given(intervals(), intervals())
def test_meeting_is_symmetric_and_a_hull_meets_both(one: Interval, other: Interval) -> None:
    assert one.meets(other) == other.meets(one) == (max(one.low, other.low) <= min(one.high, other.high))
    both = hull((one, other))
    assert (both.low, both.high) == (min(one.low, other.low), max(one.high, other.high))


@unhurried
@given(st.decimals(min_value=0, max_value=10**12, allow_nan=False, allow_infinity=False, places=4))
def test_rounding_and_cutting_stay_inside_what_is_printed(number: object) -> None:
    exact = Fraction(str(number))
    for places in range(4):
        rounded = printed(f"{number:.{places}f}")
        assert isinstance(rounded, Printed)
        assert Fraction(rounded.rounded.low) <= exact <= Fraction(rounded.rounded.high)
        scale = 10**places
        whole, part = divmod(math.floor(exact * scale), scale)
        cut = printed(f"{whole}.{part:0{places}d}" if places else str(whole))
        assert isinstance(cut, Printed)
        assert Fraction(cut.loose.low) <= exact <= Fraction(cut.loose.high)


@pytest.mark.parametrize(
    ("text", "low", "high", "cut"),
    [
        ("1.7", 1.65, 1.75, 1.8),
        ("1.70", 1.695, 1.705, 1.71),
        ("1,083,366", 1083365.5, 1083366.5, 1083367.0),
        ("0.0", 0.0, 0.05, 0.1),
        ("1e-05", 0.5e-5, 1.5e-5, 2e-5),
        ("2.5e3", 2450.0, 2550.0, 2600.0),
        (".5", 0.45, 0.55, 0.6),
    ],
)
def test_printed_digits(text: str, low: float, high: float, cut: float) -> None:
    number = printed(text)
    assert isinstance(number, Printed)
    assert (number.rounded.low, number.rounded.high) == pytest.approx((low, high), rel=1e-15)
    assert (number.loose.low, number.loose.high) == pytest.approx((low, cut), rel=1e-15)
    assert number.rounded.low <= low
    assert number.rounded.high >= high


@pytest.mark.parametrize(
    "text", ["", "abc", "1,5", "12,34,567", "1.2.3", "0x10", "1 000", "33-39", "1_000", "\u0663"]
)
def test_what_is_no_number(text: str) -> None:
    assert printed(text) is None


@pytest.mark.parametrize("text", ["-1", "-0.5", "inf", "-Infinity", "1e999", "1e31", "1e-31"])
def test_numbers_that_no_measurement_is(text: str) -> None:
    number = printed(text)
    assert isinstance(number, float)
    assert number < 0 or not 1e-30 <= number <= 1e30


def test_a_count_is_exact_however_it_is_printed_and_a_rounded_one_is_not() -> None:
    def ends(text: str, factor: float = 1.0) -> tuple[float, float]:
        number = printed(text)
        assert isinstance(number, Printed)
        exact = number.scaled(factor).exact().rounded
        return exact.low, exact.high

    assert ends("2048.0") == ends("2048") == (2048.0, 2048.0)
    assert ends("0.5") == pytest.approx((0.45, 0.55))
    assert ends("8", 1e9) == pytest.approx((7.5e9, 8.5e9))


def test_what_is_no_interval_is_refused() -> None:
    for low, high in ((2.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="interval"):
            Interval(low, high)


def test_a_quotient_by_what_may_be_zero_has_no_upper_end() -> None:
    quotient = exactly(6) / Interval(0, 2)
    assert quotient.low == pytest.approx(3)
    assert quotient.high == math.inf
