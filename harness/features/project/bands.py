"""Bands of 80 % about a projection, learnt from the errors of each law on published scaling tables.

`residuals.json` has, for each prediction that the rules of `laws` would have answered, the logarithm of the
true step time over the predicted one, by law. An error is divided by the distance of its prediction,

    doublings (0.03 + roughness / 2)

so that a band widens with each doubling and with the unevenness of the measured curve. The ends of a band are
the 10 % and 90 % quantiles of these errors, in which every family of tables weighs the same, times the
distance of the new prediction. The two constants were chosen on the same tables. The script
`docs/studies/projection_tables.py` writes the file.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from results.schema import Schema

ENDS = (0.1, 0.9)
FARTHEST_VALIDATED = 2.0
"""Doublings up to which the tables have predictions that are answered."""
_LEAST_ROUGHNESS, _ROUGHNESS_SHARE = 0.03, 0.5


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction of a published table."""

    gpus: tuple[int, int]
    """The largest size that was used, and the size that was predicted."""
    roughness: float
    law: str
    """The law that the rules choose."""
    errors: dict[str, float]
    """Logarithm of the true step time over the predicted one, by law."""

    @property
    def doublings(self) -> float:
        return math.log2(self.gpus[1] / self.gpus[0])


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One publication: its series are of one cluster and one program."""

    source: str
    address: str
    slope: float | None
    """Median log-log slope of its regular series; None without one."""
    residuals: tuple[Residual, ...]


class Residuals(msgspec.Struct, frozen=True, kw_only=True):
    """All families."""

    families: tuple[Family, ...]

    def without(self, source: str) -> Residuals:
        """All other families, by which a table is scored that is among them."""
        return Residuals(families=tuple(one for one in self.families if one.source != source))

    @property
    def slope(self) -> float:
        return median(one.slope for one in self.families if one.slope is not None)

    def quantiles(self, law: str) -> tuple[float, float]:
        """Both ends of the errors of a law over their distances; without an error the farthest of all."""
        laws = {one for family in self.families for residual in family.residuals for one in residual.errors}
        if law not in laws:
            # Laws err towards too fast, as a constant step does. Nothing says to which side another one errs.
            farthest = max(abs(end) for known in laws for end in self.quantiles(known))
            return -farthest, farthest
        rows = [
            (one.errors[law] / distance(one.doublings, one.roughness), 1 / len(family.residuals))
            for family in self.families
            for one in family.residuals
            if law in one.errors
        ]
        values, weights = np.array(sorted(rows)).T
        places = (np.cumsum(weights) - weights / 2) / weights.sum()
        low, high = np.interp(ENDS, places, values)
        return min(0.0, float(low)), max(0.0, float(high))


SCHEMA = Schema("projection-residuals", 1, Residuals)
FILE = Path(__file__).with_name("residuals.json")


@cache
def shipped() -> Residuals:
    """The residuals that come with the program."""
    return SCHEMA.read(FILE)


def distance(doublings: float, roughness: float) -> float:
    return doublings * (_LEAST_ROUGHNESS + _ROUGHNESS_SHARE * roughness)


def band(
    law: str, doublings: float, roughness: float, residuals: Residuals | None = None
) -> tuple[float, float]:
    """The factors from a projected step time to both ends of its band."""
    low, high = _quantiles(law) if residuals is None else residuals.quantiles(law)
    far = distance(doublings, roughness)
    return math.exp(low * far), math.exp(high * far)


@cache
def _quantiles(law: str) -> tuple[float, float]:
    return shipped().quantiles(law)


def covered() -> dict[tuple[str, int], list[tuple[bool, float]]]:
    """Whether a band contains the truth, and its width as a share of the projection: of each prediction by
    its family, which does not teach it, and its distance as a multiple of the largest size."""
    found: dict[tuple[str, int], list[tuple[bool, float]]] = {}
    for family in shipped().families:
        others = shipped().without(family.source)
        for one in sorted(family.residuals, key=lambda one: one.doublings):
            low, high = band(one.law, one.doublings, one.roughness, others)
            inside = low <= math.exp(one.errors[one.law]) <= high
            found.setdefault((family.source, round(2**one.doublings)), []).append((inside, high - low))
    return found


def coverage_text() -> str:
    """How often the bands of each family contain the truth at each distance, and their median width."""
    return "; ".join(
        f"{source} {times}x {sum(hit for hit, _ in hits)} of {len(hits)}, "
        f"width {100 * median(width for _, width in hits):.0f} %"
        for (source, times), hits in covered().items()
    )
