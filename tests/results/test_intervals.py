"""Intervals against a bitmap: one flag a point, set by a loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from results.derivation.intervals import intersection, length, length_of_columns, union

Intervals = list[tuple[int, int]]
POINTS = 40
# Also empty ones, and ones whose end lies before their start: they hold nothing.
some = st.lists(st.tuples(st.integers(0, POINTS), st.integers(0, POINTS)), max_size=12)


def _bitmap(intervals: Intervals) -> list[bool]:
    flags = [False] * POINTS
    for start, end in intervals:
        for point in range(start, end):
            flags[point] = True
    return flags


def _is_tidy(intervals: Intervals) -> bool:
    """Sorted, none empty, and a gap between each two."""
    ends = [end for _, end in intervals]
    starts = [start for start, _ in intervals]
    return all(start < end for start, end in intervals) and all(
        end < start for end, start in zip(ends, starts[1:], strict=False)
    )


@given(some)
def test_the_union_holds_the_same_points(intervals) -> None:
    merged = union(intervals)
    assert _bitmap(merged) == _bitmap(intervals)
    assert _is_tidy(merged)


@given(some)
def test_the_length_is_the_number_of_points(intervals) -> None:
    assert length(intervals) == sum(_bitmap(intervals))


@given(some, some)
def test_the_intersection_holds_the_points_of_both(a, b) -> None:
    shared = intersection(a, b)
    both = [one and other for one, other in zip(_bitmap(a), _bitmap(b), strict=True)]
    assert _bitmap(shared) == both
    assert _is_tidy(shared)
    assert length(a) + length(b) == length([*a, *b]) + length(shared)


@given(some)
def test_columns_have_the_length_of_their_intervals(intervals) -> None:
    start = np.array([interval[0] for interval in intervals], dtype=np.int64)
    end = np.array([interval[1] for interval in intervals], dtype=np.int64)
    assert length_of_columns(start, end) == sum(_bitmap(intervals))
