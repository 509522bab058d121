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
