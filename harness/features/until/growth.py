"""The rule by which a study grows: the sizes of a series that the next round runs, or why it has ended.

A series grows from its smallest size. A round runs the largest size so far and the next one. Once a growth
does not pay, it runs the size before that growth and both neighbours of that size. Every round runs the
baseline as well and each size once, in a drawn order, so that drift between rounds does not look like scaling
(`reports.analysis.knee`). The rule looks at complete rounds only.

A size is certain if it has the asked odds with a threshold of paying `NEAR` below and `NEAR` above the usual
one. Where a growth is closer to the threshold than that, repeated looks would sooner or later find either
answer. `tests/features/until/bands.py` measures how often a certain size is the true one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from reports.analysis.holes import reach
from reports.analysis.knee import LEAST_RUNS, PAYS_FROM, Knee, Size, knee_of, odds_of

MOST_RUNS = 9
"""Runs of the deciding sizes after which further ones are not expected to decide."""
NEAR = 0.03
"""Distance from `PAYS_FROM` up to which the yield of a growth leaves open whether it pays."""
MOST_COST = 1.1
"""The largest share of the full matrix that a series may take, in runs times devices."""

End = Literal["certain", "hole", "runs", "cost", "no sizes"]
"""Why a series has ended: its size is certain; a size at which it may lie has failed; more runs would not
decide soon, or would cost more than `MOST_COST`; fewer than two sizes can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The sizes of one series with its baseline, and what was measured of them."""

    sizes: tuple[int, ...]
    """All sizes, ascending."""
    measured: tuple[Size, ...]
    """The sizes that can be compared, with their step times."""
    lost: frozenset[int] = frozenset()
    """The sizes that have failed for good, or make no claim."""
    holes: frozenset[int] = frozenset()
    """The sizes at which another run may show the answer: some of `lost`, and unplanned doublings."""
    spent: int = 0
    """Runs up to now, each times its devices."""
    repeats: int = LEAST_RUNS
    """Runs that each deciding size needs."""

    @property
    def most(self) -> float:
        """The value of `spent` that it may reach."""
        return MOST_COST * self.repeats * sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next round of a series, or its end."""

    sizes: tuple[int, ...]
    """The sizes that decide, and that the next round of it would run."""
    knee: Knee | None = None
    """The knee of what was measured; None before two sizes can be compared."""
    odds: float = 0.0
    """The odds of its size, the lower of those at both thresholds; 0 while a round only grows."""
    end: End | None = None
    """Why it has ended; None if another round follows."""


def next_step(ladder: Ladder, odds: float) -> Step:
    """Decide what follows for a series whose size is certain from `odds` on."""
    there = [one.gpus for one in ladder.measured if one.gpus not in ladder.lost]
    larger = [size for size in ladder.sizes if size not in {*there, *ladder.lost}]
    if len(there) < 2:
        first = (*there, *larger)[:2]
        return Step(sizes=first, end=None if len(first) == 2 else "no sizes")
    found = knee_of(ladder.measured)
    assert found.size is not None
    if found.at is None and larger:
        sizes, sure, end = {there[0], there[-1], larger[0]}, 0.0, None
    else:
        at = there.index(found.size)
        sizes, sure = {there[0], *there[max(0, at - 1) : at + 2]}, _least_odds(ladder, found.size)
        end = _decided(ladder, found, sizes, sure >= odds)
    if end is None and ladder.spent + sum(sizes) > ladder.most:
        end = "cost"
    return Step(sizes=tuple(sorted(sizes)), knee=found, odds=sure, end=end)


def _least_odds(ladder: Ladder, size: int) -> float:
    """The odds of a size, the lower of those with both thresholds."""
    both = [odds_of(ladder.measured, pays_from) for pays_from in (PAYS_FROM - NEAR, PAYS_FROM + NEAR)]
    return min(shares[size] if shares else 0.0 for shares in both)


def _decided(ladder: Ladder, found: Knee, deciding: Set[int], sure: bool) -> End | None:
    """Return why a series ends at a knee; None if its sizes are to be run again."""
    runs = min(len(one.steps) for one in ladder.measured if one.gpus in deciding)
    if runs < ladder.repeats:
        return None
    low, high = reach(found, ladder.measured[0].gpus, sorted(ladder.holes))
    if low != high:
        return "hole"
    if sure:
        return "certain"
    return "runs" if runs >= max(MOST_RUNS, ladder.repeats) else None
