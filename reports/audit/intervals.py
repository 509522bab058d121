"""Intervals of printed numbers: `1.7` says that the number lay between 1.65 and 1.75.

All quantities here are 0 or more. Ends are moved outwards by one unit in the last place of float64 after each
operation (Moore, Kearfott and Cloud, Introduction to Interval Analysis, SIAM 2009, ch. 3), so that a result
holds every number that the exact operation could give: arithmetic of this module never makes a finding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

_NUMBER = re.compile(
    r"(?P<digits>[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?|[+-]?\.\d+)(?P<power>[eE][+-]?\d{1,3})?",
    re.ASCII,
)
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)


@dataclass(slots=True)
class Interval:
    """All numbers from `low` to `high`, both ends included; 0 <= low <= high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"an interval is 0 <= low <= high, not {self.low} to {self.high}")

    def __mul__(self, other: Interval) -> Interval:
        return _outwards(_product(self.low, other.low), _product(self.high, other.high))

    def __truediv__(self, other: Interval) -> Interval:
        """The quotients; without an upper end where the divisor may be 0."""
        low = self.low / other.high if other.high > 0 else math.inf
        return _outwards(min(low, _LARGEST), self.high / other.low if other.low > 0 else math.inf)

    def scaled(self, factor: float) -> Interval:
        """Times a positive factor: a unit."""
        return self if factor == 1 else self * exactly(factor)

    def widened(self, share: float) -> Interval:
        """Both ends moved outwards by a share of themselves."""
        return _outwards(self.low * (1 - share), self.high * (1 + share)) if share else self

    def meets(self, other: Interval) -> bool:
        """Whether there is a number in both."""
        return self.low <= other.high and other.low <= self.high

    @property
    def middle(self) -> float:
        return self.low if math.isinf(self.high) else self.low + (self.high - self.low) / 2


_LARGEST = 1.7976931348623157e308
_LEAST, _MOST = Decimal("1e-30"), Decimal("1e30")


def exactly(value: float) -> Interval:
    """A number that is known, such as a count."""
    return Interval(value, value)


def hull(intervals: Iterable[Interval]) -> Interval:
    """The smallest interval that holds all of them."""
    several = tuple(intervals)
    return Interval(min(one.low for one in several), max(one.high for one in several))


def _product(one: float, other: float) -> float:
    # 0 times a number without an upper bound is 0: every member is a finite number.
    return 0.0 if one == 0 or other == 0 else one * other


def _outwards(low: float, high: float) -> Interval:
    # A 0 at the top moves too: it may be a product that is too small for a float.
    return Interval(max(0.0, math.nextafter(low, 0.0)), math.nextafter(high, math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A number as a table prints it."""

    text: str
    value: float
    rounded: Interval
    """What it may have been, if its last digit was rounded: half a unit of that digit to both sides."""
    loose: Interval
    """The same, or cut off after the last digit (as `int()` and `%d` do): up to a whole unit more."""

    def scaled(self, factor: float) -> Printed:
        return Printed(
            text=self.text,
            value=self.value * factor,
            rounded=self.rounded.scaled(factor),
            loose=self.loose.scaled(factor),
        )

    def exact(self) -> Printed:
        """A count: a whole number is itself, whatever digits follow the point (`2048.0`); `8B` is not one."""
        half_unit = self.rounded.high - self.value
        if not self.value.is_integer() or half_unit > 1:
            return self
        point = exactly(self.value)
        return Printed(text=self.text, value=self.value, rounded=point, loose=point)


@lru_cache(maxsize=65536)
def printed(text: str) -> Printed | float | None:
    """What a printed number says. None: it is not a number.

    A float in the place of a `Printed`: a number that no quantity of a table can be, negative, infinite, or
    beyond 1e-30 to 1e30, so that no product of the checks leaves the range of float64.
    Commas are read as thousands where they part groups of three digits, and never as decimals. Zeros at the
    end of a whole number count as digits.
    """
    text = text.strip()
    if _INFINITE.fullmatch(text):
        return float(text)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    number = Decimal(match["digits"].replace(",", "") + (match["power"] or ""))
    if number < 0 or (number and not _LEAST <= number <= _MOST):
        return float(number)
    return _with_digits(text, number)


@lru_cache(maxsize=65536)
def printed_in(text: str, scale: float) -> Printed | float | None:
    """The same of a number that is printed in a unit of `scale` SI units."""
    number = printed(text)
    return number.scaled(scale) if isinstance(number, Printed) and scale != 1 else number


def significant(text: str) -> int:
    """Significant digits of a printed number, without zeros at its end."""
    digits = re.sub(r"[eE].*|[^0-9]", "", text).strip("0")
    return len(digits)


def _with_digits(text: str, number: Decimal) -> Printed:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    unit = Decimal(1).scaleb(exponent)
    low = max(Decimal(0), number - unit / 2)
    return Printed(
        text=text,
        value=float(number),
        rounded=_enclosing(low, number + unit / 2),
        loose=_enclosing(low, number + unit),
    )


def _enclosing(low: Decimal, high: Decimal) -> Interval:
    return _outwards(float(low), float(high))
