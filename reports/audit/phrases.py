"""Numbers in words: `GBS 4096`, `TP8 x PP8`, `2115 tok/s/GPU`. A positive list, as that of the columns.

A phrase that is twice in one cell with different numbers is not read. A number inside a range
(`MFU 33-39%`) is no phrase.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from reports.audit.columns import Meaning

_WHOLE = r"(\d+)(?![\d.,-]*\d)"
_DECIMAL = r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
_COUNTS = {
    "global_batch": rf"\b(?:GBS|global batch(?: size)?) {_WHOLE}",
    "micro_batch": rf"\bmicro[- ]?batch {_WHOLE}",
    "accumulation": rf"\bgrad_accum {_WHOLE}",
    "batch_per_replica": rf"\blocal batch {_WHOLE}",
    "tensor": r"\bTP ?(\d+)\b",
    "pipeline": r"\bPP ?(\d+)\b",
    "context": r"\bCP ?(\d+)\b",
    "data_parallel": r"\b(?:FS)?DP ?(\d+)\b",
}
_MEASURED = {
    ("tokens_per_s_device", 1.0): rf"(?<![\d.,-]){_DECIMAL} tok(?:ens)?/s/GPU\b",
    ("mfu", 0.01): rf"\bMFU {_DECIMAL} ?%",
    ("flops_per_s_device", 1e12): rf"(?<![\d.,-]){_DECIMAL} (?:model )?TFLOPS?(?:/s)?(?: per |/)GPU\b",
    ("step_s", 1.0): rf"\bp50 {_DECIMAL} s/iteration\b",
    ("step_s", 1e-3): rf"\bp50 {_DECIMAL} ms/iteration\b",
}
_PHRASES = (
    *((Meaning(name=name, kind="count"), re.compile(text, re.ASCII)) for name, text in _COUNTS.items()),
    *(
        (Meaning(name=name, kind="measured", scale=scale), re.compile(text, re.ASCII))
        for (name, scale), text in _MEASURED.items()
    ),
)
_PLACE = re.compile(r"\bline \d+\b")
_PRECISIONS: Mapping[str, re.Pattern[str]] = {
    "fp8": re.compile(r"(?i)\b(?:amp_)?(?:fp8|float8)\b"),
    "bf16": re.compile(r"(?i)\b(?:amp_)?bf16\b"),
    "fp16": re.compile(r"(?i)\b(?:amp_)?fp16\b"),
    "tf32": re.compile(r"(?i)\btf32\b"),
    "fp32": re.compile(r"(?i)\bfp32\b"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrases:
    """What a cell of words says."""

    numbers: tuple[tuple[Meaning, str], ...]
    """Each quantity and its digits."""
    rest: str
    """The words without the phrases and without places in the source (`line 12`)."""


@lru_cache(maxsize=65536)
def phrases(text: str) -> Phrases:
    """The phrases of a cell."""
    numbers, rest = [], _PLACE.sub("", text)
    for meaning, pattern in _PHRASES:
        digits = set(pattern.findall(text))
        if digits:
            rest = pattern.sub("", rest)
        if len(digits) == 1:
            numbers.append((meaning, digits.pop()))
    return Phrases(numbers=tuple(numbers), rest=rest)


@lru_cache(maxsize=65536)
def precision(text: str) -> str | None:
    """The one number format that a cell names; None for none or several."""
    named = [name for name, pattern in _PRECISIONS.items() if pattern.search(text)]
    return named[0] if len(named) == 1 else None
