"""Numbers in words: `GBS 4096`, `TP8 x PP8`, `TP=4`, `2115 tok/s/GPU`. A positive list, as that of the
columns.

A phrase that is twice in one cell with different numbers is not read. A number inside a range
(`MFU 33-39%`) is no phrase, and a year (`TP 2025`) is no size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from reports.audit.columns import Meaning

_WHOLE = r"[ =:]{1,2}(\d+)(?![\d.,-]*\d)"
_DECIMAL = r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
_SIZE = r"[ =:]?(\d{1,3})(?![\w.])"
_COUNTS = {
    "global_batch": rf"(?i)\b(?:GBS|global[ _-]batch(?:[ _-]size)?){_WHOLE}",
    "micro_batch": rf"(?i)\b(?:MBS|micro[ _-]?batch(?:[ _-]size)?){_WHOLE}",
    "accumulation": rf"(?i)\b(?:GA|grad_accum|gradient accumulation){_WHOLE}",
    "batch_per_replica": rf"(?i)\blocal batch{_WHOLE}",
    "tensor": rf"(?i)\bTP{_SIZE}",
    "pipeline": rf"(?i)\bPP{_SIZE}",
    "context": rf"(?i)\bCP{_SIZE}",
    "data_parallel": r"(?i)\bDP[ =:]?(\d{1,5})(?![\w.])",
}
_MEASURED = {
    ("tokens_per_s_device", 1.0): rf"(?<![\d.,-]){_DECIMAL} tok(?:ens)?/s(?:ec)?/GPU\b",
    ("mfu", 0.01): rf"\bMFU[ =:]{{1,2}}{_DECIMAL} ?%",
    ("hfu", 0.01): rf"\bHFU[ =:]{{1,2}}{_DECIMAL} ?%",
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
_SHARDS = re.compile(
    r"(?i)(?<=\d x )FSDP ?(\d{1,5})(?![\w.])|"
    r"\bFSDP ?(\d{1,5})(?= ?[x*] ?[TPCD]P)|\bFSDP([3-9]|\d{2,5})(?![\w.])",
    re.ASCII,
)
"""FSDP1 and FSDP2 are versions, unless they are a factor of a product (`FSDP2 x TP8`)."""
_DATA_PARALLEL = Meaning(name="data_parallel", kind="count")
_PLACE = re.compile(r"\bline \d+\b")
_DIGIT = re.compile(r"\d")
_PRECISIONS: Mapping[str, re.Pattern[str]] = {
    "fp8": re.compile(r"(?i)\b(?:amp_)?(?:fp8|float8)\b"),
    "bf16": re.compile(r"(?i)\b(?:amp_)?(?:bf16|bfloat16)\b"),
    "fp16": re.compile(r"(?i)\b(?:amp_)?(?:fp16|float16)\b"),
    "tf32": re.compile(r"(?i)\btf32\b"),
    "fp32": re.compile(r"(?i)\b(?:fp32|float32)\b"),
}
_SPARSE = re.compile(
    r"(?i)\b(?:moe|mixture[ -]of[ -]experts|mixtral|dbrx|switch[ -]transformer|"
    r"deepseek[ -]?v[23]|\d+x\d+b|a\d+(?:\.\d+)?b|"
    r"\d+ experts|ep[ =]?\d+|q?lora|peft|adapters?)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrases:
    """What a cell of words says."""

    numbers: tuple[tuple[Meaning, str], ...]
    """Each quantity and its digits."""
    rest: str
    """The words without the phrases and without places in the source (`line 12`)."""
    unclear: tuple[str, ...] = ()
    """Quantities that stand twice in the cell with different numbers."""


@lru_cache(maxsize=65536)
def phrases(text: str) -> Phrases:
    """The phrases of a cell."""
    if not _DIGIT.search(text):
        return Phrases(numbers=(), rest=text)
    numbers, unclear, rest = [], [], _PLACE.sub("", text)
    for meaning, pattern in _PHRASES:
        digits = set(pattern.findall(text))
        if digits:
            rest = pattern.sub("", rest)
        if len(digits) == 1:
            numbers.append((meaning, digits.pop()))
        elif digits:
            unclear.append(meaning.name)
    shards = {next(filter(None, groups)) for groups in _SHARDS.findall(text)}
    if shards:
        rest = _SHARDS.sub("", rest)
    if len(shards) == 1 and all(meaning is not _DATA_PARALLEL for meaning, _ in numbers):
        numbers.append((_DATA_PARALLEL, shards.pop()))
    return Phrases(numbers=tuple(numbers), rest=rest, unclear=tuple(unclear))


@lru_cache(maxsize=65536)
def precision(text: str) -> str | None:
    """The one number format that a cell names; None for none or several."""
    named = [name for name, pattern in _PRECISIONS.items() if pattern.search(text)]
    return named[0] if len(named) == 1 else None


@lru_cache(maxsize=65536)
def trains_a_part(text: str) -> bool:
    """Whether words name a mixture of experts or adapters, which do not take 6 FLOPs a parameter."""
    return _SPARSE.search(text) is not None
