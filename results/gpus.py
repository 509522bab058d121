"""`--gpus`: how a user writes the sizes of a scaling study."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from results.errors import GpuCountsError

_ITEM = re.compile(r"(?P<first>\d{1,18})(?:\.\.(?P<last>\d{1,18})(?::(?P<step>\d{1,18}))?)?", re.ASCII)
_GRAMMAR = "write counts like 8, ranges like 1..256 (doubling) or 8..64:8 (steps), joined by commas"
LARGEST = 1_000_000


@dataclass(frozen=True, slots=True)
class GpuCounts:
    """The numbers of workers of a study, ascending and distinct."""

    counts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> GpuCounts:
        """Read `"1..256"` (doubling, both ends included), `"8..64:8"` (steps) and `"1,2,96"`.

        Raises GpuCountsError, quoting the text and the rule it breaks.
        """
        items = [item.strip() for item in text.split(",")]
        counts = {count for item in items for count in _expand(item, text)}
        return cls(tuple(sorted(counts)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)


def _expand(item: str, text: str) -> list[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise GpuCountsError(f"--gpus {text!r}: {item!r} is not a count or a range; {_GRAMMAR}")
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else first
    if first < 1:
        raise GpuCountsError(f"--gpus {text!r}: counts start at 1, not {first}")
    if last < first:
        raise GpuCountsError(
            f"--gpus {text!r}: a range goes up, and {last} is less than {first}; write {last}..{first}"
        )
    if last > LARGEST:
        raise GpuCountsError(f"--gpus {text!r}: {last} is more than {LARGEST}, the most that is planned")
    if match["step"] is None:
        return _doubling(first, last)
    return _stepping(first, last, int(match["step"]), text)


def _doubling(first: int, last: int) -> list[int]:
    counts = []
    count = first
    while count < last:
        counts.append(count)
        count *= 2
    return [*counts, last]


def _stepping(first: int, last: int, step: int, text: str) -> list[int]:
    if step < 1:
        raise GpuCountsError(f"--gpus {text!r}: a step is at least 1, not {step}")
    reached = last - (last - first) % step
    if reached != last:
        raise GpuCountsError(
            f"--gpus {text!r}: steps of {step} from {first} do not meet {last}; "
            f"write {first}..{reached}:{step} or {first}..{reached + step}:{step}"
        )
    return list(range(first, last + 1, step))
