"""The fields of tables: a number by which the page's script sorts, and the text that a reader sees.

An unknown value is `NONE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from reports import text
from results.cell import Cell
from results.statistics import Metric

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Field:
    text: str
    value: float | None = None
    """The number in `unit`, without a prefix; None for words and intervals."""
    unit: str = ""
    link: str = ""
    """The address that the text leads to; empty for none."""

    def __post_init__(self) -> None:
        assert self.value is None or math.isfinite(self.value), self


NONE = Field(text.NOTHING)


def shown(value: N | None, form: Callable[[N], str], unit: str = "") -> Field:
    """Show a number in the given form. The page does not sort by a number that is not finite."""
    if value is None:
        return NONE
    return Field(form(value), value if math.isfinite(value) else None, unit)


def whole(items: int | None) -> Field:
    return shown(items, "{:,}".format)


def duration(ns: float | None) -> Field:
    return shown(ns, text.duration, "ns")


def size(size_bytes: float | None) -> Field:
    return shown(size_bytes, text.size, "bytes")


def percent(share: float | None) -> Field:
    """Show a share of one as a percentage."""
    return shown(share, text.percent, "ratio")


def number(value: float | None, *, digits: int = text.DIGITS) -> Field:
    return shown(value, lambda known: text.number(known, digits=digits))


def si(value: float | None, unit: str) -> Field:
    return shown(value, lambda known: text.si(known, unit), unit)


def figure(metric: Metric | None, *, ends: bool = False) -> Field:
    """A figure, with the ends of its interval if `ends`: `12.3 ms (12.1 to 12.6)`."""
    if metric is None:
        return NONE
    said = text.metric(metric)
    return Field(said.with_ends if ends else said.value, metric.value, metric.unit)


def interval(metric: Metric | None) -> Field:
    """The ends of a figure's interval, and its kind: `12.1 to 12.6, range of 3`."""
    return NONE if metric is None else Field(text.metric(metric).note)


def batch(cell: Cell) -> Field:
    """Batch per replica / global batch; sorted by the first."""
    return Field(text.batch(cell), cell.batch_per_replica, "samples")
