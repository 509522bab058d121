"""What is drawn together: the curves of one piece of work, how each is drawn, what is said beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.analysis.scaling import BaselineCell, Curve
from reports.page.svg import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from results.cell import BASELINE_STRATEGY

_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_SKIPS_SHOWN_UP_TO = 2
"""Skipped sizes are marked up to so many times the largest size with a result; the note names all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStyle:
    """How one series is drawn."""

    colour: str
    marker: str


LineStyles = dict[str, LineStyle]
"""By the exchange of the series: the same on the whole page, over every network."""


def line_styles(curves: Sequence[Curve]) -> LineStyles:
    """A colour and a marker for each label; one device alone is drawn in ink."""
    labels = [
        label for label in dict.fromkeys(curve.key.exchange for curve in curves) if label != BASELINE_STRATEGY
    ]
    drawn = {
        label: LineStyle(colour=_COLOURS[place % len(_COLOURS)], marker=_MARKERS[place % len(_MARKERS)])
        for place, label in enumerate(labels)
    }
    return {BASELINE_STRATEGY: LineStyle(colour=INK, marker="o")} | drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveGroup:
    """The curves of one drawing: the same work, scaled by the same rule, by different strategies."""

    name: str
    """Unique on the page."""
    title: str
    curves: tuple[Curve, ...]
    """At least one of them has a point."""
    devices_word: str

    @property
    def sizes(self) -> list[int]:
        """Every size on the axis, ascending."""
        points = {point.gpus for curve in self.curves for point in curve.points}
        return sorted(points | {gap for curve in self.curves for gap in shown_gaps(curve)})

    @property
    def unit(self) -> str:
        """Of the throughput: `images/s`."""
        units = {point.figures.throughput.unit for curve in self.curves for point in curve.points}
        return " or ".join(sorted(units))

    @property
    def start(self) -> BaselineCell:
        """Where the ideal line starts: the best single device, or the smallest size there is."""
        singles = [curve.single for curve in self.curves if curve.single is not None]
        owns = [curve.own for curve in self.curves if curve.own is not None]
        return (singles or sorted(owns, key=lambda own: own.gpus))[0]

    @property
    def starts(self) -> list[int]:
        """The sizes of the baselines that the drawn efficiencies are measured against."""
        baselines = [point.efficiency.baseline for curve in self.curves for point in curve.points]
        return sorted({baseline.gpus for baseline in baselines if baseline is not None})

    @property
    def against(self) -> str:
        """What the drawn efficiencies are measured against."""
        singles = [curve.single for curve in self.curves if curve.single is not None]
        return singles[0].short if singles else "the own smallest size"

    @property
    def description(self) -> str:
        """The drawing in a sentence, for readers who cannot see it; the table has the numbers."""
        texts = [
            f"{curve.key.label} at {', '.join(str(point.gpus) for point in curve.points)} {self.devices_word}"
            for curve in self.curves
            if curve.points
        ]
        return f"{self.title}. {'; '.join(texts)}. The numbers are in the table below."

    @property
    def missing(self) -> str:
        """Every missing size of every curve in a sentence; empty for none. Not those below where a strategy
        begins."""
        texts = []
        for curve in self.curves:
            begins = min((point.gpus for point in curve.points), default=1)
            gaps = [gap for gap in curve.gaps if not gap.skipped or gap.gpus > begins]
            if gaps and curve.key.strategy != BASELINE_STRATEGY:
                sizes = ", ".join(f"{gap.gpus:,}{' (skipped)' if gap.skipped else ''}" for gap in gaps)
                texts.append(f"{curve.key.label} at {sizes}")
        return f"No result: {'; '.join(texts)}." if texts else ""

    @property
    def no_claims(self) -> str:
        """The sizes that have figures and no efficiency in a sentence; empty for none."""
        texts = []
        for curve in self.curves:
            none = [f"{point.gpus:,}" for point in curve.points if point.efficiency.metric is None]
            if none:
                texts.append(f"{curve.key.label} at {', '.join(none)}")
        return f"No efficiency is claimed for {'; '.join(texts)}; the reasons are below." if texts else ""


def shown_gaps(curve: Curve) -> list[int]:
    """Sizes to mark as missing: all that failed, and the skipped ones where the curve would go on.

    `single` ends at one device by its nature, and a strategy begins at its smallest size.
    """
    failed = [gap.gpus for gap in curve.gaps if not gap.skipped]
    if curve.key.strategy == BASELINE_STRATEGY:
        return failed
    there = [point.gpus for point in curve.points] + failed
    begins, reached = min(there, default=0), max(there, default=0)
    skipped = [gap.gpus for gap in curve.gaps if gap.skipped]
    return failed + [gpus for gpus in skipped if begins < gpus <= _SKIPS_SHOWN_UP_TO * reached]
