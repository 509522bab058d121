"""What a check says: the numbers that went in, what they come to, what was printed, and how far apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from reports.audit.intervals import Interval, Printed

Check = Literal[
    "value", "work", "batch", "utilisation", "scaling", "neighbours", "bandwidth", "repeats", "units"
]
CHECKS: tuple[Check, ...] = (
    "value", "work", "batch", "utilisation", "scaling", "neighbours", "bandwidth", "repeats", "units",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity of a row, in SI units."""

    shown: str
    """As the table prints it, with its unit's name; of a derived quantity, what it was derived from."""
    rounded: Interval
    loose: Interval
    """See `Printed`."""

    @classmethod
    def of(cls, number: Printed, shown: str) -> Quantity:
        return cls(shown=shown, rounded=number.rounded, loose=number.loose)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """An equation between quantities of one row: `expected(*needs)` is what `found` should be."""

    check: Check
    formula: str
    needs: tuple[str, ...]
    found: str
    expected: Callable[..., Interval]
    tolerance: float = 0.0
    why: str = "the printed digits alone decide"


_FACTORS = (
    (1e3, "a prefix: k for none, or M for k"),
    (1e6, "two prefixes: M for none, or ms for ns"),
    (1e9, "three prefixes: G for none, or s for ns"),
    (1024.0, "a binary prefix: Ki for none"),
    (1.048576, "MiB for MB"),
    (2.0**30 / 1e9, "GiB for GB"),
    (100.0, "percent for a share of one"),
    (8.0, "bits for bytes, or eight devices for one"),
    (4 / 3, "with the recomputed forward pass (HFU) for without (MFU)"),
    (2.0, "a factor of two: multiply-adds for FLOPs, a sparse peak for a dense one, or both directions"),
)
_NEAR = 0.01
"""How near a ratio must be to a factor to be read as it."""
CUT = "the last digit was cut off, not rounded"


def compare(
    relation: Relation, lines: tuple[int, ...], values: Mapping[str, Quantity]
) -> Disagreement | None:
    """What there is to say of a row by a relation: nothing if its numbers meet, or are not all there."""
    if relation.found not in values or any(name not in values for name in relation.needs):
        return None
    inputs = [values[name] for name in relation.needs]
    found = values[relation.found]
    expected = relation.expected(*(value.rounded for value in inputs))
    if expected.widened(relation.tolerance).meets(found.rounded):
        return None
    loose = relation.expected(*(value.loose for value in inputs)).widened(relation.tolerance)
    return Disagreement(
        check=relation.check,
        lines=lines,
        formula=relation.formula,
        inputs=(*(value.shown for value in inputs), found.shown),
        expected=ends(expected),
        found=ends(found.rounded),
        difference=difference(found.rounded, expected),
        tolerance=relation.tolerance,
        why=relation.why,
        reading=CUT if loose.meets(found.loose) else reading(found.rounded, expected, values.get("gpus")),
        is_note=loose.meets(found.loose),
    )


def ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def difference(found: Interval, expected: Interval) -> float | None:
    """Found over expected, less one; None where nothing was expected."""
    if expected.middle == 0 or math.isinf(expected.middle):
        return None
    return found.middle / expected.middle - 1


def reading(found: Interval, expected: Interval, gpus: Quantity | None = None) -> str:
    """What the ratio of found to expected looks like, if it is a well-known one."""
    if not (found.middle > 0 and 0 < expected.middle < math.inf):
        return ""
    ratio = found.middle / expected.middle
    if not 0 < ratio < math.inf:
        return ""
    size = max(ratio, 1 / ratio)
    if gpus is not None and gpus.rounded.middle > 1 and _is_near(size, gpus.rounded.middle):
        return "all devices for one, or one for all"
    factor, words = min(_FACTORS, key=lambda known: abs(math.log(size / known[0])))
    return words if _is_near(size, factor) else ""


def _is_near(size: float, factor: float) -> bool:
    return abs(size / factor - 1) <= _NEAR
