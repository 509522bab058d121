"""Times as Slurm writes and reads them."""

from __future__ import annotations

import math

from results.durations import seconds_of


def slurm_time(limit_s: float) -> str:
    """A time limit as `DAYS-HH:MM:SS`, in whole minutes, rounded up: Slurm has no finer ones."""
    days, minutes = divmod(math.ceil(limit_s / 60), 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def slurm_seconds(text: str) -> int | None:
    """A time limit that Slurm printed, in seconds; a bare number is minutes. None if there is no limit or it
    is not known."""
    seconds = seconds_of(f"{text}:00" if text.isdecimal() else text)
    return None if seconds is None else int(seconds)
