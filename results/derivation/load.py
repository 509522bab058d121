"""How evenly the experts of a model were loaded, from the rows that its ranks counted. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from results.derivation.matching import Floats
from results.record import RankRecord
from results.run import BusiestExpert


def rows_by_rank(ranks: Sequence[RankRecord]) -> list[float] | None:
    """The rows that the experts of each rank computed in the mean step; None where no rank counted any."""
    if not any(rank.experts for rank in ranks):
        return None
    return [sum(sum(one.rows) for one in rank.experts) / len(rank.steps.step_ns) for rank in ranks]


def share_of_rows(more_rows: Sequence[float], excess: Sequence[float]) -> float:
    """The share s, 0 to 1, that rows take in the median rank's compute.

    `more_rows` x(r) are the rows of each rank over the median less 1, and `excess` y(r) is the same of its
    compute, so that y = s x. s is the least absolute deviation, which is the median of y / x weighted by |x|
    and which a slow host among many does not move. No step grows faster than its rows.
    """
    shares = sorted((y / x, abs(x)) for x, y in zip(more_rows, excess, strict=True) if x)
    if not shares:
        return 0.0
    weights = np.cumsum([weight for _, weight in shares])
    return min(max(shares[int(np.searchsorted(weights, weights[-1] / 2))][0], 0.0), 1.0)


def over_median(values: Sequence[float] | Floats) -> Floats:
    """Each value over the median, less 1; 0 where the median is."""
    array = np.asarray(values, dtype=np.float64)
    median = float(np.median(array))
    return array / median - 1 if median > 0 else np.zeros_like(array)


def imbalance_ns(rows: Sequence[float], compute_ns: Floats) -> float:
    """The time of a step that the mean rank loses because experts of another rank compute more rows.

    Where rows take the share s of the median compute c, rank r with x(r) more rows than the median takes
    c (1 + s x(r)), and the mean rank waits c s (max x - mean x) for the rank with most rows.
    """
    more_rows = over_median(rows)
    share = share_of_rows(more_rows.tolist(), over_median(compute_ns).tolist())
    return float(np.median(compute_ns) * share * (more_rows.max() - more_rows.mean()))


def dropped_flops(ranks: Sequence[RankRecord], replicas: int) -> int:
    """The FLOPs of the mean step, forward and backward (twice forward), of the rows that were dropped.

    All ranks that compute the tokens of a replica in a layer together count each of its rows.
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for one in (one for rank in ranks for one in rank.experts):
        layers[one.module].append(3 * one.dropped * one.row_flops)
    dropped = sum(sum(each) * replicas / len(each) for each in layers.values())
    return round(dropped / len(ranks[0].steps.step_ns)) if dropped else 0


def dropped_share(ranks: Sequence[RankRecord]) -> float | None:
    """The share of the rows that tokens chose which no expert computed; None where none were counted."""
    layers = [one for rank in ranks for one in rank.experts]
    chosen = sum(sum(one.rows) + one.dropped for one in layers)
    return sum(one.dropped for one in layers) / chosen if chosen else None


def busiest_expert(ranks: Sequence[RankRecord]) -> BusiestExpert | None:
    """The expert whose rows exceed the mean of its layer most, over all ranks; None where none were counted.

    An expert that several ranks have, as replicas do, has the rows of all of them.
    """
    layers: dict[str, Counter[int]] = defaultdict(Counter)
    for one in (one for rank in ranks for one in rank.experts):
        layers[one.module].update(dict(enumerate(one.rows, one.first)))
    found = (
        BusiestExpert(module=module, expert=expert, times_mean=count * len(rows) / rows.total())
        for module, rows in layers.items()
        if rows.total()
        for expert, count in rows.most_common(1)
    )
    return max(found, key=lambda one: one.times_mean, default=None)
