"""Numbers as text: durations, sizes, rates, shares, and figures with intervals.

They have three significant digits, or up to five if the ends of a narrow interval would look equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from results.cell import Cell, Device
from results.statistics import Metric

DIGITS = 3
MOST_DIGITS = 5
NOTHING = "-"
"""The mark for a missing value; the reason is given in another column or below the table."""

DURATIONS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_PLAIN_RATES_BELOW = 1e5
SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricText:
    """A figure in words: `12.3 ms`, `12.1 to 12.6`, `range of 3`."""

    value: str
    ends: str | None
    """The ends of the interval in the unit of the value; None without one."""
    label: str
    """The kind of interval, or the number of samples that was too small for one."""

    @property
    def note(self) -> str:
        """The interval and its kind, or the number of samples if it is missing."""
        return self.label if self.ends is None else f"{self.ends}, {self.label}"

    @property
    def with_ends(self) -> str:
        """The figure with the ends of its interval, if it has one: `12.3 ms (12.1 to 12.6)`."""
        return self.value if self.ends is None else f"{self.value} ({self.ends})"

    def __str__(self) -> str:
        return f"{self.value} ({self.note})"


def duration(ns: float) -> str:
    """A time given in nanoseconds: `812 us`, `12.3 ms`, `1.50 s`, `2 min 05 s`, `3 h 20 min`."""
    seconds = ns / 1e9
    if abs(seconds) < 100:
        return _scaled(ns, DURATIONS)
    minutes, rest = divmod(round(abs(seconds)), 60)
    sign = "-" if ns < 0 else ""
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02d} s"
    return f"{sign}{minutes // 60:,} h {minutes % 60:02d} min"


def size(size_bytes: float) -> str:
    """A size given in bytes, in units of 1024: `97.5 MiB`."""
    return _scaled(size_bytes, SIZES)


def rate(per_s: float, unit: str) -> str:
    """Work a second: `1,234 images/s`, `1.23 M tokens/s`."""
    scale, prefix = _rate_scale(per_s)
    return f"{number(per_s / scale)} {prefix}{unit}/s"


def si(value: float, unit: str) -> str:
    """A quantity with an SI prefix: `4.12 GFLOP`."""
    scale, prefix = _scale(value, SI)
    return f"{number(value / scale)} {prefix}{unit}"


def percent(share: float) -> str:
    """A share of one: `94.1 %`."""
    return f"{_clean(share * 100, 1)} %"


def whole_percent(share: float) -> str:
    """A share of one, for odds: `20 %`."""
    return f"{100 * share:.0f} %"


def count(items: int, noun: str) -> str:
    """`1 run`, `1,000 runs`."""
    return f"{items:,} {noun}{'' if items == 1 else 's'}"


def order(what: str, gpu_hours: float | None, usd: float | None) -> str:
    """Say what to run and what it takes: `6 runs of ddp on 16 (about 0.4 GPU-hours, 1.20 USD)`."""
    if gpu_hours is None:
        return what
    price = "" if usd is None else f", {usd:,.2f} USD"
    return f"{what} (about {number(gpu_hours)} GPU-hours{price})"


def moment(utc: str) -> str:
    """A time of day kept as ISO 8601 text in UTC, to the minute: `2026-01-02 03:04 UTC`."""
    return f"{utc[:10]} {utc[11:16]} UTC"


def capital(clause: str) -> str:
    """A clause as the beginning of a sentence."""
    return f"{clause[0].upper()}{clause[1:]}"


def number(value: float, *, digits: int = DIGITS) -> str:
    """A plain number with at least `digits` significant digits; whole digits are never rounded away."""
    return _clean(value, _decimals(value, digits))


def tick(value: float) -> str:
    """The value of a tick of an axis, which is already round."""
    return f"{value:,.6g}"


def metric(figure: Metric) -> MetricText:
    """A figure with its interval, in the form of its unit (`ns`, `bytes`, `ratio`, or as a rate)."""
    scale, unit = _form(figure)
    shown, ends = figure.mapped(lambda end: end / scale), None
    decimals = 1 if figure.unit == "ratio" else _decimals(shown.value, DIGITS)
    low, high = shown.low, shown.high
    if low is not None and high is not None:
        # Decimals at which the two ends differ, within reason.
        most = max(decimals, _decimals(shown.value, MOST_DIGITS))
        while decimals < most and _clean(low, decimals) == _clean(high, decimals) and low != high:
            decimals += 1
        ends = f"{_clean(low, decimals)} to {_clean(high, decimals)}"
    return MetricText(value=f"{_clean(shown.value, decimals)} {unit}", ends=ends, label=_label(figure))


def listed(items: Sequence[str], *, most: int = 4, last: str = " and ") -> str:
    """`a`, `a and b`, `a, b and c`; beyond `most`: `a, b, c and 3 more`. `last` joins the last two.

    Semicolons separate items that contain commas: `a, ring; b, tree and c`.
    """
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} more"]
    between = "; " if any(", " in item for item in items) else ", "
    last = between if last == ", " else last
    return last.join((between.join(items[:-1]), items[-1])) if len(items) > 1 else items[0]


def devices_word(devices: Collection[Device]) -> str:
    """The unit of a size as a table's heading; on a CPU it is ranks, and says so."""
    kinds = set(devices)
    if kinds == {"cpu"}:
        return "ranks (CPU)"
    return "GPUs" if kinds <= {"cuda"} else "GPUs or ranks (CPU)"


