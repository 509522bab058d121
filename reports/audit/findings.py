"""What a check says: the numbers that went in, what they come to, what was printed, and how far apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from reports.audit.intervals import Interval, Printed

Check = Literal[
    "value", "contradiction", "work", "batch", "utilisation", "bandwidth", "scaling", "neighbours", "order",
    "digits",
    "repeats", "units",
]  # fmt: skip
CHECKS: tuple[Check, ...] = (
    "value", "contradiction", "work", "batch", "utilisation", "bandwidth", "scaling", "neighbours", "order",
    "digits",
    "repeats", "units",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Quantity:
    """A quantity of a row, in SI units."""

    shown: str
    """As the table prints it, with its unit's name; of a derived quantity, what it was derived from."""
    rounded: Interval
    loose: Interval
    """See `Printed`."""
    origins: frozenset[str]
    """The printed quantities that it comes from: itself, if the table prints it."""
    text: str = ""
    """The printed digits; empty for a derived quantity."""
    middle: float = 0.0

    def __post_init__(self) -> None:
        self.middle = self.rounded.middle

    @classmethod
    def of(cls, name: str, number: Printed, shown: str) -> Quantity:
        return cls(
            shown=shown,
            rounded=number.rounded,
            loose=number.loose,
            origins=frozenset((name,)),
            text=number.text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Numbers that do not agree as printed; or, as a note, that agree if digits were cut off."""

    check: Check
    lines: tuple[int, ...]
    """Lines of the file, the head being line 1; the row in question first."""
    formula: str
    inputs: tuple[str, ...]
    expected: tuple[float, float] | None
    """The ends of what the inputs come to, in SI units."""
    found: tuple[float, float] | None
    """The ends of what the printed number may have been."""
    difference: float | None
    """Found over expected, less one, from the middles."""
    tolerance: float
    why: str
    """Why the tolerance is what it is."""
    reading: str
    """The likeliest explanation; empty without one."""
    is_note: bool = False
    quantity: str = ""
    """What was found, by the names of columns.py."""
    quantities: tuple[str, ...] = ()
    """The printed quantities of the row in question that went in, the one in question among them."""
    scope: str = ""
    """Of rows that are compared: what they have in common."""
    rows: tuple[int, ...] = ()
    """Every line that shows the same cause; set by causes.py."""
    also: tuple[str, ...] = ()
    """Other formulas that the same number breaks; set by causes.py."""
    suspect: str = ""
    """The number that all broken formulas share; set by causes.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """An equation between quantities of one row: `expected(*needs)` is what `found` should be."""

    check: Check
    formula: str
    needs: tuple[str, ...]
    found: str
    expected: Callable[..., Any]
    """Of intervals, or of the floats in their middles: by `*` and `/` alone."""
    tolerance: float = 0.0
    why: str = "the printed digits alone decide"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRow:
    """What a relation says of a row that has its numbers."""

    is_exact: bool
    """Whether they agree to the printed digits, rounded or cut off, without the tolerance."""
    finding: Disagreement | None = None


EXACT, NEAR = CheckedRow(is_exact=True), CheckedRow(is_exact=False)

_RATES = frozenset({"tokens_per_s", "tokens_per_s_device", "samples_per_s", "samples_per_s_device"})
_TIMES = frozenset({"step_s", "time_s"})
_BYTES = frozenset({"algbw", "busbw", "bytes"})
_FLOPS = frozenset({"flops_per_s", "flops_per_s_device", "mfu", "hfu", "flops_per_step"})
_SHARES = frozenset({"mfu", "hfu", "efficiency"})
_ANY = _RATES | _TIMES | _BYTES | _FLOPS | _SHARES
_FACTORS = (
    (1e3, "a prefix: k for none, or M for k", _ANY - _SHARES),
    (1e6, "two prefixes: M for none, or ms for ns", _ANY - _SHARES),
    (1e9, "three prefixes: G for none, or s for ns", _ANY - _SHARES),
    (1024.0, "a binary prefix: Ki for none", _ANY - _SHARES),
    (1.024, "KiB for kB", _BYTES),
    (1.048576, "MiB for MB", _BYTES),
    (2.0**30 / 1e9, "GiB for GB", _BYTES),
    (100.0, "percent for a share of one", _SHARES),
    (10.0, "a decimal point in the wrong place", _ANY),
    (8.0, "bits for bytes, or eight devices for one", _BYTES),
    (4 / 3, "with the recomputed forward pass (HFU) for without (MFU)", _FLOPS),
    (3.0, "the forward pass alone for a whole step", _FLOPS),
    (2.0, "multiply-adds for FLOPs, or a sparse peak for a dense one", _FLOPS),
    (2.0, "both directions for one, or a factor of two", _BYTES),
    (2.0, "a factor of two", _RATES | _TIMES),
)
"""A ratio, what it looks like, and of which quantities."""
_NEAR = 0.01
"""How near a ratio must be to a factor to be read as it."""
CUT = "the last digit was cut off, not rounded"


def examine(relation: Relation, line: int, values: Mapping[str, Quantity]) -> CheckedRow | None:
    """What a relation says of a row; None if the row does not have its numbers."""
    if not applies(relation, values):
        return None
    inputs = [values[name] for name in relation.needs]
    found = values[relation.found]
    quick = _of_middles(relation, inputs)
    # A number that may have been printed, from numbers that may have been printed: the intervals meet.
    if found.rounded.low <= quick <= found.rounded.high:
        return EXACT
    expected = relation.expected(*(value.rounded for value in inputs))
    loose = relation.expected(*(value.loose for value in inputs))
    is_exact = loose.meets(found.loose)
    if expected.widened(relation.tolerance).meets(found.rounded):
        return EXACT if is_exact else NEAR
    is_cut = is_exact or loose.widened(relation.tolerance).meets(found.loose)
    return CheckedRow(
        is_exact=False,
        finding=Disagreement(
            check=relation.check,
            lines=(line,),
            formula=relation.formula,
            inputs=(*(value.shown for value in inputs), found.shown),
            expected=ends(expected),
            found=ends(found.rounded),
            difference=difference(found.rounded, expected),
            tolerance=relation.tolerance,
            why=relation.why,
            reading=CUT if is_cut else reading(found.rounded, expected, relation.found, values.get("gpus")),
            is_note=is_cut,
            quantity=relation.found,
            quantities=printed_names(relation, values),
        ),
    )


def _of_middles(relation: Relation, inputs: Sequence[Quantity]) -> float:
    try:
        return cast(float, relation.expected(*(value.middle for value in inputs)))
    except (ZeroDivisionError, OverflowError):
        return math.nan


def applies(relation: Relation, values: Mapping[str, Quantity]) -> bool:
    """Whether a row has all quantities, and the one in question does not come from the others alone."""
    if relation.found not in values:
        return False
    from_inputs: frozenset[str] = frozenset()
    for name in relation.needs:
        if name not in values:
            return False
        from_inputs |= values[name].origins
    return not values[relation.found].origins <= from_inputs


def printed_names(relation: Relation, values: Mapping[str, Quantity]) -> tuple[str, ...]:
    """The printed quantities behind an equation."""
    several = (values[name].origins for name in (*relation.needs, relation.found))
    return tuple(sorted(frozenset().union(*several)))


def ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def difference(found: Interval, expected: Interval) -> float | None:
    """Found over expected, less one; None where nothing was expected."""
    if expected.middle == 0 or math.isinf(expected.middle):
        return None
    return found.middle / expected.middle - 1


def reading(found: Interval, expected: Interval, quantity: str, gpus: Quantity | None = None) -> str:
    """What the ratio of found to expected looks like for this quantity, if it is a well-known one."""
    if not (found.middle > 0 and 0 < expected.middle < math.inf):
        return ""
    ratio = found.middle / expected.middle
    if not 0 < ratio < math.inf:
        return ""
    size = max(ratio, 1 / ratio)
    if gpus is not None and gpus.middle > 1 and quantity in _RATES | _FLOPS and _is_near(size, gpus.middle):
        return "all devices for one, or one for all"
    near = [(factor, words) for factor, words, of in _FACTORS if quantity in of and _is_near(size, factor)]
    return min(near, key=lambda known: abs(size / known[0] - 1))[1] if near else ""


def _is_near(size: float, factor: float) -> bool:
    return abs(size / factor - 1) <= min(_NEAR, abs(factor - 1) / 3)
