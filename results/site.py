"""The profile of any cluster: how an estimate becomes a time limit, and the price of a GPU."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from results.notation import seconds_of

_LONGEST_SIGNAL_S = 65_535
"""The most that --signal of sbatch takes."""


def seconds(text: str) -> float:
    """The seconds of a duration (`results.notation`). Raises ValueError for any other text, and for zero."""
    found = seconds_of(text)
    if not found:
        raise ValueError(f"{text!r} is not a time such as 90s, 30m, 1h30m, 1d or 1-00:00:00")
    return found


def _check(name: str, value: str | None) -> None:
    """Refuse what is no time, as a ValueError that names its key."""
    try:
        if value is not None:
            seconds(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an estimate becomes a time limit. Times are texts such as 30m or 2h."""

    startup: str | None = None
    """What a launch takes to its first step beyond 15 s, on GPUs, such as many nodes that import at once."""
    safety_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    minimum: str = "10m"
    maximum: str = "1d"
    round_to: str = "5m"
    fixed: str | None = None
    """Asked for whatever the estimate is."""
    signal: str = "2m"
    """So long before the limit the job is told that its end is near."""

    def __post_init__(self) -> None:
        for name in ("startup", "minimum", "maximum", "round_to", "fixed", "signal"):
            _check(name, getattr(self, name))
        if seconds(self.minimum) > seconds(self.maximum):
            raise ValueError(f"minimum {self.minimum} is more than maximum {self.maximum}")
        if seconds(self.signal) > _LONGEST_SIGNAL_S:
            raise ValueError(f"signal {self.signal} is earlier than Slurm can tell: {_LONGEST_SIGNAL_S} s")

    @property
    def startup_s(self) -> float:
        return 0.0 if self.startup is None else seconds(self.startup)

    def limit_s(self, estimate_s: float, *, least_s: float = 0.0) -> float:
        """The limit to ask for, at least `least_s`, in whole minutes, as Slurm counts.

        It can be less than both where the site allows no more.
        """
        if self.fixed is not None:
            return math.ceil(seconds(self.fixed) / 60) * 60.0
        step = seconds(self.round_to)
        wanted = math.ceil(max(estimate_s * self.safety_factor, least_s) / step) * step
        return math.ceil(min(max(wanted, seconds(self.minimum)), seconds(self.maximum)) / 60) * 60.0

    def signal_s(self, limit_s: float) -> int:
        """How long before `limit_s` the job is told: half of it, if it is that short."""
        return round(min(seconds(self.signal), limit_s / 2))


class SitePrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a GPU here."""

    usd_per_gpu_hour: Annotated[float, msgspec.Meta(ge=0)]
    source: str
    """The source of the figure: a price list and its date."""
