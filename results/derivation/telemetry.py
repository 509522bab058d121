"""What the samples of the devices or hosts come to for a whole run, and the energy of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from statistics import fmean

from results.record import RankRecord

BIT_MASKS = ("throttle_reasons",)


def telemetry_means(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """By name of the series: the mean over ranks of each one's mean over its samples, and `NAME_max`.

    Samples that are unknown do not count; a series of which nothing is known is left out. Of a bit mask the
    bits that were ever set.
    """
    own = [rank.telemetry.series for rank in ranks if rank.telemetry is not None]
    means: dict[str, float] = {}
    for name in sorted({name for series in own for name in series}):
        known = [[value for value in series.get(name, []) if value is not None] for series in own]
        filled = [values for values in known if values]
        if filled and name in BIT_MASKS:
            means[name] = float(reduce(or_, (int(value) for values in filled for value in values)))
        elif filled:
            means[name] = fmean(fmean(values) for values in filled)
            means[f"{name}_max"] = max(map(max, filled))
    return means


def device_energy(ranks: Sequence[RankRecord], step_ns: float) -> float | None:
    """Energy of all devices in one step, in J: the sum over ranks of energy over window, times the step time.

    One device a rank, read from its own counter. None unless all ranks have a reading.
    """
    watts = [power for rank in ranks if (power := _mean_power_w(rank)) is not None]
    return sum(watts) * step_ns / 1e9 if len(watts) == len(ranks) else None


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