def devices(gpus: int, device: Device) -> str:
    """A size in a sentence: `8 GPUs`, `1 rank (CPU)`."""
    return count(gpus, "GPU") if device == "cuda" else f"{count(gpus, 'rank')} (CPU)"


def device_word(device: Device) -> str:
    """One device in words: `GPU`, `rank (CPU)`."""
    return "GPU" if device == "cuda" else "rank (CPU)"


def batch(cell: Cell) -> str:
    """Batch per replica / global batch: `8 / 32`."""
    return f"{cell.batch_per_replica:,} / {cell.global_batch:,}"


def _label(figure: Metric) -> str:
    labels = {
        "range": f"range of {figure.samples}",
        "t95-runs": f"95 % of {figure.samples} runs",
        "t95-batch-means": "95 % within the run",
        "t95-quads": f"95 % of {figure.samples} quads of the run",
    }
    return labels.get(figure.interval or "") or count(figure.samples, "run")


def _form(figure: Metric) -> tuple[float, str]:
    """The divisor of a figure and the name of its scaled unit."""
    if figure.unit == "ns":
        return _scale(figure.value, DURATIONS)
    if figure.unit == "bytes":
        return _scale(figure.value, SIZES)
    if figure.unit == "ratio":
        return 0.01, "%"
    scale, prefix = _rate_scale(figure.value)
    return scale, f"{prefix}{figure.unit}"


def _rate_scale(per_s: float) -> tuple[float, str]:
    """The scale of a rate: more than five digits get a prefix, with a space before the unit's word."""
    if abs(per_s) < _PLAIN_RATES_BELOW:
        return 1.0, ""
    scale, prefix = _scale(per_s, SI)
    return scale, f"{prefix} "


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    scale, unit = _scale(value, scales)
    return f"{number(value / scale)} {unit}"


def _scale(value: float, scales: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    # 999.7 us would be printed as 1,000 us: the unit is chosen by what is printed.
    return next((s for s in scales if round(abs(value) / s[0], 2) >= 1), scales[-1])


def _decimals(value: float, digits: int) -> int:
    if value == 0:
        return 0
    # Rounded first: 0.9997 is printed as 1.00.
    rounded = abs(float(f"{value:.{digits - 1}e}"))
    return min(9, max(0, digits - 1 - math.floor(math.log10(rounded))))


def _clean(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text
