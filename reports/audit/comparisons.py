"""Rows against each other: repeats, units, proportions, peaks, order, digits.

- utilisation: MFU over throughput a GPU is one number for a model, a sequence length, a precision and a
  device; FLOP/s over throughput a GPU is one number for a model and a sequence length, on any device;
  FLOP/s over MFU is one peak for a device.
- repeats: two rows that say the same but for what was measured measured the same, to 5 %.
- units: throughput a GPU within a factor of 500 of its peers' median.
- order: a larger message, a larger batch, a longer sequence, more layers take no less time.
- digits: where the rows of a source agree to the printed digit, the last one does too; and no two share
  many digits.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from reports.analysis.scaling import SINGLE_RUN_NOISE
from reports.audit.account import Account
from reports.audit.columns import MEASURED
from reports.audit.findings import (
    CUT,
    Disagreement,
    Quantity,
    Relation,
    difference,
    ends,
    printed_names,
    reading,
)
from reports.audit.groups import SPEEDS, DerivedRow, groups, shown_size, speed, speed_names
from reports.audit.intervals import Interval, exactly, significant

PROPORTION = 0.005
PROPORTION_WHY = "both come from one step time: 0.5 % allows that one was averaged over other steps"
PEAK = 0.01
PEAK_WHY = "both come from one step time and one data sheet"
REPEAT_WHY = "two runs of one configuration may be 5 % apart, as in this program's own reports"
FAR = 500.0
FAR_WHY = "sizes and batches make factors of tens; 500 to 2048 is 1000 or 1024 within a factor of 2"
MESSAGES = 0.10
MESSAGES_WHY = "a collective that changes its protocol with the size of the message may gain some percent"
LEAST_EXACT = 8
"""Rows of a source that agree to the digit, before one that does not is a finding."""


def repeats(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """|b / a - 1| <= 5 % for two rows that differ in measured numbers alone; what is nearer is a note."""
    for same in groups(entries, lambda entry: entry.row.identity).values():
        if len(same) > 1:
            account.saw("repeats", REPEATED, *(entry.line for entry in same))
        for other in same[1:]:
            yield _repeat(same[0], other)


REPEATED = "rows that differ in measured numbers alone have the same numbers"


def _repeat(first: DerivedRow, second: DerivedRow) -> Disagreement:
    both = [name for name in first.row.values if name in second.row.values and name in MEASURED]
    apart = [name for name in both if not first.values[name].rounded.meets(second.values[name].rounded)]
    far = [name for name in apart if not _within(first.values[name], second.values[name], SINGLE_RUN_NOISE)]
    name = next(iter((*far, *apart, *both)), None)
    one, other = (first.values[name], second.values[name]) if name else (None, None)
    words = (
        "a repeated measurement, or a column that tells the two apart is missing"
        if apart
        else "one row twice"
    )
    return Disagreement(
        check="repeats",
        lines=(second.line, first.line),
        formula=REPEATED,
        inputs=(one.shown, other.shown) if one and other else (),
        expected=ends(one.rounded) if one else None,
        found=ends(other.rounded) if other else None,
        difference=difference(other.rounded, one.rounded) if one and other else None,
        tolerance=SINGLE_RUN_NOISE,
        why=REPEAT_WHY,
        reading=words,
        is_note=not far,
        quantity=name or "",
        quantities=(name,) if name else (),
        scope=f"line {first.line}",
    )


def _within(one: Quantity, other: Quantity, share: float) -> bool:
    return one.rounded.widened(share).meets(other.rounded)


def units(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """1 / 500 < x / median < 500 for throughput a GPU x of 3 rows or more of one model on one device."""
    there = [entry for entry in entries if entry.per_device is not None]
    for peers in groups(there, lambda entry: entry.model("precision", "hardware", "device")).values():
        if len(peers) < 3:
            continue
        account.saw("units", FAR_OFF, *(entry.line for entry in peers))
        middle = statistics.median(speed(entry).middle for entry in peers)
        for entry in peers:
            if not 1 / FAR < speed(entry).middle / middle < FAR:
                yield _far(entry, middle, len(peers))


FAR_OFF = "throughput a GPU is of the order of its peers' median"


def _far(entry: DerivedRow, middle: float, peers: int) -> Disagreement:
    found, expected = speed(entry), Interval(middle, middle)
    return Disagreement(
        check="units",
        lines=(entry.line,),
        formula=FAR_OFF,
        inputs=(shown_size(entry), f"median of {peers} rows of the same model and device"),
        expected=ends(expected),
        found=ends(found),
        difference=difference(found, expected),
        tolerance=FAR,
        why=FAR_WHY,
        reading="another unit: k, M, ms or the like",
        quantities=speed_names(entry),
    )


def proportions(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """q / x is that of the median row, to 0.5 %; x is throughput a GPU, q is MFU, or FLOP/s a GPU.

    MFU is compared on one device and in one precision, FLOP/s over all of them.
    """
    for name, facts in (("flops_per_s_device", ()), ("mfu", ("precision", "hardware", "device"))):
        there = [
            entry
            for entry in entries
            if name in entry.row.values
            and entry.per_device is not None
            and entry.values[name].rounded.low > 0
        ]
        for group in groups(there, lambda entry, facts=facts: entry.model(*facts)).values():  # type: ignore[misc]
            if len(group) > 1:
                yield from _disproportionate(name, group, account)


def _disproportionate(name: str, group: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    formula = f"{name} in proportion to throughput a GPU"
    ordered = sorted(group, key=lambda entry: entry.values[name].middle / speed(entry).middle)
    reference = ordered[(len(ordered) - 1) // 2]
    value = reference.values[name]
    constant, loose = value.rounded / speed(reference), value.loose / speed(reference)
    account.saw("utilisation", formula, *(entry.line for entry in group))
    for entry in group:
        expected, found = speed(entry) * constant, entry.values[name]
        if expected.widened(PROPORTION).meets(found.rounded):
            continue
        is_cut = (speed(entry) * loose).widened(PROPORTION).meets(found.loose)
        yield Disagreement(
            check="utilisation",
            lines=(entry.line, reference.line),
            formula=formula,
            inputs=(shown_size(entry), shown_size(reference), value.shown, found.shown),
            expected=ends(expected),
            found=ends(found.rounded),
            difference=difference(found.rounded, expected),
            tolerance=PROPORTION,
            why=PROPORTION_WHY,
            reading=CUT if is_cut else reading(found.rounded, expected, name),
            is_note=is_cut,
            quantity=name,
            quantities=(name, *speed_names(entry)),
        )


def implied_peaks(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """FLOP/s / MFU is that of the median row, to 1 %, of 3 rows or more of a device without a known peak."""
    formula = "FLOP/s a GPU / MFU = one peak for a device"
    needs = ("flops_per_s_device", "mfu")
    there = [
        entry
        for entry in entries
        if "peak" not in entry.values
        and all(name in entry.row.values and entry.values[name].rounded.low > 0 for name in needs)
    ]
    facts = ("source", "hardware", "precision")
    for group in groups(there, lambda entry: tuple(entry.row.facts.get(name) for name in facts)).values():
        if len(group) < 3:
            continue
        account.saw("utilisation", formula, *(entry.line for entry in group))
        peaks = {entry: entry.values[needs[0]].rounded / entry.values[needs[1]].rounded for entry in group}
        median = statistics.median(peak.middle for peak in peaks.values())
        for entry, peak in peaks.items():
            if not peak.widened(PEAK).meets(exactly(median)):
                yield Disagreement(
                    check="utilisation",
                    lines=(entry.line,),
                    formula=formula,
                    inputs=(*(entry.values[name].shown for name in needs), f"median of {len(group)} rows"),
                    expected=(median, median),
                    found=ends(peak),
                    difference=peak.middle / median - 1,
                    tolerance=PEAK,
                    why=PEAK_WHY,
                    reading=reading(peak, exactly(median), "flops_per_s_device"),
                    quantity="peak",
                    quantities=needs,
                )


def order(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """t(more) >= 0.9 t(less) for messages and 0.95 t(less) for steps, of rows that differ in one count."""
    yield from _in_order(entries, "bytes", "time_s", MESSAGES, account)
    for grows in ("global_batch", "seq_len", "layers"):
        yield from _in_order(entries, grows, "step_s", SINGLE_RUN_NOISE, account)


_FIXED = (
    "gpus", "parameters", "hidden", "tensor", "pipeline", "context", "data_parallel", "micro_batch",
    "accumulation",
    "global_batch", "seq_len", "layers",
)  # fmt: skip


def _in_order(
    entries: Sequence[DerivedRow], grows: str, takes: str, tolerance: float, account: Account
) -> Iterator[Disagreement]:
    formula = f"more {grows} take no less time"
    others = tuple(
        name for name in _FIXED if name != grows and not (grows == "global_batch" and name == "accumulation")
    )
    there = [entry for entry in entries if grows in entry.values and takes in entry.row.values]

    def key(entry: DerivedRow) -> Hashable:
        return (entry.work[0], entry.setting, entry.counts(others))

    for group in groups(there, key).values():
        ordered = sorted(group, key=lambda entry: entry.values[grows].middle)
        for less, more in pairwise(ordered):
            if less.values[grows].middle == more.values[grows].middle:
                continue
            account.saw("order", formula, more.line)
            short, long = more.values[takes], less.values[takes]
            if short.rounded.high < long.rounded.low * (1 - tolerance):
                yield Disagreement(
                    check="order",
                    lines=(more.line, less.line),
                    formula=formula,
                    inputs=tuple(one.values[name].shown for one in (more, less) for name in (grows, takes)),
                    expected=(long.rounded.low, float("inf")),
                    found=ends(short.rounded),
                    difference=difference(short.rounded, long.rounded),
                    tolerance=tolerance,
                    why=MESSAGES_WHY if grows == "bytes" else REPEAT_WHY,
                    reading="one of the two is disturbed or mistyped",
                    quantity=takes,
                    quantities=(grows, takes),
                )


def odd_digits(
    judged: Mapping[Relation, Sequence[tuple[DerivedRow, bool]]], account: Account
) -> Iterator[Disagreement]:
    """Rows that an equation holds for by its tolerance alone, in a source where it holds to the digit for
    the others.

    8 rows or more agree to the digit, rounded or cut off, and the others are one, or one in twenty.
    """
    for relation, rows in judged.items():
        formula = f"{relation.formula}, to the digit as in the rows beside it"
        by_source: dict[str | None, list[tuple[DerivedRow, bool]]] = {}
        for entry, is_exact in rows:
            by_source.setdefault(entry.row.facts.get("source"), []).append((entry, is_exact))
        for same in by_source.values():
            odd = [entry for entry, is_exact in same if not is_exact]
            if len(same) - len(odd) < LEAST_EXACT:
                continue
            account.saw("digits", formula, *(entry.line for entry, _ in same))
            if 0 < len(odd) <= max(1, len(same) // 20):
                yield from (_odd(relation, formula, entry, len(same) - len(odd)) for entry in odd)


def _odd(relation: Relation, formula: str, entry: DerivedRow, siblings: int) -> Disagreement:
    inputs = [entry.values[name] for name in relation.needs]
    expected: Interval = relation.expected(*(value.rounded for value in inputs))
    found = entry.values[relation.found]
    return Disagreement(
        check="digits",
        lines=(entry.line,),
        formula=formula,
        inputs=(*(value.shown for value in inputs), found.shown),
        expected=ends(expected),
        found=ends(found.rounded),
        difference=difference(found.rounded, expected),
        tolerance=0.0,
        why=f"{siblings} rows of the source agree to the digit",
        reading="a mistyped digit, or a number of another run",
        quantity=relation.found,
        quantities=printed_names(relation, entry.values),
    )


def shared_digits(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """No two of n rows of a source share d digits of a measured number, if n^2 / 2 x 10^(1 - d) < 0.001."""
    formula = "no two rows have the same measured number to the last of many digits"
    for same in groups(entries, lambda entry: entry.row.facts.get("source")).values():
        for name in (*SPEEDS, "time_s"):
            there = [entry for entry in same if name in entry.row.values]
            texts = Counter(entry.values[name].text for entry in there)
            copied = {
                text
                for text, times in texts.items()
                if times > 1
                and len(there) ** 2 / 2 * 10.0 ** (1 - significant(text)) < 1e-3
                and not _is_short_quotient(text)
            }
            if not copied:
                continue
            for text in copied:
                rows = [entry for entry in there if entry.values[name].text == text]
                if len({(entry.work_number, entry.counts(_FIXED)) for entry in rows}) > 1:
                    account.saw("digits", formula, *(entry.line for entry in rows))
                    yield _shared(formula, name, rows)


def _is_short_quotient(text: str) -> bool:
    """Whether the digits come from a division of numbers of few digits (64 / 0.048), as two rows may."""
    number = Fraction(text.replace(",", ""))
    return abs(number.limit_denominator(10_000) / number - 1) < Fraction(1, 10**12)


def _shared(formula: str, name: str, rows: Sequence[DerivedRow]) -> Disagreement:
    value = rows[0].values[name]
    return Disagreement(
        check="digits",
        lines=tuple(entry.line for entry in rows),
        formula=formula,
        inputs=(value.shown,),
        expected=None,
        found=ends(value.rounded),
        difference=None,
        tolerance=0.0,
        why="by chance in less than 1 of 1000 tables of so many rows",
        reading="a number copied from one row to the other",
        quantity=name,
        quantities=(name,),
    )


def above_one(entries: Iterable[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """Efficiencies that the table itself prints: E <= 1.05."""
    formula = "a printed efficiency <= 1"
    for entry in entries:
        value = entry.row.values.get("efficiency")
        if value is None:
            continue
        account.saw("scaling", formula, entry.line)
        if value.rounded.low > 1 + SINGLE_RUN_NOISE:
            yield Disagreement(
                check="scaling",
                lines=(entry.line,),
                formula=formula,
                inputs=(value.shown,),
                expected=(0.0, 1.0),
                found=ends(value.rounded),
                difference=value.middle - 1,
                tolerance=SINGLE_RUN_NOISE,
                why=REPEAT_WHY,
                reading="percent in a column of shares, or a slow smallest size",
                quantity="efficiency",
                quantities=("efficiency",),
            )
