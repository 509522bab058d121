"""How evenly the experts of a model were loaded, from the rows that its ranks counted. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from results.record import RankRecord
from results.run import BusiestExpert


def rows_by_rank(ranks: Sequence[RankRecord]) -> list[float] | None:
    """The rows that the experts of each rank computed in the mean step; None where no rank counted any."""
    if not any(rank.experts for rank in ranks):
        return None
    return [sum(sum(one.rows) for one in rank.experts) / len(rank.steps.step_ns) for rank in ranks]


def dropped_flops(ranks: Sequence[RankRecord], replicas: int) -> int:
    """The FLOPs of the mean step, forward and backward (twice forward), of the rows that were dropped.

    All ranks that compute the tokens of a replica in a layer together count each of its rows.
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for one in (one for rank in ranks for one in rank.experts):
        layers[one.module].append(3 * one.dropped * one.row_flops)
    dropped = sum(sum(each) * replicas / len(each) for each in layers.values())
    return round(dropped / len(ranks[0].steps.step_ns)) if dropped else 0


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
