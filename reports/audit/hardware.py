"""Peaks of the devices that foreign tables name, from results/catalogue.

A name that several devices share (`H100` is an SXM, a PCIe or an NVL card) has the interval of their peaks.
A name with words that the list does not know (another memory, a MIG slice) has no peak, and the highest of
its family as a bound.
"""

from __future__ import annotations

import re
from functools import lru_cache

from reports.audit.intervals import Interval
from results.catalogue.gpus import catalogue_name, dense_peaks

_A100 = ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIe-40GB", "A100-PCIe-80GB")
_FAMILIES = {
    "V100": ("V100-SXM2-16GB", "V100-PCIe"),
    "A100": _A100,
    "H100": ("H100-SXM5-80GB", "H100-PCIe-80GB", "H100-NVL"),
    "H200": ("H200-SXM5-141GB",),
    "H20": ("H20-96GB",),
    "B200": ("B200-SXM",),
    "GB200": ("GB200 (per Blackwell GPU)",),
    "A10G": ("A10G-24GB",),
    "L40S": ("L40S-48GB",),
    "L4": ("L4-24GB",),
    "T4": ("T4-16GB",),
    "4090": ("RTX-4090-24GB",),
    "MI250X": ("MI250X-128GB",),
    "MI300X": ("MI300X-192GB",),
}
_FORMS = (
    (r"H100.*\bPCIE", ("H100-PCIe-80GB",)),
    (r"H100.*\bNVL\b", ("H100-NVL",)),
    (r"H100.*\b(?:SXM5?|HBM3)\b|\b[DH]GX H100", ("H100-SXM5-80GB",)),
    (r"H100.*\b80GB", ("H100-SXM5-80GB", "H100-PCIe-80GB")),
    (r"V100.*\bPCIE", ("V100-PCIe",)),
    (r"V100.*\bSXM2|\bDGX ?[12]? V100", ("V100-SXM2-16GB",)),
)
"""Cards of a family, told apart by a word; the first that fits."""
_KNOWN_WORDS = re.compile(
    r"\d+ ?X|\d+ NODES?|ONE NODE|NODES?|PER NODE|NVIDIA|AMD|TESLA|GEFORCE|RTX|"
    r"[DH]GX ?[12]?|SXM\d?|PCIE|NVL|HBM[23]E?|"
    r"(?:16|24|32|40|48|80|94|141|192|288)GB|GPUS?|[()+,;]|\d+"
)


@lru_cache(maxsize=4096)
def _cards(hardware: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The catalogue's rows that a name may mean, none if it has unknown words; and its whole family."""
    known = catalogue_name(hardware)
    if known is not None:
        return (known,), (known,)
    name = re.sub(r"[\s_/-]+", " ", hardware.upper()).strip()
    name = re.sub(r"(\d+) (GB\b)", r"\1\2", name)
    families = [family for family in _FAMILIES if re.search(rf"(?<![A-Z0-9]){family}(?![A-Z0-9])", name)]
    if len(families) != 1:
        return (), ()
    family = _FAMILIES[families[0]]
    rest = _KNOWN_WORDS.sub("", name.replace(families[0], "", 1)).strip()
    cards = next((rows for form, rows in _FORMS if re.search(form, name)), family)
    # An H100 of 96 GB is another card than those of the catalogue.
    return (() if rest else cards), family


@lru_cache(maxsize=4096)
def peaks(hardware: str, precision: str) -> Interval | None:
    """Dense peak FLOP/s of one device, as an interval; None where it is not known."""
    cards, _ = _cards(hardware)
    found = [dense_peaks(card).get(precision) for card in cards]
    known = [peak for peak in found if peak is not None]
    return Interval(min(known), max(known)) if known and len(known) == len(cards) else None


@lru_cache(maxsize=4096)
def highest_peak(hardware: str, precision: str) -> float | None:
    """What no device of the family exceeds, in FLOP/s; without a known format, in its fastest."""
    _, family = _cards(hardware)
    tables = [dense_peaks(card) for card in family]
    known = [peaks[precision] for peaks in tables if precision in peaks]
    known = known or [peak for peaks in tables for peak in peaks.values()]
    return max(known) if known else None
