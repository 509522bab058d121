"""Rows that may be compared: of one model, of one configuration, and the curves over numbers of devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from reports.audit.findings import Quantity
from reports.audit.intervals import Interval, exactly, hull
from reports.audit.rows import AuditedRow

_SHAPE = ("parameters", "seq_len", "layers", "hidden")
_SPLIT = ("tensor", "pipeline", "context", "micro_batch")
Key = tuple[Hashable, ...]
CurveKind = Literal["weak", "strong", "batch not given", "step times alone"]


@dataclass(kw_only=True, eq=False)
class DerivedRow:
    """A row with everything that follows from it."""

    row: AuditedRow
    values: dict[str, Quantity]
    setting: tuple[str, ...] = ()
    """The cells of columns of no known meaning that tell configurations apart."""
    work_number: int = -1
    """Equal for rows of equal `work`: short to compare."""

    @property
    def line(self) -> int:
        return self.row.line

    def count(self, name: str) -> float | None:
        value = self.values.get(name)
        return None if value is None else value.middle

    def counts(self, names: Iterable[str]) -> Key:
        values = self.values
        return tuple([values[name].middle if name in values else None for name in names])

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
            origins=batch.origins | step.origins,
        )

    @cached_property
    def per_device(self) -> Interval | None:
        """Throughput of one device; None where it is not known, or printed as 0."""
        rate = self.rate
        if rate is None or "gpus" not in self.values or rate.rounded.low == 0:
            return None
        return rate.rounded / self.values["gpus"].rounded

    @cached_property
    def work(self) -> Key:
        """What a unit of throughput is, of which model, in which words."""
        unit = "samples" if "samples_per_s" in self.values or "tokens_per_s" not in self.values else "tokens"
        facts = tuple(sorted(self.row.facts.items()))
        return (facts, self.setting, *self.counts(_SHAPE), unit)

    def model(self, *names: str) -> Key:
        """The source and the model, and these facts besides."""
        facts = self.row.facts
        return (
            *(facts.get(name) for name in ("source", "model", *names)),
            *self.counts(_SHAPE),
            self.work[-1],
        )

    @cached_property
    def batch_share(self) -> float | None:
        """Samples of a step for one replica."""
        if "replicas" not in self.values:
            return self.count("batch_per_replica")
        batch, replicas = self.count("global_batch"), self.count("replicas")
        return None if batch is None or not replicas else round(batch / replicas, 9)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Size:
    """All rows of a configuration at one number of devices."""

    gpus: float
    speed: Interval
    """Throughput a device; of step times alone, steps per second."""
    entry: DerivedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCurve:
    """One configuration over several numbers of devices, by number."""

    kind: CurveKind
    sizes: tuple[Size, ...]

    @property
    def scope(self) -> str:
        """The configuration in words."""
        entry = self.sizes[0].entry
        facts = (text for name, text in entry.row.facts.items() if name not in ("source", "precision"))
        # An address says less than its length costs.
        setting = (text for text in entry.setting if text and "/" not in text)
        return ", ".join((*facts, *setting, f"line {entry.line} on", self.kind))

    def gain(self, size: Size, before: Size) -> Interval:
        """Throughput a device over that at another size; of step times alone, the most that it can be.

        Without a batch the work of a step may be constant (weak scaling) or shrink with the devices
        (strong): steps per
        second may grow by the ratio of the devices.
        """
        quotient = size.speed / before.speed
        return quotient / exactly(size.gpus / before.gpus) if self.kind == "step times alone" else quotient


def with_settings(entries: Sequence[DerivedRow]) -> None:
    """Set the cells of unknown columns that tell configurations apart.

    An unknown column does (workers, a version) if at least half of the rows have a value in it that stands
    at two or more numbers of devices; a measurement (memory) or a name of the size (nodes) does not.
    """
    columns = {column: None for entry in entries for column in entry.row.unknown}
    chosen = []
    for column in columns:
        sizes: dict[str, set[float | None]] = defaultdict(set)
        for entry in entries:
            sizes[entry.row.unknown.get(column, "")].add(entry.count("gpus"))
        shared = {text for text, at in sizes.items() if len(at) > 1}
        rows = sum(entry.row.unknown.get(column, "") in shared for entry in entries)
        if len(sizes) > 1 and rows * 2 >= len(entries):
            chosen.append(column)
    for entry in entries:
        entry.setting = tuple(entry.row.unknown.get(column, "") for column in chosen)
    numbers: dict[Key, int] = {}
    for entry in entries:
        entry.work_number = numbers.setdefault(entry.work, len(numbers))


SPEEDS = ("samples_per_s", "tokens_per_s", "samples_per_s_device", "tokens_per_s_device", "step_s")


def speed_names(entry: DerivedRow) -> tuple[str, ...]:
    """The printed numbers that say how fast a row is."""
    return tuple(name for name in SPEEDS if name in entry.row.values)


def groups(
    entries: Iterable[DerivedRow], key: Callable[[DerivedRow], Hashable]
) -> dict[Hashable, list[DerivedRow]]:
    """The entries by a key."""
    found: dict[Hashable, list[DerivedRow]] = defaultdict(list)
    for entry in entries:
        found[key(entry)].append(entry)
    return found


def table_curves(entries: Sequence[DerivedRow]) -> list[TableCurve]:
    """All curves of a table: at one batch a replica, at one global batch, or where no row gives a batch."""
    there = [entry for entry in entries if entry.per_device is not None]
    shares = [entry for entry in there if entry.batch_share is not None]
    batches = [entry for entry in there if "global_batch" in entry.values]
    neither = [entry for entry in there if entry.batch_share is None and "global_batch" not in entry.values]
    steps = [
        entry
        for entry in entries
        if entry.rate is None
        and "step_s" in entry.values
        and entry.values["step_s"].rounded.low > 0
        and "gpus" in entry.values
    ]
    return [
        *_curves("weak", shares, lambda entry: (*entry.counts((*_SPLIT, "accumulation")), entry.batch_share)),
        *_curves("strong", batches, lambda entry: entry.counts((*_SPLIT, "global_batch"))),
        *_curves("batch not given", neither, lambda entry: entry.counts(_SPLIT)),
        *_curves("step times alone", steps, lambda entry: entry.counts(_SPLIT)),
    ]


def _curves(
    kind: CurveKind, entries: Sequence[DerivedRow], key: Callable[[DerivedRow], Key]
) -> Iterable[TableCurve]:
    for group in groups(entries, lambda entry: (entry.work_number, *key(entry))).values():
        by_gpus = groups(group, lambda entry: entry.values["gpus"].middle)
        if len(by_gpus) > 1:
            ordered = sorted(by_gpus.values(), key=lambda same: same[0].values["gpus"].middle)
            yield TableCurve(kind=kind, sizes=tuple(_size(same) for same in ordered))


def _size(same: Sequence[DerivedRow]) -> Size:
    speeds = [speed(entry) for entry in same]
    return Size(gpus=same[0].values["gpus"].middle, speed=hull(speeds), entry=same[0])


def speed(entry: DerivedRow) -> Interval:
    """Throughput a device, or steps per second."""
    return entry.per_device or exactly(1) / entry.values["step_s"].rounded


def shown_size(entry: DerivedRow) -> str:
    """A row's throughput, or its step time, and its devices."""
    rate = entry.rate or entry.values["step_s"]
    return f"{rate.shown} on {entry.values['gpus'].shown}"
