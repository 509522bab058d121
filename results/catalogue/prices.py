"""Prices of devices an hour: `prices.csv`, list prices of clouds, and files of the same columns.

A price is for one GPU with its share of the instance (CPU, memory, network). It is the on-demand price unless
its note says otherwise, and never a quotation for the reader.
"""

from __future__ import annotations

import csv
import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

from results import files
from results.catalogue.gpus import catalogue_name
from results.errors import UsageError

REQUIRED = ("gpu", "usd_per_gpu_hour", "price_date", "price_source")
"""Columns that a price file has; `provider`, `instance`, `region`, `gpu_count` and `note` may be there."""

# Devices that have a price of their own although `gpus.csv` gives their peaks in another row, or in none.
_PRICED_AS = (
    (r"V100-SXM2-32GB$", "V100-SXM2-32GB"),
    (r"\bA10G$", "A10G-24GB"),
    (r"A100 80GB PCIe$", "A100-PCIe-80GB"),
    (r"GH200 480GB$", "GH200-96GB"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of one device an hour, and its source."""

    usd_per_gpu_hour: float
    source: str
    date: datetime.date | None = None
    """The date of the price; None: not known."""
    provider: str | None = None
    instance: str | None = None
    region: str | None = None
    gpu_count: int | None = None
    """GPUs of the instance; None: not known."""
    note: str | None = None

    @property
    def place(self) -> str:
        """The provider, instance and region: `aws p5.48xlarge, us-east-1`; empty if they are unknown."""
        machine = " ".join(part for part in (self.provider, self.instance) if part)
        return ", ".join(part for part in (machine, self.region) if part)


Prices = Mapping[str, Sequence[Price]]
"""Prices by the name of a device, in the order of their file."""


@cache
def catalogue_prices() -> Prices:
    """The prices that come with this program."""
    return read_prices(Path(__file__).with_name("prices.csv"))


def read_prices(path: Path) -> Prices:
    """The prices in a CSV file; rows without a price are left out.

    Raises UsageError: one line with the path, the line, the value and the rule.
    """
    prices: dict[str, list[Price]] = {}
    for line, row in _rows(path):
        if row["usd_per_gpu_hour"]:
            name = _given(row, "gpu", f"{path}, line {line}", "name the device")
            prices.setdefault(name, []).append(_price(row, f"{path}, line {line}"))
    if not prices:
        raise UsageError(f"{path} has no price: give rows with {', '.join(REQUIRED)}")
    return prices


def device_prices(prices: Prices, device_name: str) -> Sequence[Price]:
    """The prices of a device by the name that its driver gives, or by the catalogue's name of it."""
    named = next((name for pattern, name in _PRICED_AS if re.search(pattern, device_name)), None)
    return prices.get(device_name) or prices.get(named or catalogue_name(device_name) or device_name) or ()


def chosen(prices: Sequence[Price], *, gpus_per_node: int) -> Price | None:
    """The price to count with: the lowest of the newest date; None without prices.

    Instances with at least `gpus_per_node` GPUs are preferred: GPUs of smaller ones can cost less, but do not
    share a node. Prices without a date come last.
    """
    fitting = [price for price in prices if price.gpu_count is None or price.gpu_count >= gpus_per_node]
    return min(
        fitting or prices,
        key=lambda price: (-(price.date.toordinal() if price.date else 0), price.usd_per_gpu_hour),
        default=None,
    )


def checked_usd(value: float, where: str) -> float:
    """A price in USD per device and hour. Raises UsageError that names `where`."""
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{where} must be > 0, in USD per device and hour, not {value:g}")
    return value


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row with the number of its (last) line, values without spaces around them."""
    try:
        # A byte order mark is what spreadsheets put first.
        lines = StringIO(files.read(path).data.decode("utf-8-sig"), newline="")
        reader = csv.DictReader(lines, restval="")
        missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(
                f"{path} has no column {', '.join(missing)}; a price file is a CSV whose first line "
                f"names at least {', '.join(REQUIRED)}"
            )
        for row in reader:
            # Values beyond the last column have no name.
            yield reader.line_num, {name: text.strip() for name, text in row.items() if name is not None}
    except FileNotFoundError as error:
        raise UsageError(f"there is no price file {path}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not readable as CSV in UTF-8: {error}") from error


def _price(row: Mapping[str, str], where: str) -> Price:
    return Price(
        usd_per_gpu_hour=checked_usd(
            _number(row["usd_per_gpu_hour"], f"{where}: usd_per_gpu_hour"), f"{where}: usd_per_gpu_hour"
        ),
        source=_given(row, "price_source", where, "say where the price is from"),
        date=_date(row["price_date"], where),
        provider=row.get("provider") or None,
        instance=row.get("instance") or None,
        region=row.get("region") or None,
        gpu_count=_count(row.get("gpu_count", ""), where),
        note=row.get("note") or None,
    )


def _given(row: Mapping[str, str], name: str, where: str, advice: str) -> str:
    if not row[name]:
        raise UsageError(f"{where}: {name} is empty; {advice}")
    return row[name]


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{where} is a number such as 2.50, not {text!r}") from error


def _date(text: str, where: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text) if text else None
    except ValueError as error:
        raise UsageError(
            f"{where}: price_date is a day such as 2026-07-20, or empty if it is not known, not {text!r}"
        ) from error


def _count(text: str, where: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{where}: gpu_count is a whole number from 1, or empty, not {text!r}")
    return int(text)
