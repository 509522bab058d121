"""Dense peaks of GPUs from `gpus.csv`; a device that is not in it has no peak, and so no MFU."""

from __future__ import annotations

import csv
import re
from functools import cache
from io import StringIO
from pathlib import Path

from results import files
from results.cell import Precision

# The names that drivers give, most specific first: a pattern that could swallow a sibling of another
# peak (H800 PCIe, RTX 4090 D, a MIG slice) ends where the name ends, so that the sibling stays unknown.
_NAMES = (
    (r"V100-SXM2-\d+GB$", "V100-SXM2-16GB"),
    (r"V100-PCIE-\d+GB$", "V100-PCIe"),
    (r"\bT4$", "T4-16GB"),
    (r"A100-PCIE-40GB$", "A100-PCIe-40GB"),
    (r"A100 80GB PCIe$", "A100-PCIe-80GB"),
    (r"A100-SXM4-40GB$", "A100-SXM4-40GB"),
    (r"A100-SXM4?-80GB$", "A100-SXM4-80GB"),
    (r"A100-SXM-64GB$", "A100-SXM-64GB"),
    (r"A800-SXM4-80GB$", "A800-SXM4-80GB"),
    (r"RTX 4090$", "RTX-4090-24GB"),
    (r"\bL40S$", "L40S-48GB"),
    (r"\bL4$", "L4-24GB"),
    (r"H100 PCIe$", "H100-PCIe-80GB"),
    (r"H100 NVL$", "H100-NVL"),
    (r"H100 80GB HBM3$", "H100-SXM5-80GB"),
    (r"H100 64GB HBM2e?$", "H100-SXM5-64GB"),
    (r"\bH20$", "H20-96GB"),
    (r"\bH800$", "H800-SXM5-80GB"),
    (r"H200 NVL$", "H200-NVL"),
    # The size is that of the CPU's memory.
    (r"\bGH200 (120|480)GB$", "GH200-96GB"),
    (r"\bGH200 144GB? HBM3e$", "GH200-144GB"),
    (r"\bH200$", "H200-SXM5-141GB"),
    (r"\bGB200$", "GB200 (per Blackwell GPU)"),
    (r"\bB200$", "B200-SXM"),
    (r"\bGB300$", "GB300 (per Blackwell GPU)"),
    (r"\bB300( SXM6( AC)?)?$", "B300-SXM"),
    (r"MI300X", "MI300X-192GB"),
)
_COLUMNS: dict[Precision, str] = {
    "fp32": "fp32_tflops",
    "tf32": "tf32_dense_tflops",
    "bf16": "bf16_dense_tflops",
    "fp16": "fp16_dense_tflops",
    "float8": "fp8_dense_tflops",
}
_WITHOUT_FLOAT8 = re.compile(r"(V100|T4|A10G|A100|A800|MI250X|MI300X)-")
"""Rows without products of e4m3 as torch has them: compute capabilities below 8.9 (torch's `_scaled_mm`), and
CDNA 2 and 3, of which the latter has the types without negative zero (torch.float8_e4m3fnuz)."""


@cache
def _rows() -> dict[str, dict[str, str]]:
    path = Path(__file__).with_name("gpus.csv")
    return {row["gpu"]: row for row in csv.DictReader(StringIO(files.read(path).text, newline=""))}


def require_known(name: str) -> None:
    """Raises ValueError, with all names, for one that no row of the catalogue has."""
    if name not in _rows():
        raise ValueError(f"{name!r} is not in the catalogue of GPUs, which has {', '.join(_rows())}")


@cache
def catalogue_name(device_name: str) -> str | None:
    """The catalogue's row of a device, by the row's name or the driver's; None for an unknown device."""
    if device_name in _rows():
        return device_name
    return next((row for pattern, row in _NAMES if re.search(pattern, device_name)), None)


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """Dense peak of one device in FLOP/s (no sparsity); None if the catalogue lacks it."""
    name = catalogue_name(device_name)
    if name is None:
        return None
    text = _rows()[name][_COLUMNS[precision]]
    return float(text) * 1e12 if text else None


def lacks_float8(device_name: str) -> bool:
    """Return whether the catalogue knows that a device has no products in float8."""
    return bool(_WITHOUT_FLOAT8.match(catalogue_name(device_name) or ""))


def memory_bytes(device_name: str) -> int | None:
    """Memory of one device; None if the catalogue lacks it."""
    return _figure(device_name, "mem_gb", 1e9)


def memory_bytes_per_s(device_name: str) -> int | None:
    """Peak rate of one device's memory; None if the catalogue lacks it."""
    return _figure(device_name, "mem_bw_gb_s", 1e9)


def link_bytes_per_s(device_name: str) -> int | None:
    """Peak rate of one device's links to the others of its node, in one direction; None if the catalogue
    lacks it."""
    return _figure(device_name, "gpu_link_bidir_gb_s", 1e9 / 2)


def _figure(device_name: str, column: str, unit: float) -> int | None:
    name = catalogue_name(device_name)
    text = "" if name is None else _rows()[name][column]
    return int(float(text) * unit) if text else None
