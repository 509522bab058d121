"""Times as Slurm writes and reads them."""

from __future__ import annotations

import math
import re

_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


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
