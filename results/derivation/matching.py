"""Match the operations of a run's ranks: the k-th collective of a group is one event on all its ranks.

Ranks are matched by group and sequence number, never by time, so no two clocks are compared. In a collective
that needs all of its ranks, the last to arrive waits for nobody: its duration, the shortest, is the transfer,
and what the others' durations are above it is wait. In a broadcast or a reduce
this is true only of the rank that the others wait for, so that the shortest duration is a lower bound.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from results.errors import SchemaError
from results.record import POINT_TO_POINT, Operations, RankRecord, Recorded

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_SPAN = re.compile(r"(?P<first>\d{1,7})(?:-(?P<last>\d{1,7}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Matched:
    """One entry a rank and operation in each column, rank after rank, each in the order of issue."""

    ranks: int
    steps: int
    """Recorded steps of each rank."""
    names: tuple[str, ...]
    groups: tuple[str, ...]
    rank: Ints
    step: Ints
    name: Ints
    """Index into `names`."""
    group: Ints
    """Index into `groups`."""
    collective: Flags
    """Whether it is matched over the ranks of its group; point-to-point operations are not matched."""
    payload_bytes: Ints
    issued_ns: Ints
    duration_ns: Ints
    group_size: Ints
    transfer_ns: Ints
    """The shortest duration of the collective over its ranks; for point-to-point operations their own."""
    members: tuple[tuple[int, ...], ...]
    """The ranks of each of `groups`."""

    @property
    def unmatched(self) -> bool:
        """Whether all operations are sends between two ranks, which cannot be matched."""
        return len(self.step) > 0 and not self.collective.any()

    @cached_property
    def wait_ns(self) -> Floats:
        """Wait inside of collectives, exposed or not, of each rank in each recorded step: (ranks, steps)."""
        waits = np.zeros((self.ranks, self.steps))
        np.add.at(waits, (self.rank, self.step), self.duration_ns - self.transfer_ns)
        return waits


def recorded_of(ranks: Sequence[RankRecord]) -> list[Recorded] | None:
    """The recorded steps of each rank; None unless all ranks recorded some.

    Raises SchemaError if they did not record the same number of steps.
    """
    found = [rank.recorded for rank in ranks if rank.recorded is not None and rank.recorded.step_ns]
    if not ranks or len(found) < len(ranks):
        return None
    steps = [len(recorded.step_ns) for recorded in found]
    if len(set(steps)) > 1:
        odd = next(place for place, number in enumerate(steps) if number != steps[0])
        raise _damaged(ranks, f"ranks 0 and {odd} recorded {steps[0]} and {steps[odd]} steps")
    return found


def match(ranks: Sequence[RankRecord]) -> Matched | None:
    """The operations of all ranks, given in the order of ranks; None unless all ranks recorded steps.

    Raises SchemaError, naming ranks, if they did not record the same collectives of a group.
    """
    recorded = recorded_of(ranks)
    if recorded is None:
        return None
    rows = _side_by_side(ranks, [own.operations for own in recorded], len(recorded[0].step_ns))
    for place, of_group in enumerate(rows.members):
        mine = np.flatnonzero(rows.collective & (rows.group == place))
        rows.transfer_ns[mine] = _transfers(ranks, rows, mine, of_group)
    return rows


def _side_by_side(ranks: Sequence[RankRecord], operations: Sequence[Operations], steps: int) -> Matched:
    """The operations of all ranks with their own durations as transfers."""
    for rank, own in enumerate(operations):
        limits = {"step": steps, "name": len(own.names), "group": len(own.groups)}
        for field, limit in limits.items():
            values = getattr(own, field)
            if values and not 0 <= min(values) <= max(values) < limit:
                raise _damaged(ranks, f"rank {rank} has an operation whose {field} is not one of {limit}")
    names, name = _common([own.names for own in operations], [own.name for own in operations])
    groups, group = _common([own.groups for own in operations], [own.group for own in operations])
    apart = [place for place, text in enumerate(names) if text in POINT_TO_POINT]
    members = [_members(ranks, text) for text in groups]
    duration = _joined([own.duration_ns for own in operations])
    return Matched(
        ranks=len(ranks),
        steps=steps,
        names=names,
        groups=groups,
        rank=np.repeat(np.arange(len(ranks)), [len(own.step) for own in operations]),
        step=_joined([own.step for own in operations]),
        name=name,
        group=group,
        collective=~np.isin(name, apart),
        payload_bytes=_joined([own.payload_bytes for own in operations]),
        issued_ns=_joined([own.issued_ns for own in operations]),
        duration_ns=duration,
        group_size=np.array([len(of_group) for of_group in members], dtype=np.int64)[group],
        transfer_ns=duration.copy(),
        members=tuple(map(tuple, members)),
    )


def _transfers(ranks: Sequence[RankRecord], rows: Matched, mine: Ints, members: Sequence[int]) -> Ints:
    """Transfer of each of the rows `mine`: all collectives of the group of these ranks."""
    if not len(mine):
        return mine
    group = rows.groups[rows.group[mine[0]]]
    shape = _shape(ranks, group, members, rows.rank[mine])
    kinds = (rows.name[mine] * rows.steps + rows.step[mine]).reshape(shape)
    member, sequence = np.nonzero(kinds != kinds[:1])
    if len(member):
        raise _damaged(
            ranks,
            f"ranks {members[0]} and {members[member[0]]} differ in the name or the step of collective "
            f"{sequence[0]} of the group {group}",
        )
    shortest = rows.duration_ns[mine].reshape(shape).min(axis=0)
    return np.tile(shortest, len(members))


def _joined(columns: Sequence[Sequence[int]]) -> Ints:
    return np.concatenate([np.array(column, dtype=np.int64) for column in columns])


def _common(texts: Sequence[list[str]], columns: Sequence[list[int]]) -> tuple[tuple[str, ...], Ints]:
    """The strings of all ranks, sorted, and the columns of all ranks as one column of indices into them."""
    every = sorted({text for own in texts for text in own})
    place_of = {text: place for place, text in enumerate(every)}
    found = [
        np.array([place_of[text] for text in own], dtype=np.int64)[np.array(column, dtype=np.int64)]
        for own, column in zip(texts, columns, strict=True)
    ]
    return tuple(every), np.concatenate(found)


def _members(ranks: Sequence[RankRecord], group: str) -> list[int]:
    """The global ranks in a group, ascending, by its name: `0-7`, `0,2,4`."""
    spans = [_SPAN.fullmatch(part) for part in group.split(",")]
    ends = [(int(span["first"]), int(span["last"] or span["first"])) for span in spans if span is not None]
    if len(ends) < len(spans) or any(not first <= last < len(ranks) for first, last in ends):
        raise _damaged(ranks, f"{group!r} is not a group of {len(ranks)} ranks")
    return sorted({rank for first, last in ends for rank in range(first, last + 1)})


def _shape(ranks: Sequence[RankRecord], group: str, members: Sequence[int], rank: Ints) -> tuple[int, int]:
    """(ranks of the group, collectives of each of them)."""
    counts = np.bincount(rank, minlength=len(ranks))
    strangers = np.setdiff1d(rank, members)
    if len(strangers):
        raise _damaged(ranks, f"rank {strangers[0]} recorded collectives of the group {group}")
    number = int(counts[members[0]])
    for member in members:
        if counts[member] != number:
            raise _damaged(
                ranks,
                f"ranks {members[0]} and {member} recorded {number} and {counts[member]} collectives of "
                f"the group {group}",
            )
    return len(members), number


def _damaged(ranks: Sequence[RankRecord], what: str) -> SchemaError:
    first = ranks[0]
    return SchemaError(
        f"the recorded operations of run {first.run_id} of {first.cell_id} do not fit together: {what}: "
        f"their records were edited, move the run away"
    )
