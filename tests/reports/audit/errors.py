"""Kinds of errors that tables of results have, to be planted one at a time into rows of published tables.

A kind names the rows that it may be planted in by the row's own columns: those where a second number of the
table ties the one that is changed. An error in a number that stands alone nobody can find.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Row = dict[str, str]
CURVE = (
    "source",
    "model",
    "params",
    "hardware",
    "interconnect",
    "strategy",
    "batch_per_gpu",
    "seq_len",
    "unit",
)
LEAST_CURVE = 3


@dataclass(frozen=True, kw_only=True)
class Around:
    """A row, and the rows of its source."""

    row: Row
    siblings: Sequence[Row]

    @property
    def curve(self) -> list[Row]:
        """The sizes of the row's configuration."""
        key = [self.row.get(name) for name in CURVE]
        return [
            row for row in self.siblings if [row.get(name) for name in CURVE] == key and row.get("throughput")
        ]

    @property
    def is_collective(self) -> bool:
        """A collective whose bandwidths have three digits at least."""
        return number(self.row.get("algbw_GBps")) >= 1

    @property
    def is_on_a_curve(self) -> bool:
        return bool(self.row.get("throughput")) and len({row["gpus"] for row in self.curve}) >= LEAST_CURVE

    @property
    def is_tied(self) -> bool:
        """Whether the throughput stands beside a number that it follows from."""
        notes = self.row.get("notes", "")
        beside = "tok/s/GPU" in notes or ("p50" in notes and bool(self.row.get("batch_per_gpu")))
        return bool(self.row.get("throughput")) and (beside or self.is_on_a_curve)


def number(text: str | None) -> float:
    """The number of a cell; 0 for none."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return 0.0


def like(value: float, text: str) -> str:
    """A value with as many decimals as a printed number."""
    return f"{value:.{len(text.partition('.')[2])}f}"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of error."""

    name: str
    fits: Callable[[Around], bool]
    plant: Callable[[Around, random.Random], Mapping[str, str]]
    """The cells that change, by column."""
    is_a_second_row: bool = False
    """Whether the changed row is added, and the first stays."""


def _scaled(column: str, factor: float) -> Callable[[Around, random.Random], Mapping[str, str]]:
    return lambda at, _: {column: like(number(at.row[column]) * factor, at.row[column])}


def _swapped(column: str) -> Callable[[Around, random.Random], Mapping[str, str]]:
    return lambda at, rng: {column: swapped(at.row[column], rng)}


def swapped(text: str, rng: random.Random) -> str:
    """The text with two neighbouring digits of the first three exchanged, which differ by two or more."""
    places = [place for place, letter in enumerate(text) if letter.isdigit()][:3]
    pairs = [(one, other) for one, other in pairwise(places) if abs(int(text[one]) - int(text[other])) >= 2]
    if not pairs:
        return ""
    one, other = rng.choice(pairs)
    letters = list(text)
    letters[one], letters[other] = letters[other], letters[one]
    return "".join(letters)


def _phrase(
    column: str, pattern: str, change: Callable[[float, random.Random], float]
) -> Callable[[Around, random.Random], Mapping[str, str]]:
    """Change the number of a phrase of a cell."""

    def plant(at: Around, rng: random.Random) -> Mapping[str, str]:
        match = re.search(pattern, at.row[column])
        assert match is not None
        start, end = match.span(1)
        text = at.row[column]
        return {column: text[:start] + like(change(number(match[1]), rng), match[1]) + text[end:]}

    return plant


def _has(column: str, pattern: str) -> Callable[[Around], bool]:
    return lambda at: re.search(pattern, at.row.get(column, "")) is not None


def _with_efficiencies(at: Around, rng: random.Random) -> Mapping[str, str]:
    """A printed efficiency that is 6 to 20 points off, where `measure.py` has printed those of the others."""
    right = float(at.row["scaling_efficiency"])
    return {"scaling_efficiency": f"{right + rng.choice((-1, 1)) * rng.uniform(0.06, 0.2):.3f}"}


def _of_another_size(at: Around, rng: random.Random) -> Mapping[str, str]:
    others = [row for row in at.curve if row["gpus"] != at.row["gpus"]]
    return {"throughput": rng.choice(others)["throughput"]}


def _half_size(at: Around) -> Row | None:
    half = [row for row in at.curve if float(row["gpus"]) * 2 == float(at.row["gpus"])]
    is_total = "GPU" not in at.row["unit"] and "/s" in at.row["unit"]
    digits = len(re.sub(r"[^0-9]", "", half[0]["throughput"]).strip("0")) if half else 0
    return half[0] if is_total and digits >= 5 else None


def _doubled(at: Around, _: random.Random) -> Mapping[str, str]:
    half = _half_size(at)
    assert half is not None
    return {"throughput": like(2 * number(half["throughput"]), half["throughput"])}


def _other(column: str) -> Callable[[Around, random.Random], Mapping[str, str]]:
    """The cell of another row of the source."""

    def plant(at: Around, rng: random.Random) -> Mapping[str, str]:
        others = sorted({row[column] for row in at.siblings} - {at.row[column], ""})
        return {column: rng.choice(others) if others else ""}

    return plant


GBS, MICRO, TP = r"GBS (\d+)", r"(?:microbatch|micro batch) (\d+)", r"TP(\d+)"
RATE, MFU = r"([\d.]+) tok/s/GPU", r"MFU ([\d.]+)%"


def _is_per_gpu(at: Around) -> bool:
    return "GPU" in at.row["unit"]


