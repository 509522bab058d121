"""The holes of a study: sizes without a figure at which the size to buy may lie.

The knee of a curve is found between the sizes that have a figure. Between two of these, sizes may be hidden:
they failed, were planned and did not run, were measured only with another strategy, or are doublings that
nobody planned. If every growth yields at most 1, the throughput at both ends bounds the yields between them,
and so says whether the curve may stop at a hidden size, and whether it may pass all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reports.analysis.knee import PAYS_FROM, Growth, Knee, knee
from reports.analysis.scaling import Curve, Piece
from reports.text import devices, listed
from results.cell import BASELINE_STRATEGY, Device
from results.outcome import Outcome

SETTLED = (None, Outcome.OUT_OF_MEMORY, Outcome.SKIPPED)
"""Outcomes of sizes without a figure that another run would not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Sizes of one curve without a figure, at which the size to buy may lie."""

    curve: Curve
    sizes: tuple[int, ...]
    low: int
    """The smallest size that may be the one to buy."""
    high: int

    @property
    def text(self) -> str:
        """`ddp on 8 and 16 has no figure`."""
        sizes = listed([f"{size:,}" for size in self.sizes])
        return f"{self.curve.key.label} on {sizes} has no figure"


def holes(curves: Sequence[Curve], piece: Piece, own: Curve, rate: float, chosen: int) -> tuple[Hole, ...]:
    """The holes of the curve `own`, whose knee `chosen` has the throughput `rate`, and of its rivals.

    `curves` are those that may be bought from: with points of the piece, or without any point.
    """
    every = {point.gpus for curve in piece.curves for point in curve.points}
    found = []
    for curve in curves:
        if curve.key.strategy == BASELINE_STRATEGY:
            continue
        hidden = _hidden(curve, every)
        smallest = min((one.cell.gpus for one in curve.figures), default=min(hidden, default=1))
        low, high = reach(knee(curve), smallest, hidden)
        if curve is own:
            sizes = tuple(size for size in hidden if low < size <= high or size == low < chosen)
            low = min(low, chosen)
        else:
            sizes, low = _sizes_that_may_win(curve, hidden, high, rate), chosen
        if sizes:
            found.append(Hole(curve=curve, sizes=sizes, low=low, high=max(chosen, sizes[-1], high)))
    return tuple(found)


def _sizes_that_may_win(curve: Curve, hidden: Sequence[int], high: int, rate: float) -> tuple[int, ...]:
    """The hidden sizes up to `high` at which a rival could have a higher throughput than `rate`."""
    return tuple(size for size in hidden if size <= high and _best_rate(curve, size) > rate)


def neighbours(curve: Curve, chosen: int) -> Hole | None:
    """The sizes that another run may show between a size and its neighbours with figures."""
    sizes = [point.gpus for point in curve.points]
    low = max((size for size in sizes if size < chosen), default=0)
    high = min((size for size in sizes if size > chosen), default=math.inf)
    near = tuple(gap.gpus for gap in curve.gaps if low < gap.gpus < high and gap.outcome not in SETTLED)
    if not near:
        return None
    return Hole(curve=curve, sizes=near, low=min(chosen, *near), high=max(chosen, *near))


def range_text(found: Sequence[Hole], device: Device) -> str:
    """`4 to 64 GPUs; ddp on 8 and 16 has no figure`."""
    low, high = min(one.low for one in found), max(one.high for one in found)
    return "; ".join([f"{low:,} to {devices(high, device)}", *(one.text for one in found)])


def _hidden(curve: Curve, every: Iterable[int]) -> list[int]:
    """Sizes without a figure: of another curve, planned and not settled, or doublings between two sizes."""
    there = {one.cell.gpus for one in curve.figures}
    settled = {gap.gpus for gap in curve.gaps if gap.outcome in SETTLED}
    planned = {gap.gpus for gap in curve.gaps}
    wanted = {*every, *planned, *doublings({*there, *planned})}
    return sorted(size for size in wanted - there - settled if size > 1 or size in planned)


def doublings(sizes: Iterable[int]) -> Iterator[int]:
    """The doublings that nobody planned between two sizes."""
    for smaller, larger in pairwise(sorted(sizes)):
        while (smaller := 2 * smaller) < larger:
            yield smaller


def reach(stop: Knee, smallest: int, hidden: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest size at which growing may stop to pay, from the smallest with a figure."""
    low = next((size for size in hidden if size < smallest), None)
    last = smallest
    for growth in stop.growths:
        between = [size for size in hidden if growth.smaller < size < growth.larger]
        steps = [larger / smaller for smaller, larger in pairwise([growth.smaller, *between, growth.larger])]
        may_stop, may_pass = _ways(growth, steps)
        if may_stop and low is None:
            low = growth.smaller
        if not may_pass:
            return low or growth.smaller, max([growth.smaller, *between])
        last = growth.larger
    return low or last, max([last, *hidden])


def _ways(growth: Growth, steps: Sequence[float]) -> tuple[bool, bool]:
    """Whether growing may stop at a size before the larger one, and whether it may pay up to that one."""
    if len(steps) == 1:
        return not growth.pays, growth.pays
    yields, ratio = growth.marginal, growth.larger / growth.smaller
    slow, fast = (
        1 + (ratio - 1) * (yields.value if end is None else end) for end in (yields.low, yields.high)
    )
    # If all other steps are ideal, one step has all of the loss.
    may_stop = any((slow / ratio * step - 1) / (step - 1) < PAYS_FROM for step in steps)
    return may_stop, fast >= math.prod(1 + PAYS_FROM * (step - 1) for step in steps)


def _best_rate(curve: Curve, size: int) -> float:
    """The throughput on a size if every growth to it is ideal; infinite if no smaller size has a figure."""
    rates = {one.cell.gpus: one.rate for one in curve.figures if one.cell.gpus < size}
    return rates[max(rates)] * size / max(rates) if rates else math.inf
