"""Durations as people and schedulers write them."""

from __future__ import annotations

import re

UNIT_S = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_WITH_UNITS = re.compile(
    r"\s*".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?)\s*{unit})?" for unit in UNIT_S), re.ASCII
)
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})", re.ASCII)


def seconds_of(text: str) -> float | None:
    """The seconds of `90s`, `1h30m`, `2.5h` or `2d`, or of what Slurm writes: `MM:SS`, `HH:MM:SS`, `D-HH`,
    `D-HH:MM` and `D-HH:MM:SS` (--time in sbatch's manual).

    None for any other text, also for a bare number, which is in minutes for Slurm and in seconds elsewhere.
    """
    text = text.strip()
    if text and (match := _WITH_UNITS.fullmatch(text)):
        return sum(float(match[unit] or 0) * seconds for unit, seconds in UNIT_S.items())
    match = _CLOCK.fullmatch(text)
    if match is None or match[0].isdecimal():
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is None and len(parts) == 2:
        # Without days, two numbers are minutes and seconds.
        parts = [0, *parts]
    hours, minutes, rest = [*parts, 0, 0][:3]
    return float(int(match["days"] or 0) * 86_400 + hours * 3600 + minutes * 60 + rest)
