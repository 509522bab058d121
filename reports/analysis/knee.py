"""The knee of a scaling curve: the last size up to which every growth still pays.

From n to m devices the throughput X grows, and each added device brings (X(m) - X(n)) / (m - n). Over what
each device brought before, X(n) / n, that is the marginal yield

    (X(m) / X(n) - 1) / (m / n - 1)

1 on an ideal line, 0 where growing adds nothing. With E = (X(m) / X(n)) / (m / n), the efficiency of the
growth, it is 2 E - 1 for a doubling: 0.5 is E = 0.75. Unlike E it also sees that growing by a quarter added
nothing (E = 0.8), and does not blame growing eightfold for three doublings at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from reports.analysis.figures import CellFigures
from reports.analysis.scaling import BaselineCell, Curve, efficiency
from results.outcome import Evidence
from results.statistics import Metric

PAYS_FROM = 0.5
"""Marginal yield below which growing does not pay: an added device brings less than half of what each brought
before, which for a doubling is an efficiency of 75 %. A convention, not a law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """From one size that was run to the next."""

    smaller: int
    larger: int
    marginal: Metric
    """Marginal yield."""

    @property
    def pays(self) -> bool:
        """False where the yield, and the upper end of its interval if it has one, are below the threshold."""
        return max(self.marginal.value, self.marginal.high or 0.0) >= PAYS_FROM

    @property
    def is_open(self) -> bool:
        """Whether the interval holds the threshold, so that it may pay or not."""
        return self.pays and self.marginal.low is not None and self.marginal.low < PAYS_FROM

    @property
    def text(self) -> str:
        """`going from 1 to 2 changes throughput by +47 % (41 to 52; 100 % would be ideal)`."""
        ideal = 100 * (self.larger / self.smaller - 1)
        low, high = self.marginal.low, self.marginal.high
        ends = "" if low is None or high is None else f"{round(low * ideal):,} to {round(high * ideal):,}; "
        return (
            f"going from {self.smaller:,} to {self.larger:,} changes throughput by "
            f"{round(self.marginal.value * ideal):+,} % ({ends}{round(ideal):,} % would be ideal)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The size at which a curve stops paying, as far as it was measured."""

    growths: tuple[Growth, ...]
    """Between measured sizes, ascending; it ends where no claim is made."""
    unclaimed: tuple[int, ...]
    """Sizes with figures that no claim is made of."""
    reason: str | None
    """Why, of the first of them; None if there is none."""

    @property
    def beyond(self) -> Growth | None:
        """The first growth that does not pay."""
        return next((growth for growth in self.growths if not growth.pays), None)

    @property
    def at(self) -> int | None:
        """The knee; None if there is none, or nothing to find one in."""
        return None if self.beyond is None else self.beyond.smaller

    @property
    def deciding(self) -> tuple[Growth, ...]:
        """The growths up to the first that does not pay: those beyond it do not move the knee."""
        if self.beyond is None:
            return self.growths
        return self.growths[: self.growths.index(self.beyond) + 1]

    @property
    def text(self) -> str:
        """`knee between 32 and 64: ...`, `no knee up to 64`, or why nothing is claimed; a clause."""
        if self.beyond is not None:
            return f"knee between {self.beyond.smaller:,} and {self.beyond.larger:,}: {self.beyond.text}"
        if self.growths:
            return self._none_text
        return f"no knee is claimed: {self.reason or 'fewer than two sizes have a figure'}"

    @property
    def _none_text(self) -> str:
        """A knee is ruled out only where all intervals lie above the threshold."""
        last = f"{self.growths[-1].larger:,}"
        if any(growth.is_open for growth in self.growths):
            return f"no knee shown up to {last} (the runs are too far apart to tell)"
        if any(growth.marginal.low is None for growth in self.growths):
            return f"no knee seen up to {last} (single runs)"
        return f"no knee up to {last}"


def knee(curve: Curve) -> Knee:
    """The knee of a curve, from the single device that it is measured against, if that is smaller."""
    cells = _cells(curve)
    measured = [one for one in cells if one.evidence is Evidence.MEASURED]
    unclaimed = {
        one.cell.gpus: "emulated sizes make no claim" for one in cells if one.evidence is Evidence.EMULATED
    }
    growths: list[Growth] = []
    for smaller, larger in pairwise(measured):
        grown = efficiency(larger, BaselineCell(strategy=curve.key.label, figures=smaller), without="")
        if grown.metric is None:
            behind = measured[measured.index(larger) :]
            unclaimed |= {one.cell.gpus: grown.reason or "" for one in behind}
            break
        growths.append(_growth(smaller.cell.gpus, larger.cell.gpus, grown.metric))
    return Knee(
        growths=tuple(growths),
        unclaimed=tuple(sorted(unclaimed)),
        reason=unclaimed[min(unclaimed)] if unclaimed else None,
    )


def _cells(curve: Curve) -> Sequence[CellFigures]:
    """The curve's cells by size, with the single device in front."""
    cells = [point.figures for point in curve.points]
    if curve.single is not None and cells and curve.single.gpus < cells[0].cell.gpus:
        return [curve.single.figures, *cells]
    return cells


def _growth(smaller: int, larger: int, efficiency: Metric) -> Growth:
    """With r = m / n and E the efficiency from n to m: (E r - 1) / (r - 1)."""
    times = larger / smaller
    marginal = efficiency.mapped(lambda end: (end * times - 1) / (times - 1))
    return Growth(smaller=smaller, larger=larger, marginal=marginal)