KINDS: tuple[Kind, ...] = (
    Kind(name="time twice as long", fits=lambda at: at.is_collective, plant=_scaled("time_us", 2)),
    Kind(name="swapped digits of a time", fits=lambda at: at.is_collective, plant=_swapped("time_us")),
    Kind(name="algorithm bandwidth twice", fits=lambda at: at.is_collective, plant=_scaled("algbw_GBps", 2)),
    Kind(name="GiB for GB", fits=lambda at: at.is_collective, plant=_scaled("algbw_GBps", 1e9 / 2**30)),
    Kind(name="bits for bytes", fits=lambda at: at.is_collective, plant=_scaled("busbw_GBps", 8)),
    Kind(
        name="bandwidths exchanged",
        fits=lambda at: at.is_collective and int(at.row["gpus"]) > 2,
        plant=lambda at, _: {"algbw_GBps": at.row["busbw_GBps"], "busbw_GBps": at.row["algbw_GBps"]},
    ),
    Kind(
        name="another collective's factor",
        fits=lambda at: at.is_collective and "all_reduce" in at.row["collective"],
        plant=_scaled("busbw_GBps", 0.5),
    ),
    Kind(
        name="bytes of another row",
        fits=lambda at: at.is_collective and at.row["collective"].startswith("all_reduce"),
        plant=_other("bytes"),
    ),
    Kind(
        name="decimal point of a bandwidth", fits=lambda at: at.is_collective, plant=_scaled("algbw_GBps", 10)
    ),
    Kind(
        name="swapped digits of a bandwidth", fits=lambda at: at.is_collective, plant=_swapped("busbw_GBps")
    ),
    Kind(name="throughput twice", fits=lambda at: at.is_tied, plant=_scaled("throughput", 2)),
    Kind(name="throughput half", fits=lambda at: at.is_tied, plant=_scaled("throughput", 0.5)),
    Kind(name="thousands", fits=lambda at: at.is_tied, plant=_scaled("throughput", 1000)),
    Kind(
        name="all devices for one",
        fits=lambda at: at.is_tied and int(at.row["gpus"]) >= 4 and "/s" in at.row["unit"],
        plant=lambda at, rng: _scaled(
            "throughput", float(at.row["gpus"]) if _is_per_gpu(at) else 1 / float(at.row["gpus"])
        )(at, rng),
    ),
    Kind(name="swapped digits of a throughput", fits=lambda at: at.is_tied, plant=_swapped("throughput")),
    Kind(
        name="first digit lost",
        fits=lambda at: at.is_tied and number(at.row["throughput"]) >= 1000,
        plant=lambda at, _: {"throughput": at.row["throughput"][1:]},
    ),
    Kind(name="throughput of another size", fits=lambda at: at.is_on_a_curve, plant=_of_another_size),
    Kind(
        name="exactly doubled",
        fits=lambda at: at.is_on_a_curve and _half_size(at) is not None,
        plant=_doubled,
    ),
    Kind(
        name="efficiency that does not follow",
        fits=lambda at: at.is_on_a_curve and bool(at.row.get("scaling_efficiency")),
        plant=_with_efficiencies,
    ),
    Kind(
        name="another number of devices",
        fits=lambda at: at.is_tied or _has("notes", GBS)(at),
        plant=lambda at, _: {"gpus": str(2 * int(at.row["gpus"]))},
    ),
    Kind(
        name="another batch",
        fits=_has("notes", GBS),
        plant=_phrase("notes", GBS, lambda value, rng: value * rng.choice((2, 3, 0.5)) + 1),
    ),
    Kind(
        name="another batch a GPU",
        fits=lambda at: number(at.row.get("batch_per_gpu")) > 0 and _has("notes", GBS + "|p50")(at),
        plant=_scaled("batch_per_gpu", 2),
    ),
    Kind(
        name="another micro-batch",
        fits=_has("notes", MICRO),
        plant=_phrase("notes", MICRO, lambda value, rng: value * 3),
    ),
    Kind(
        name="another parallel size",
        fits=lambda at: _has("strategy", TP)(at) and _has("strategy", r"DP\d")(at),
        plant=_phrase("strategy", TP, lambda value, rng: value * 2),
    ),
    Kind(
        name="sparse peak",
        fits=_has("mfu_or_tflops", MFU),
        plant=_phrase("mfu_or_tflops", MFU, lambda value, rng: value / 2),
    ),
    Kind(
        name="HFU for MFU",
        fits=_has("mfu_or_tflops", MFU),
        plant=_phrase("mfu_or_tflops", MFU, lambda value, rng: value * 4 / 3),
    ),
    Kind(
        name="swapped digits of a rate in the notes",
        fits=_has("notes", RATE),
        plant=lambda at, rng: {
            "notes": re.sub(
                RATE, lambda match: f"{swapped(match[1], rng) or match[1]} tok/s/GPU", at.row["notes"]
            )
        },
    ),
    Kind(
        name="another length",
        fits=lambda at: (
            number(at.row.get("seq_len")) > 0 and "TFLOP/s per GPU" in at.row.get("mfu_or_tflops", "")
        ),
        plant=_scaled("seq_len", 4),
    ),
    Kind(
        name="another model",
        fits=lambda at: (
            number(at.row.get("params")) > 0 and "TFLOP/s per GPU" in at.row.get("mfu_or_tflops", "")
        ),
        plant=_scaled("params", 2),
    ),
    Kind(
        name="negative",
        fits=lambda at: bool(at.row.get("throughput") or at.row.get("time_us")),
        plant=lambda at, _: (
            {"throughput": f"-{at.row['throughput']}"}
            if at.row.get("throughput")
            else {"time_us": f"-{at.row['time_us']}"}
        ),
    ),
    Kind(
        name="a row twice, with other numbers",
        fits=lambda at: bool(at.row.get("throughput")),
        plant=_scaled("throughput", 1.2),
        is_a_second_row=True,
    ),
)
