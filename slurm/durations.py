"""Times as Slurm writes and reads them."""

from __future__ import annotations

import math

from results.durations import seconds_of


def slurm_time(limit_s: float) -> str:
    """A time limit as `DAYS-HH:MM:SS`, in whole minutes, rounded up: Slurm has no finer ones."""
    days, minutes = divmod(math.ceil(limit_s / 60), 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a time limit that Slurm printed, or None if Slurm printed no limit.

    Slurm means minutes by a bare number.
    """
    seconds = seconds_of(f"{text}:00" if text.isdecimal() else text)
    return None if seconds is None else int(seconds)
