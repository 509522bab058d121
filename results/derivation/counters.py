"""Figures of a run that do not depend on time, the means of its telemetry, and the energy of a step. Pure.

Counters are counted, hashed, or taken after a fixed number of samples."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from operator import or_
from statistics import fmean
from typing import Any

from results.record import RankRecord

FIXED_LOSS = slice(10, 20)
"""Steps after the first ones whose mean loss is compared between runs, after a fixed number of samples."""


def counters(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    """The counters of a run whose ranks are given in their order; None unless all ranks have them."""
    counted = [rank.buckets for rank in ranks if rank.buckets is not None and rank.buckets.started]
    early = [own.early for own in counted if own.early is not None]
    left = [[share for step in own.left for share in step] for own in counted if own.left is not None]
    started = [_mean(own.started) for own in counted]
    return {
        "exchange_buckets": max(started) if len(counted) == len(ranks) else None,
        # The rank that overlaps least is the one that the others wait for.
        "exchange_buckets_early": min(map(_mean, early)) if len(early) == len(ranks) else None,
        "exchange_backward_left": min(map(_mean, left)) if len(left) == len(ranks) and all(left) else None,
        "first_hash": _first_hash(ranks),
        "loss_fixed": _loss_fixed(ranks),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _first_hash(ranks: Sequence[RankRecord]) -> str | None:
    """The hash that all ranks recorded; a hash over all of theirs where replicas differ."""
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
        for loss in (rank.warmup_loss + rank.steps.loss)[FIXED_LOSS]
        if loss is not None
    ]
    return _mean(found) if len(found) == wanted * len(ranks) else None


BIT_MASKS = ("throttle_reasons",)
POWER = "power_w"
"""The series of a device's power: ranks that share the device read the same one."""


def _devices(ranks: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Group the ranks by device, as hosts and devices name themselves; without a name, each has its own."""
    found: dict[tuple[str, str | int], list[RankRecord]] = defaultdict(list)
    for rank in ranks:
        own = rank.environment
        found[own.host, own.device_uuid or rank.rank].append(rank)
    return list(found.values())


def _known(rank: RankRecord, name: str) -> list[float]:
    series = [] if rank.telemetry is None else rank.telemetry.series.get(name, [])
    return [value for value in series if value is not None]


def telemetry_means(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """The mean over ranks of the means over their samples, by name of the series, and `NAME_max`.

    The power is the mean over devices. Unknown samples do not count, and a series without a known sample is
    left out. A bit mask becomes the bits that were ever set.
    """
    own = [rank.telemetry.series for rank in ranks if rank.telemetry is not None]
    means: dict[str, float] = {}
    for name in sorted({name for series in own for name in series}):
        groups = _devices(ranks) if name == POWER else [[rank] for rank in ranks]
        known = [[value for rank in group for value in _known(rank, name)] for group in groups]
        filled = [values for values in known if values]
        if filled and name in BIT_MASKS:
            means[name] = float(reduce(or_, (int(value) for values in filled for value in values)))
        elif filled:
            means[name] = fmean(fmean(values) for values in filled)
            means[f"{name}_max"] = max(map(max, filled))
    return means


def device_energy(ranks: Sequence[RankRecord], step_ns: float) -> float | None:
    """Energy of all devices in one step, in J: the sum over devices of energy over window, times the step
    time.

    Ranks that share a device read the same counter, and their mean counts once. None unless all ranks have a
    reading.
    """
    watts = [[_mean_power_w(rank) for rank in device] for device in _devices(ranks)]
    known = [[power for power in device if power is not None] for device in watts]
    if sum(map(len, known)) < len(ranks):
        return None
    return sum(map(fmean, known)) * step_ns / 1e9


def why_energy_unknown(ranks: Sequence[RankRecord]) -> str:
    """Why the energy of a step is not known."""
    without = next(rank for rank in ranks if _mean_power_w(rank) is None)
    for key in ("energy_j", "telemetry"):
        if key in without.absent:
            return without.absent[key]
    if without.telemetry is None:
        return "no telemetry was recorded"
    return f"the device of rank {without.rank} gave no readings of an energy counter"


def _mean_power_w(rank: RankRecord) -> float | None:
    own = rank.telemetry
    if own is None or own.energy_j is None or not own.window_ns:
        return None
    return own.energy_j / own.window_ns * 1e9
