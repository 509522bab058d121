"""Laws by which the step time of a series continues, and the rule by which one of them answers.

Every law goes through the largest measured size, so that constant efficiency and the others differ only in
how the step time grows from there. With n devices and g(n) the law's own term:

    constant efficiency    T(n) = T(m)
    ring                   T(n) = T(m) (1 + s (g(n) - g(m))),  g(n) = (n - 1) / n
    log                    the same with g(n) = log2 n
    pooled slope           T(n) = T(m) (n / m) ** b

where m is the largest measured size, s >= 0 the least-squares slope of T / T(m) over the measured sizes, and
b >= 0 the log-log slope of the series, shrunk to the median slope of published families:
(d b_own + 4 b_pool) / (d + 4), with d the sum of squared deviations of log2 n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType

FEWEST_TO_CHOOSE = 3
"""Sizes from which on a law is chosen by its errors on earlier sizes; below, constant efficiency answers."""
LEAST_NOISE = 0.005
"""Relative error that a difference of laws must exceed: published figures are single runs of three digits."""
IRREGULAR = -math.log(0.9)
"""Largest logarithm of a change per doubling of a curve that a law continues: an efficiency of 90 %."""
FARTHEST = 8
"""Multiple of the largest measured size up to which sizes are projected."""
_SHRINKAGE = 4.0
"""Weight of the pool's slope, as a spread of log2 n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Step times of a series at one batch of a replica, by ascending size."""

    gpus: tuple[int, ...]
    ns: tuple[float, ...]
    """In any one unit."""
    pool_slope: float
    """Log-log slope of published families: `Residuals.slope`."""
    noise: float = 0.0
    """Relative half-width of the widest interval of a size."""

    def up_to(self, sizes: int) -> Steps:
        return replace(self, gpus=self.gpus[:sizes], ns=self.ns[:sizes])

    @property
    def changes(self) -> tuple[float, ...]:
        """Logarithm of the step time's growth per doubling, between neighbouring sizes."""
        return tuple(
            math.log(later / earlier) / math.log2(larger / smaller)
            for (smaller, larger), (earlier, later) in zip(
                pairwise(self.gpus), pairwise(self.ns), strict=True
            )
        )

    @property
    def roughness(self) -> float:
        """The largest change per doubling in either direction, as a logarithm; 0 for one size."""
        return max(map(abs, self.changes), default=0.0)


Law = Callable[[Steps, int], float]


def _linear_in(term: Callable[[float], float]) -> Law:
    def law(steps: Steps, gpus: int) -> float:
        last, at = steps.ns[-1], term(steps.gpus[-1])
        distances = [term(size) - at for size in steps.gpus[:-1]]
        squares = sum(distance * distance for distance in distances)
        grown = (distance * (ns / last - 1) for distance, ns in zip(distances, steps.ns, strict=False))
        slope = max(0.0, sum(grown) / squares) if squares else 0.0
        return last * (1 + slope * (term(gpus) - at))

    return law


def _pooled(steps: Steps, gpus: int) -> float:
    logs = [math.log2(size) for size in steps.gpus]
    middle = fmean(logs)
    spread = sum((one - middle) ** 2 for one in logs)
    along = sum((one - middle) * math.log2(ns) for one, ns in zip(logs, steps.ns, strict=True))
    slope = max(0.0, (along + _SHRINKAGE * steps.pool_slope) / (spread + _SHRINKAGE))
    return float(steps.ns[-1] * (gpus / steps.gpus[-1]) ** slope)


CONSTANT = "constant efficiency"
LAWS: Mapping[str, Law] = MappingProxyType(
    {
        CONSTANT: lambda steps, gpus: steps.ns[-1],
        "ring": _linear_in(lambda size: (size - 1) / size),
        "log": _linear_in(math.log2),
        "pooled slope": _pooled,
    }
)
"""The laws by name, the simplest first."""


def chosen_law(steps: Steps) -> tuple[str, float | None]:
    """The simplest law that is not worse than the best on the series' own earlier sizes beyond their noise.

    Each size after the first is predicted from the sizes before it; errors are means of logarithms. Returned
    with its skill: 1 less its error over the error of constant efficiency; None: not tested.
    """
    if len(steps.gpus) < FEWEST_TO_CHOOSE:
        return CONSTANT, None
    errors = {name: _error(law, steps) for name, law in LAWS.items()}
    enough = min(errors.values()) + max(LEAST_NOISE, steps.noise)
    name = next(name for name, error in errors.items() if error <= enough)
    return name, 1 - errors[name] / errors[CONSTANT] if errors[CONSTANT] else 0.0


def _error(law: Law, steps: Steps) -> float:
    return fmean(
        abs(math.log(law(steps.up_to(known), steps.gpus[known]) / steps.ns[known]))
        for known in range(1, len(steps.gpus))
    )


def refused(steps: Steps, gpus: int, per_node: int) -> str | None:
    """Why no law answers for `gpus` devices on nodes of `per_node`, in two words; None if one does."""
    if len(steps.gpus) < 2:
        return "one size"
    if steps.gpus[-1] <= per_node < gpus:
        return "node boundary"
    if steps.roughness > IRREGULAR:
        return "irregular"
    return "too far" if gpus > FARTHEST * steps.gpus[-1] else None
