"""Peaks of the devices that foreign tables name: a positive list onto results/catalogue.

A name that several devices share (`h100_80gb` is an SXM or a PCIe card) has the interval of their peaks.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import cast, get_args

from reports.audit.intervals import Interval
from results.catalogue.gpus import peak_flops_per_s
from results.cell import Precision

_H100_SXM, _H100_PCIE = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
_A100_40, _A100_80 = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"
_NAMES = (
    (r"h100_80gb", (_H100_SXM, _H100_PCIE)),
    (r"(?:\d+x ?)?H100[ -]SXM5?(?:[ -]80GB)?", (_H100_SXM,)),
    (r"(?:\d+x ?)?H100 80GB HBM3(?: \(one node\))?", (_H100_SXM,)),
    (r"a100_80gb|(?:DGX )?A100 80GB", (_A100_80,)),
    (r"a100_40gb|(?:DGX )?A100 40GB", (_A100_40,)),
    (r"A100(?: \(one node\)| node)?", (_A100_40, _A100_80)),
    (r"DGX-1 V100 (?:16|32)GB", ("Tesla V100-SXM2-16GB",)),
)
"""Dense peaks do not depend on an A100's memory or form factor; those of an H100 do on the latter."""


@lru_cache(maxsize=1024)
def peaks(hardware: str, precision: str) -> Interval | None:
    """Dense peak FLOP/s of one device, as an interval; None where it is not known."""
    if precision not in get_args(Precision):
        return None
    names = next((names for pattern, names in _NAMES if re.fullmatch(pattern, hardware)), (hardware,))
    known = [peak_flops_per_s(name, cast(Precision, precision)) for name in names]
    found = [peak for peak in known if peak is not None]
    return Interval(min(found), max(found)) if len(found) == len(names) else None
