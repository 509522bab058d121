"""Times as people write them in a site profile, and as Slurm writes and reads them."""

from __future__ import annotations

import math
import re

_WRITTEN = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


def seconds(text: str) -> float:
    """`90s`, `30m`, `2.5h` or `1d` in seconds. Raises ValueError for anything else, also a time of zero.

    Slurm's own `1:30:00` is refused, because YAML takes it for the number 5400 unless it is quoted.
    """
    match = _WRITTEN.fullmatch(text)
    if match is None or not float(match["number"]):
        raise ValueError(f"{text!r} is not a time such as 90s, 30m, 2.5h or 1d")
    return float(match["number"]) * _UNIT_S[match["unit"]]


def slurm_time(limit_s: float) -> str:
    """A time limit as `DAYS-HH:MM:SS`, in whole minutes, rounded up: Slurm has no finer ones."""
    days, minutes = divmod(math.ceil(limit_s / 60), 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def slurm_seconds(text: str) -> int | None:
    """A time limit that Slurm printed, in seconds; None if there is no limit or none is known.

    Forms: `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS` (--time in sbatch's manual).
    """
    match = _SLURM.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is None:
        # Without days, one number is minutes, and two are minutes and seconds.
        parts = [0, *parts] if len(parts) < 3 else parts
    hours, minutes, rest = [*parts, 0, 0][:3]
    return int(match["days"] or 0) * 86_400 + hours * 3600 + minutes * 60 + rest
