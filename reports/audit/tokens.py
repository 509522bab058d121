"""FLOPs a token over the rows of a model: they follow from its size and the length of its sequences.

A token takes 6 N + 12 L d s FLOPs (PaLM, arXiv 2204.02311, appendix B). So beyond 6 N they are a line in the
length s, whatever of embeddings and causal attention a source counts, and N itself is one where positions are
learned. The rows of other lengths tell what a row's own length and size must be, where layers and width are
not given.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from reports.audit.account import Account
from reports.audit.findings import Disagreement, difference, ends
from reports.audit.groups import DerivedRow, groups, speed
from reports.audit.intervals import Interval, exactly

NEAR = 0.005
"""Rows of a model are on its lines to this share: FLOP/s and throughput come from one step time."""
FAR = 0.02
FAR_WHY = "both come from one step time: the rows of the other lengths are on one line to 0.5 %"
LEAST_LENGTHS, MOST_LENGTHS = 4, 64
"""The fewest of which one may be off the line of the others."""
OTHER_SIZE = 0.5
"""Learned positions make a model larger at long sequences by some tenths, and not by half."""
SIZE_WHY = "the FLOPs a token are those of the size that the other rows of the model have"
ON_A_LINE = "FLOPs a token less 6 N grow along a line with the sequence length"
ONE_SIZE = "rows of one model have the parameters that their FLOPs a token say"


@dataclass(frozen=True, slots=True)
class _Line:
    slope: float
    start: float

    def at(self, length: float) -> float:
        return self.start + self.slope * length


def tokens(entries: Sequence[DerivedRow], account: Account) -> Iterator[Disagreement]:
    """Rows whose length or whose number of parameters does not fit their FLOPs a token."""
    there = [
        entry
        for entry in entries
        if {"flops_per_s_device", "seq_len", "parameters"} <= entry.row.values.keys()
        and entry.row.facts.get("model")
        and entry.row.is_dense
        and entry.work[-1] == "tokens"
        and entry.per_device is not None
        and entry.values["flops_per_s_device"].rounded.low > 0
    ]
    for group in groups(there, _model).values():
        usual_size = statistics.median(map(_size, group))
        usual = [entry for entry in group if abs(_size(entry) / usual_size - 1) < OTHER_SIZE]
        by_length = groups(usual, _length)
        if LEAST_LENGTHS <= len(by_length) <= MOST_LENGTHS:
            account.saw("utilisation", ON_A_LINE, *(entry.line for entry in group))
            yield from _of_another_length(usual)
            others = [entry for entry in group if abs(_size(entry) / usual_size - 1) >= OTHER_SIZE]
            if len(others) == 1:
                yield from _of_another_size(others[0], usual)


def _model(entry: DerivedRow) -> Hashable:
    facts = entry.row.facts
    return (facts.get("source"), facts["model"], *entry.counts(("layers", "hidden")))


def _length(entry: DerivedRow) -> float:
    return entry.values["seq_len"].middle


def _size(entry: DerivedRow) -> float:
    return entry.values["parameters"].middle


def _flops(entry: DerivedRow) -> Interval:
    """Of a token."""
    return entry.values["flops_per_s_device"].rounded / speed(entry)


def _beyond(entry: DerivedRow) -> float:
    """FLOPs of a token less 6 N: its attention."""
    return _flops(entry).middle - 6 * _size(entry)


def _line(points: Mapping[float, float]) -> _Line:
    """By the medians of Theil (1950) and Sen (1968), which one point of four moves little."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points.items(), 2)]
    slope = statistics.median(slopes)
    return _Line(slope, statistics.median(value - slope * length for length, value in points.items()))


def _of_another_length(usual: Sequence[DerivedRow]) -> Iterator[Disagreement]:
    """The row that is off the line that all others are on."""
    off = _off(usual, _attention(usual))
    if len(off) != 1:
        return
    rest = [entry for entry in usual if entry is not off[0]]
    line = _attention(rest)
    if line.slope <= 0 or _off(rest, line):
        return
    entry, length = off[0], off[0].values["seq_len"]
    expected, found = line.at(length.middle) + 6 * _size(entry), _flops(entry)
    if exactly(expected).widened(FAR).meets(found):
        return
    yield Disagreement(
        check="utilisation",
        lines=(entry.line,),
        formula=ON_A_LINE,
        inputs=tuple(entry.values[name].shown for name in ("seq_len", "parameters", "flops_per_s_device")),
        expected=(expected, expected),
        found=ends(found),
        difference=difference(found, exactly(expected)),
        tolerance=FAR,
        why=FAR_WHY,
        reading=f"a sequence length near {_beyond(entry) / line.slope - line.start / line.slope:.0f}",
        quantity="seq_len",
        quantities=("seq_len",),
    )


def _attention(rows: Sequence[DerivedRow]) -> _Line:
    by_length = groups(rows, _length)
    points = {_length(those[0]): statistics.median(map(_beyond, those)) for those in by_length.values()}
    return _line(points) if len(points) > 1 else _Line(0.0, next(iter(points.values())))


def _off(rows: Sequence[DerivedRow], line: _Line) -> list[DerivedRow]:
    return [one for one in rows if abs(_beyond(one) - line.at(_length(one))) > NEAR * _flops(one).middle]


def _of_another_size(entry: DerivedRow, usual: Sequence[DerivedRow]) -> Iterator[Disagreement]:
    """The one row of another size, if its FLOPs a token are those of the size that the others have."""
    line = _attention(usual)
    by_length = groups(usual, _length)
    sizes = _line({_length(those[0]): _size(those[0]) for those in by_length.values()})
    expected, found = sizes.at(_length(entry)), entry.values["parameters"]
    flops = line.at(_length(entry)) + 6 * expected
    if _off(usual, line) or not exactly(flops).widened(FAR).meets(_flops(entry)):
        return
    yield Disagreement(
        check="utilisation",
        lines=(entry.line,),
        formula=ONE_SIZE,
        inputs=tuple(entry.values[name].shown for name in ("parameters", "seq_len", "flops_per_s_device")),
        expected=(expected, expected),
        found=ends(found.rounded),
        difference=difference(found.rounded, exactly(expected)),
        tolerance=OTHER_SIZE,
        why=SIZE_WHY,
        reading="the number of parameters of another model",
        quantity="parameters",
        quantities=("parameters",),
    )
