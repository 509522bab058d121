"""Half-open intervals of integers `[start, end)`: their union, length and intersection.

They measure how long operations were in flight, or how long kernels of a device ran. An interval whose end is
not above its start is empty and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
Ints = npt.NDArray[np.int64]


def union(intervals: Iterable[Span]) -> list[Span]:
    """The same points as sorted, disjoint intervals; those that overlap or touch are one."""
    merged: list[Span] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Span]) -> int:
    """The number of points in the union of the intervals."""
    return sum(end - start for start, end in union(intervals))


def intersection(a: Iterable[Span], b: Iterable[Span]) -> list[Span]:
    """The points that are in both, as sorted, disjoint intervals."""
    left, right = union(a), union(b)
    shared: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length_of_columns(start: Ints, end: Ints) -> int:
    """`length` of the intervals `start[i], end[i]`, for the millions of a large run."""
    order = np.argsort(start)
    start, end = start[order], end[order]
    # An interval adds only the part that lies beyond the ends of all earlier ones.
    reached = np.concatenate((start[:1], np.maximum.accumulate(end)[:-1]))
    return int(np.maximum(end - np.maximum(start, reached), 0).sum())
