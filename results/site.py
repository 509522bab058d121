"""The profile of any cluster: how an estimate becomes a time limit, and the price of a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from results.errors import UsageError
from results.notation import seconds_of

_LONGEST_SIGNAL_S = 65_535
"""The maximum of sbatch's --signal."""


def seconds(text: str) -> float:
    """The seconds of a duration (`results.notation`). Raises ValueError for any other text, and for zero."""
    found = seconds_of(text)
    if not found:
        raise ValueError(f"{text!r} is not a time such as 90s, 30m, 1h30m, 1d or 1-00:00:00")
    return found


def require(name: str, rule: Callable[[str], object], value: str | None) -> None:
    """Check a value by a rule, if one is given. Raises ValueError with its key if the rule refuses it."""
    try:
        if value is not None:
            rule(value)
    except (ValueError, UsageError) as error:
        raise ValueError(f"{name}: {error}") from error


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an estimate becomes a time limit. Times are strings such as 30m or 2h."""

    startup: str | None = None
    """The time beyond 15 s that a launch on GPUs needs to its first step, such as for imports on many
    nodes."""
    safety_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    minimum: str = "10m"
    maximum: str = "1d"
    round_to: str = "5m"
    fixed: str | None = None
    """The limit to ask for; the estimate is then ignored."""
    signal: str = "2m"
    """The time before the limit at which the scheduler sends the job a signal."""

    def __post_init__(self) -> None:
        for name in ("startup", "minimum", "maximum", "round_to", "fixed", "signal"):
            require(name, seconds, getattr(self, name))
        if seconds(self.minimum) > seconds(self.maximum):
            raise ValueError(f"minimum {self.minimum} exceeds maximum {self.maximum}")
        if seconds(self.signal) > _LONGEST_SIGNAL_S:
            raise ValueError(f"signal {self.signal} exceeds Slurm's maximum of {_LONGEST_SIGNAL_S} s")

    @property
    def startup_s(self) -> float:
        return 0.0 if self.startup is None else seconds(self.startup)

    def limit_s(self, estimate_s: float, *, least_s: float = 0.0) -> float:
        """The limit to ask for, at least `least_s`, in whole minutes, as Slurm counts.

        The maximum of the site limits it, also below the estimate and `least_s`.
        """
        if self.fixed is not None:
            return math.ceil(seconds(self.fixed) / 60) * 60.0
        step = seconds(self.round_to)
        wanted = math.ceil(max(estimate_s * self.safety_factor, least_s) / step) * step
        return math.ceil(min(max(wanted, seconds(self.minimum)), seconds(self.maximum)) / 60) * 60.0

    def signal_s(self, limit_s: float) -> int:
        """Seconds before the limit at which the job gets its signal: at most half of `limit_s`."""
        return round(min(seconds(self.signal), limit_s / 2))


_MIG = re.compile(r"\dg\.\d+gb", re.IGNORECASE)
"""NVIDIA's names of parts of a GPU, such as 1g.10gb."""


def require_whole_gpus(kind: str | None, gpus_per_node: int) -> None:
    """Raise UsageError if several workers of a node would have parts of a GPU.

    `kind` is the cluster's name for what a worker gets; None: not known. CUDA shows a process one part only.
    """
    if kind is not None and _MIG.search(kind) and gpus_per_node > 1:
        raise UsageError(
            f"{kind} is a part of a GPU (MIG), and a process uses only the first part that it is given, so "
            f"that the {gpus_per_node} workers of a node would share one: give --gpus-per-node 1, or ask for "
            f"whole GPUs in the profile"
        )


@dataclass(frozen=True, slots=True)
class SiteCheck:
    """The result of one check of a profile with a cluster."""

    level: Literal["wrong", "doubtful", "fine"]
    """`wrong`: jobs are refused or never start. `doubtful`: some are, or they get unintended resources."""
    about: str
    """The key of the profile."""
    words: str
    """The given value, the cluster's, and, if it is not fine, the value to write instead."""


class SitePrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a GPU here."""

    usd_per_gpu_hour: Annotated[float, msgspec.Meta(ge=0)]
    source: str
    """The source of the figure: a price list and its date."""
