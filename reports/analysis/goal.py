"""What the size to buy is chosen by: the `--goal` of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reports.analysis.effect import SMALLEST_EFFECT
from reports.text import duration, percent

GoalKind = Literal["knee", "throughput", "cost", "time", "efficiency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A rule, and the limit that it has."""

    kind: GoalKind = "knee"
    limit: float | None = None
    """Seconds of an epoch (`time`), or an efficiency as a fraction of 1 (`efficiency`); else None."""
    smallest: float = SMALLEST_EFFECT
    """Share by which two points must differ to be told apart."""

    @property
    def text(self) -> str:
        """A clause: `the last size up to which every growth pays`."""
        if self.kind == "time":
            assert self.limit is not None
            return f"the cheapest size that finishes an epoch within {duration(self.limit * 1e9)}"
        if self.kind == "efficiency":
            assert self.limit is not None
            return f"the largest size with an efficiency of {percent(self.limit)} or more"
        return _TEXTS[self.kind]


KNEE = Goal()
"""The default: see `reports.analysis.knee`."""
_TEXTS: dict[GoalKind, str] = {
    "knee": "the last size up to which every growth pays",
    "throughput": "the fewest devices to which no size is shown to be faster",
    "cost": "the lowest cost of a sample",
}
