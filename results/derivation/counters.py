"""Figures of a run that do not depend on time: counted, hashed, or taken after a fixed number of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypedDict

from results.record import RankRecord

FIXED_LOSS = slice(10, 20)
"""Steps after the first ones whose loss tells how far a fixed number of samples has brought the model."""


class Counters(TypedDict):
    """Fields of a `RunResult`."""

    exchange_buckets: float | None
    exchange_buckets_early: float | None
    first_hash: str | None
    loss_fixed: float | None


def counters(ranks: Sequence[RankRecord]) -> Counters:
    """The counters of a run whose ranks are given in their order; None unless all ranks have them."""
    counted = [rank.buckets for rank in ranks if rank.buckets is not None and rank.buckets.started]
    early = [own.early for own in counted if own.early is not None]
    return Counters(
        exchange_buckets=max(map(_mean, (own.started for own in counted)))
        if len(counted) == len(ranks)
        else None,
        # The rank that overlaps least is the one that the others wait for.
        exchange_buckets_early=min(map(_mean, early)) if len(early) == len(ranks) else None,
        first_hash=_first_hash(ranks),
        loss_fixed=_loss_fixed(ranks),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _first_hash(ranks: Sequence[RankRecord]) -> str | None:
    """The ranks' own; where replicas are not equal, a hash of all of theirs."""
    hashes = [rank.first_hash for rank in ranks if rank.first_hash is not None]
    if not hashes or len(hashes) < len(ranks):
        return None
    if len(set(hashes)) == 1:
        return hashes[0]
    return hashlib.blake2b(" ".join(hashes).encode(), digest_size=8).hexdigest()


def _loss_fixed(ranks: Sequence[RankRecord]) -> float | None:
    """None where a run is shorter than `FIXED_LOSS`, or a loss in it is not finite."""
    wanted = FIXED_LOSS.stop - FIXED_LOSS.start
    found = [
        loss
        for rank in ranks
        for loss in (rank.warmup.loss + rank.steps.loss)[FIXED_LOSS]
        if loss is not None
    ]
    return _mean(found) if len(found) == wanted * len(ranks) else None
