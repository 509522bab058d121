"""Why a launch hangs: the rank that is behind, from the logs and flight recordings in the launch's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.launch.follow import LaunchState
from results.launch import flight_paths, rank_log_path, rank_log_paths

_TAIL_BYTES = 4096
"""More than the length of the last line of a rank's log."""


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
    """The collectives that one rank has issued in one process group."""

    collectives: int
    last: str
    """Name of the last one, as `gloo:all_reduce`."""


Issues = Mapping[str, Mapping[int, Issued]]
"""The collectives that were issued, by process group and rank."""


def heartbeats(folder: Path) -> dict[int, str]:
    """The time at which each rank wrote the last complete line of its log, by its own host's clock."""
    times: dict[int, str] = {}
    for rank, path in rank_log_paths(folder).items():
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
        # The text after the last line's end is a line that was cut off.
        for line in reversed(lines[:-1]):
            with suppress(ValueError, KeyError, TypeError):
                times[rank] = str(json.loads(line)["at"])
                break
    return times


def hang_reason(folder: Path, silence_s: Mapping[int, float]) -> str:
    """Why a launch hangs, a sentence; `silence_s`: seconds since each rank's log changed, by one clock."""
    rank, longest = max(silence_s.items(), key=lambda item: (item[1], -item[0]))
    state = LaunchState.of(rank_log_path(folder, rank))
    parts = [
        f"no rank said anything for {min(silence_s.values()):.0f} s",
        f"rank {rank} has been silent for longest, {longest:.0f} s (phase: {state.phase})",
    ]
    behind = laggard(issues(folder))
    return "; ".join(parts if behind is None else [*parts, behind])


def issues(folder: Path) -> dict[str, dict[int, Issued]]:
    """The collectives that each rank has issued, by flight recordings; a damaged one is left out.

    A recording has only the last collectives, but their numbers count all of them.
    """
    found: dict[str, dict[int, Issued]] = {}
    for rank, path in flight_paths(folder).items():
        try:
            recording = msgspec.json.decode(path.read_bytes(), type=_Recording)
        except (OSError, msgspec.DecodeError):
            continue
        for entry in recording.entries:
            ranks = found.setdefault(entry.process_group[0], {})
            known = ranks.get(rank)
            if not entry.is_p2p and (known is None or entry.collective_seq_id > known.collectives):
                ranks[rank] = Issued(collectives=entry.collective_seq_id, last=entry.profiling_name)
    return found


def laggard(found: Issues) -> str | None:
    """The rank that the others wait for, a clause; None if fewer than two ranks can be compared.

    It has issued fewer collectives of a group than another rank. With several groups, a rank may be behind in
    one because it waits in another, where it is ahead: such a rank waits too, and is not the laggard.
    """
    compared = [group for group in found.values() if len(group) > 1]
    behind = {rank for group in compared for rank in group if group[rank].collectives < _most(group)}
    ahead = {
        rank
        for group in compared
        for rank in group
        if group[rank].collectives > min(issued.collectives for issued in group.values())
    }
    if not compared:
        return None
    if not behind:
        group = max(compared, key=lambda group: (len(group), _most(group)))
        one = group[min(group)]
        return (
            f"{len(group)} ranks had issued {one.collectives} collectives each, the last of them {one.last}"
        )
    rank = min(behind - ahead or behind)
    group = max(
        (group for group in compared if rank in group),
        key=lambda group: _most(group) - group[rank].collectives,
    )
    other = next(other for other in sorted(group) if group[other].collectives == _most(group))
    return (
        f"rank {rank} is behind: it issued {group[rank].collectives} collectives, "
        f"rank {other} {group[other].collectives}, the last of them {group[other].last}"
    )


def _most(group: Mapping[int, Issued]) -> int:
    return max(issued.collectives for issued in group.values())
