"""Rows against each other: proportion, scaling, neighbours, repeats, units.

- utilisation: MFU (or FLOP/s a GPU) over tokens/s a GPU is one number for a model, a sequence
  length, a precision and a device.
- scaling: X(n) n0 / (X(n0) n) <= 1 plus noise, X the throughput, n0 the smallest size of a configuration.
- neighbours: throughput a GPU against the median of itself and the sizes before and after it (a running
  median of three: Tukey, Exploratory Data Analysis, 1977, ch. 7).
- repeats: two rows that say the same but for what was measured measured the same.
- units: throughput a GPU within a factor of 500 of its peers' median.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from reports.analysis.scaling import SINGLE_RUN_NOISE
from reports.audit.columns import HEADERS, UNITS
from reports.audit.findings import CUT, Disagreement, Quantity, difference, ends, reading
from reports.audit.intervals import Interval, hull
from reports.audit.rows import AuditedRow

PROPORTION = 0.005
PROPORTION_WHY = "both come from one step time: 0.5 % allows that one was averaged over other steps"
NOISE_WHY = "a size measured once may be 5 % off, as in this program's own reports"
FAR = 500.0
FAR_WHY = "sizes and batches make factors of tens; 500 to 2048 is 1000 or 1024 within a factor of 2"
_MEASURED = frozenset(
    meant.name for meant in (*HEADERS.values(), *UNITS.values()) if meant.kind == "measured"
)
_SHAPE = ("parameters", "seq_len")
_SPLIT = ("tensor", "pipeline", "context", "micro_batch")
Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class DerivedRow:
    """A row with everything that follows from it."""

    row: AuditedRow
    values: Mapping[str, Quantity]

    @property
    def line(self) -> int:
        return self.row.line

    def count(self, name: str) -> float | None:
        return self.values[name].rounded.middle if name in self.values else None

    @cached_property
    def rate(self) -> Quantity | None:
        """Throughput of all devices: printed, or the batch over the step time."""
        for name in ("samples_per_s", "tokens_per_s"):
            if name in self.values:
                return self.values[name]
        if "global_batch" not in self.values or "step_s" not in self.values:
            return None
        batch, step = self.values["global_batch"], self.values["step_s"]
        return Quantity(
            shown=f"{batch.shown} / {step.shown}",
            rounded=batch.rounded / step.rounded,
            loose=batch.loose / step.loose,
        )

    @cached_property
    def per_device(self) -> Interval | None:
        """Throughput of one device; None where it is not known, or printed as 0."""
        rate = self.rate
        if rate is None or "gpus" not in self.values or rate.rounded.low == 0:
            return None
        return rate.rounded / self.values["gpus"].rounded

    def counts(self, names: Iterable[str]) -> Key:
        return tuple(self.count(name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """All rows of a configuration at one number of devices."""

    gpus: float
    per_device: Interval
    entry: DerivedRow


def repeats(entries: Sequence[DerivedRow]) -> Iterator[Disagreement]:
    """Rows of one identity with other measured numbers; as a note, rows that stand twice."""
    for same in _groups(entries, lambda entry: entry.row.identity).values():
        for first, second in pairwise(same):
            yield _repeat(first, second)


def _repeat(first: DerivedRow, second: DerivedRow) -> Disagreement:
    both = [name for name in first.row.values if name in second.row.values and name in _MEASURED]
    apart = [name for name in both if not first.values[name].rounded.meets(second.values[name].rounded)]
    name = apart[0] if apart else (both[0] if both else None)
    one, other = (first.values[name], second.values[name]) if name else (None, None)
    return Disagreement(
        check="repeats",
        lines=(second.line, first.line),
        formula="rows that differ in measured numbers alone have the same numbers",
        inputs=(one.shown, other.shown) if one and other else (),
        expected=ends(one.rounded) if one else None,
        found=ends(other.rounded) if other else None,
        difference=difference(other.rounded, one.rounded) if one and other else None,
        tolerance=0.0,
        why="the printed digits alone decide",
        reading="a repeated measurement, or a column that tells the two apart is missing"
        if apart
        else "one row twice",
        is_note=not apart,
    )


def units(entries: Sequence[DerivedRow]) -> Iterator[Disagreement]:
    """Throughput a device about 1000 or 1024 times that of its peers: rows of one model on one device."""
    for peers in _groups(_with_rate(entries), _model).values():
        if len(peers) < 3:
            continue
        middle = statistics.median(_per_device(entry).middle for entry in peers)
        for entry in peers:
            ratio = _per_device(entry).middle / middle
            if not 1 / FAR < ratio < FAR:
                yield _far(entry, middle, len(peers))


def _far(entry: DerivedRow, middle: float, peers: int) -> Disagreement:
    found, expected = _per_device(entry), Interval(middle, middle)
    return Disagreement(
        check="units",
        lines=(entry.line,),
        formula="throughput a GPU is of the order of its peers' median",
        inputs=(_shown(entry), f"median of {peers} rows of the same model and device"),
        expected=ends(expected),
        found=ends(found),
        difference=difference(found, expected),
        tolerance=FAR,
        why=FAR_WHY,
        reading="another unit: k, M, ms or the like",
    )


def proportions(entries: Sequence[DerivedRow]) -> Iterator[Disagreement]:
    """FLOPs a token by each row, against the median row of the same model, length, precision and device."""
    for name in ("mfu", "flops_per_s_device"):
        there = [
            entry
            for entry in _with_rate(entries)
            if name in entry.row.values and entry.values[name].rounded.low > 0
        ]
        for group in _groups(there, _model).values():
            yield from _disproportionate(name, group)


def _disproportionate(name: str, group: Sequence[DerivedRow]) -> Iterator[Disagreement]:
    ordered = sorted(group, key=lambda entry: _quotient(entry, name).middle)
    reference = ordered[(len(ordered) - 1) // 2]
    constant = _quotient(reference, name)
    for entry in group:
        expected = _per_device(entry) * constant
        found = entry.values[name]
        if expected.widened(PROPORTION).meets(found.rounded):
            continue
        is_cut = (
            (_per_device(entry) * _quotient(reference, name, loose=True))
            .widened(PROPORTION)
            .meets(found.loose)
        )
        yield Disagreement(
            check="utilisation",
            lines=(entry.line, reference.line),
            formula=f"{name} in proportion to throughput a GPU",
            inputs=(_shown(entry), _shown(reference), reference.values[name].shown, found.shown),
            expected=ends(expected),
            found=ends(found.rounded),
            difference=difference(found.rounded, expected),
            tolerance=PROPORTION,
            why=PROPORTION_WHY,
            reading=CUT if is_cut else reading(found.rounded, expected),
            is_note=is_cut,
        )


def _quotient(entry: DerivedRow, name: str, *, loose: bool = False) -> Interval:
    value = entry.values[name]
    return (value.loose if loose else value.rounded) / _per_device(entry)


def series(entries: Sequence[DerivedRow]) -> list[list[Size]]:
    """The curves of a table: sizes of one configuration, at one batch a replica (weak) or in all (strong)."""
    there = _with_rate(entries)
    weak = _groups([entry for entry in there if _share(entry) is not None], _weak)
    strong = _groups([entry for entry in there if "global_batch" in entry.values], _strong)
    return [sizes for group in (*weak.values(), *strong.values()) if len(sizes := _sizes(group)) > 1]


def scaling(curves: Iterable[Sequence[Size]]) -> Iterator[Disagreement]:
    """Points above the line through the smallest size, and printed efficiencies above 1."""
    for curve in curves:
        first = curve[0]
        for size in curve[1:]:
            efficiency = size.per_device / first.per_device
            if efficiency.low > 1 + SINGLE_RUN_NOISE:
                yield _super_linear(size.entry, first.entry, efficiency)


def printed_efficiency(entries: Iterable[DerivedRow]) -> Iterator[Disagreement]:
    """Efficiencies that the table itself prints, above 1."""
    for entry in entries:
        value = entry.row.values.get("efficiency")
        if value is not None and value.rounded.low > 1 + SINGLE_RUN_NOISE:
            yield _super_linear(entry, None, value.rounded)


def _super_linear(entry: DerivedRow, first: DerivedRow | None, efficiency: Interval) -> Disagreement:
    shown = (entry.row.values["efficiency"].shown,) if first is None else (_shown(entry), _shown(first))
    return Disagreement(
        check="scaling",
        lines=(entry.line,) if first is None else (entry.line, first.line),
        formula="throughput a GPU over that at the smallest size <= 1",
        inputs=shown,
        expected=(0.0, 1.0),
        found=ends(efficiency),
        difference=efficiency.middle - 1,
        tolerance=SINGLE_RUN_NOISE,
        why=NOISE_WHY,
        reading="a slow smallest size, or more memory a GPU for the larger ones",
    )


def neighbours(curves: Iterable[Sequence[Size]], flagged: Collection[int]) -> Iterator[Disagreement]:
    """Sizes that stick out of both neighbours; `flagged` lines have been found before."""
    for curve in curves:
        for before, size, after in zip(curve, curve[1:], curve[2:], strict=False):
            if any(one.entry.line in flagged for one in (before, size, after)):
                continue
            around = hull((before.per_device, after.per_device))
            if not around.widened(SINGLE_RUN_NOISE).meets(size.per_device):
                yield _outlier(before, size, after, around)


def _outlier(before: Size, size: Size, after: Size, around: Interval) -> Disagreement:
    nearest = min(
        (before.per_device, after.per_device), key=lambda one: abs(one.middle - size.per_device.middle)
    )
    return Disagreement(
        check="neighbours",
        lines=(size.entry.line, before.entry.line, after.entry.line),
        formula="throughput a GPU lies between those of the sizes before and after",
        inputs=tuple(_shown(one.entry) for one in (before, size, after)),
        expected=ends(around),
        found=ends(size.per_device),
        difference=difference(size.per_device, nearest),
        tolerance=SINGLE_RUN_NOISE,
        why=NOISE_WHY,
        reading="a disturbed or mistyped size, or a change of what runs at it",
    )


def _groups(entries: Iterable[DerivedRow], key: Callable[[DerivedRow], Key]) -> dict[Key, list[DerivedRow]]:
    groups: dict[Key, list[DerivedRow]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return groups


def _work(entry: DerivedRow) -> Key:
    unit = "samples" if "samples_per_s" in entry.values or "tokens_per_s" not in entry.values else "tokens"
    return (tuple(sorted(entry.row.facts.items())), *entry.counts(_SHAPE), unit)


def _model(entry: DerivedRow) -> Key:
    names = ("source", "model", "precision", "hardware", "device")
    unit = _work(entry)[-1]
    return (*(entry.row.facts.get(name) for name in names), *entry.counts(_SHAPE), unit)


def _weak(entry: DerivedRow) -> Key:
    return (*_work(entry), *entry.counts((*_SPLIT, "accumulation")), _share(entry))


def _strong(entry: DerivedRow) -> Key:
    return (*_work(entry), *entry.counts((*_SPLIT, "global_batch")))


def _share(entry: DerivedRow) -> float | None:
    """Samples of a step for one replica."""
    if "replicas" not in entry.values:
        return entry.count("batch_per_replica")
    batch, replicas = entry.count("global_batch"), entry.count("replicas")
    return None if batch is None or not replicas else round(batch / replicas, 9)


def _sizes(group: Sequence[DerivedRow]) -> list[Size]:
    by_gpus: dict[float, list[DerivedRow]] = defaultdict(list)
    for entry in group:
        by_gpus[entry.values["gpus"].rounded.middle].append(entry)
    return [
        Size(gpus=gpus, per_device=hull(map(_per_device, same)), entry=same[0])
        for gpus, same in sorted(by_gpus.items())
    ]


def _with_rate(entries: Iterable[DerivedRow]) -> list[DerivedRow]:
    return [entry for entry in entries if entry.per_device is not None]


def _per_device(entry: DerivedRow) -> Interval:
    rate = entry.per_device
    assert rate is not None
    return rate


def _shown(entry: DerivedRow) -> str:
    rate = entry.rate
    assert rate is not None
    return f"{rate.shown} on {entry.values['gpus'].shown}"
