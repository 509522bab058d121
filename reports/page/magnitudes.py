"""A figure in words as a number, so that `1.23 s` sorts above `45 ms`: `reports.text` backwards.

As exact as what the reader sees, and in one unit for one kind of quantity; it is for order alone.
"""

from __future__ import annotations

import math
import re

_DURATIONS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9}
_SIZES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BASES = ("FLOP", "B", "b", "J", "W", "Hz")
"""Units that follow a prefix without a space; after a space a prefix stands alone (`1.2 M tokens/s`)."""
_FIGURE = re.compile(r"\$?(-?)\$?(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?([A-Za-z%]+))?")
_REST = re.compile(r" (\d+) (min|s)\b")


def magnitude(text: str) -> float | None:
    """The number that a text begins with, in its base unit; None where it begins with none.

    An interval without its unit (`12.1 to 12.6`) has none: its row says the unit elsewhere.
    """
    found = _FIGURE.match(text)
    if found is None or found[3] == "to":
        return None
    value = float(found[2].replace(",", "")) * _scale(found[3] or "")
    rest = _REST.match(text, found.end()) if found[3] in ("min", "h") else None
    if rest is not None:
        value += float(rest[1]) * _DURATIONS[rest[2]]
    if not math.isfinite(value):
        return None
    return -value if found[1] else value


def _scale(unit: str) -> float:
    if unit in _DURATIONS:
        return _DURATIONS[unit]
    if unit in _SIZES:
        return _SIZES[unit]
    if unit in _PREFIXES or unit[1:].startswith(_BASES):
        return _PREFIXES.get(unit[0], 1.0)
    return 1.0
