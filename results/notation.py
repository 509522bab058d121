"""Notations of people and schedulers: the sizes of `--gpus`, durations, and rates of links.

A link is the network of a virtual node, written `none`, `100mbit` or `2.5gbit`."""

from __future__ import annotations

import re
from functools import cache

from results.errors import GpuCountsError, UsageError

NO_LINK = "none"
"""The network as it is."""
SLOWEST_MBIT_PER_S = 1.0
FASTEST_MBIT_PER_S = 1_000_000.0
_LINK = re.compile(r"(?P<number>\d{1,7}(?:\.\d{1,6})?)(?P<unit>mbit|gbit)", re.ASCII)
_MBIT = {"mbit": 1, "gbit": 1000}


@cache
def read_link(text: str) -> float | None:
    """Mbit/s of a text in any form; None for `none`. Raises UsageError naming `--link`."""
    plain = text.strip().lower()
    if plain == NO_LINK:
        return None
    match = _LINK.fullmatch(plain)
    if match is None:
        raise UsageError(
            f"--link takes {NO_LINK} or a rate like 100mbit, 1gbit, 2.5gbit (bits a second), not {text!r}"
        )
    # Rounded to kbit/s, so that the same rate in two units gives the same number.
    rate = round(float(match["number"]) * _MBIT[match["unit"]], 3)
    if not SLOWEST_MBIT_PER_S <= rate <= FASTEST_MBIT_PER_S:
        raise UsageError(
            f"--link is from {link_text(SLOWEST_MBIT_PER_S)} to {link_text(FASTEST_MBIT_PER_S)}, not {text!r}"
        )
    return rate


def link_text(mbit_per_s: float | None) -> str:
    """The canonical string of a rate: equal rates have equal strings, and `read_link` reads them."""
    if mbit_per_s is None:
        return NO_LINK
    rate, unit = (mbit_per_s / 1000, "gbit") if mbit_per_s >= 1000 else (mbit_per_s, "mbit")
    return f"{rate:.6f}".rstrip("0").rstrip(".") + unit


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


_ITEM = re.compile(r"(?P<first>\d{1,18})(?:\.\.(?P<last>\d{1,18})(?::(?P<step>\d{1,18}))?)?", re.ASCII)
_GRAMMAR = "write counts like 8, ranges like 1..256 (doubling) or 8..64:8 (steps), joined by commas"
LARGEST = 1_000_000


def gpu_counts(text: str) -> tuple[int, ...]:
    """Read `"1..256"` (doubling, both ends included), `"8..64:8"` (steps) and `"1,2,96"`.

    Returns the numbers of workers of a study, ascending and distinct. Raises GpuCountsError, quoting the text
    and the rule it breaks.
    """
    return tuple(sorted({count for item in text.split(",") for count in _expand(item.strip(), text)}))


def _expand(item: str, text: str) -> list[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise GpuCountsError(f"--gpus {text!r}: {item!r} is not a count or a range; {_GRAMMAR}")
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else first
    if first < 1:
        raise GpuCountsError(f"--gpus {text!r}: counts start at 1, not {first}")
    if last < first:
        raise GpuCountsError(
            f"--gpus {text!r}: a range goes up, and {last} is less than {first}; write {last}..{first}"
        )
    if last > LARGEST:
        raise GpuCountsError(f"--gpus {text!r}: {last} is more than {LARGEST}, the most that is planned")
    if match["step"] is None:
        doublings = (first << power for power in range(last.bit_length()))
        return [*(count for count in doublings if count < last), last]
    step = int(match["step"])
    if step < 1:
        raise GpuCountsError(f"--gpus {text!r}: a step is at least 1, not {step}")
    reached = last - (last - first) % step
    if reached != last:
        raise GpuCountsError(
            f"--gpus {text!r}: steps of {step} from {first} do not meet {last}; "
            f"write {first}..{reached}:{step} or {first}..{reached + step}:{step}"
        )
    return list(range(first, last + 1, step))
