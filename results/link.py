"""The network link of a virtual node, as a user writes it: `none`, `100mbit`, `2.5gbit`."""

from __future__ import annotations

import re
from functools import cache

from results.errors import UsageError

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
    # To the kbit/s: what two units write in two ways is one rate to the last bit.
    rate = round(float(match["number"]) * _MBIT[match["unit"]], 3)
    if not SLOWEST_MBIT_PER_S <= rate <= FASTEST_MBIT_PER_S:
        raise UsageError(
            f"--link is from {link_text(SLOWEST_MBIT_PER_S)} to {link_text(FASTEST_MBIT_PER_S)}, not {text!r}"
        )
    return rate


def link_text(mbit_per_s: float | None) -> str:
    """The canonical text of a rate: equal rates have equal texts, and `read_link` gives it back."""
    if mbit_per_s is None:
        return NO_LINK
    rate, unit = (mbit_per_s / 1000, "gbit") if mbit_per_s >= 1000 else (mbit_per_s, "mbit")
    return f"{rate:.6f}".rstrip("0").rstrip(".") + unit
