"""Why a launch stands still: which rank is behind, from what the ranks have left in the launch's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.launch.follow import LaunchState, LogTail

_TAIL_BYTES = 4096
"""More than the last line of a rank's log has."""


class _Entry(msgspec.Struct):
    process_group: tuple[str, str]
    """Name, the same on all ranks, and description."""
    collective_seq_id: int
    """Number of the collective in its group, from 1."""
    profiling_name: str
    is_p2p: bool = False


class _Recording(msgspec.Struct):
    entries: list[_Entry] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """What one rank has issued in one process group."""

    collectives: int
    last: str
    """Name of the last one, as `gloo:all_reduce`."""


Issues = Mapping[str, Mapping[int, Issued]]
"""By process group and rank."""


def heartbeats(folder: Path) -> dict[int, str]:
    """When each rank wrote the last whole line of its log, by its own host's clock."""
    found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        at = _last_time(path)
        if at is not None:
            found[_rank(path)] = at
    return found


def hang_reason(folder: Path, silence_s: Mapping[int, float]) -> str:
    """Why nothing moves, in words; `silence_s` is how long each rank has said nothing, by one clock."""
    rank, longest = max(silence_s.items(), key=lambda item: (item[1], -item[0]))
    parts = [
        f"no rank said anything for {min(silence_s.values()):.0f} s",
        f"rank {rank} was heard of longest ago, {longest:.0f} s (phase: {phase(folder, rank)})",
    ]
    behind = laggard(issues(folder))
    return "; ".join(parts if behind is None else [*parts, behind])


def phase(folder: Path, rank: int) -> str:
    """What a rank was doing when it was last heard of."""
    state = LaunchState()
    for event in LogTail(folder / f"rank-{rank:05d}.jsonl").events():
        state.take(event)
    return state.phase


def issues(folder: Path) -> dict[str, dict[int, Issued]]:
    """What the flight recorders say that ranks have issued; a damaged one says nothing.

    A recorder keeps the last collectives alone, but their numbers count all of them.
    """
    found: dict[str, dict[int, Issued]] = {}
    for path in sorted(folder.glob("flight-*.json")):
        try:
            recording = msgspec.json.decode(path.read_bytes(), type=_Recording)
        except (OSError, msgspec.DecodeError):
            continue
        for entry in recording.entries:
            ranks = found.setdefault(entry.process_group[0], {})
            known = ranks.get(_rank(path))
            if not entry.is_p2p and (known is None or entry.collective_seq_id > known.collectives):
                ranks[_rank(path)] = Issued(collectives=entry.collective_seq_id, last=entry.profiling_name)
    return found


def laggard(found: Issues) -> str | None:
    """The rank that the others wait for, in words; None if fewer than two ranks can be compared.

    It has issued fewer collectives of a group than another rank. With groups of nodes a rank may be behind
    in one because it waits in another, where it is ahead: it is a victim as well.
    """
    compared = [group for group in found.values() if len(group) > 1]
    behind = {rank for group in compared for rank in group if group[rank].collectives < _most(group)}
    ahead = {rank for group in compared for rank in group if group[rank].collectives > _fewest(group)}
    if not behind:
        return _all_alike(compared)
    rank = min(behind - ahead or behind)
    group = max(
        (group for group in compared if rank in group),
        key=lambda group: _most(group) - group[rank].collectives,
    )
    other = next(other for other in sorted(group) if group[other].collectives == _most(group))
    return (
        f"rank {rank} had issued {group[rank].collectives} collectives, "
        f"rank {other} {group[other].collectives}, the last of them {group[other].last}"
    )


def _all_alike(compared: list[Mapping[int, Issued]]) -> str | None:
    if not compared:
        return None
    group = max(compared, key=lambda group: (len(group), _most(group)))
    one = group[min(group)]
    return f"{len(group)} ranks had issued {one.collectives} collectives each, the last of them {one.last}"


def _most(group: Mapping[int, Issued]) -> int:
    return max(issued.collectives for issued in group.values())


def _fewest(group: Mapping[int, Issued]) -> int:
    return min(issued.collectives for issued in group.values())


def _rank(path: Path) -> int:
    """The number in `rank-00012.jsonl` and `flight-00012.json`."""
    return int(re.findall(r"\d+", path.name)[0])


def _last_time(path: Path) -> str | None:
    with path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
        lines = file.read().split(b"\n")
    # What comes after the last line's end is a line that was cut off.
    for line in reversed(lines[:-1]):
        try:
            return str(json.loads(line)["at"])
        except (ValueError, KeyError, TypeError):
            continue
    return None
