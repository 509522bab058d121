"""Following the ranks' logs while they run: the phase of the launch, and the silence of each rank.

`hang_reason` says why a launch hangs: the rank that is behind, from the logs and flight recordings in the
launch's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from reports.text import duration, listed
from results import files
from results.features import MEASURED, Kind
from results.files import Content
from results.launch import EVENT, flight_paths, rank_log_path, rank_log_paths, torchrun_folder
from results.plan import Placement

_PHASES = {
    "waiting": "waiting for its turn",
    "build": "building",
    "proof": "proof",
    "first steps": "first steps",
    "warm-up": "warm-up",
    "measure": "measuring",
    "exposed": "measuring the exchange",
    "recording": "recording",
    "hash": "hashing the parameters",
    "late proof": "proof of late steps",
    "recorded": "ending",
}
"""The phase that each event of a measurement begins; kinds of studies declare theirs."""


QUIET_S = 20.0
"""Silence of a rank's log after which the launch is said to wait for the rank."""


class LogTail:
    """Reads the new complete lines of one growing file, each time it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        """The bytes of the file that were read."""

    def lines(self) -> list[Content]:
        """The lines since the last call, as far as the next `LOG_BYTES` have them; a last line without its
        end waits for the next call."""
        try:
            data = files.read_part(self._path, self.offset, files.LOG_BYTES).data
        except OSError:
            # The file does not exist yet, or is not a log.
            return []
        whole, end, _ = data.rpartition(b"\n")
        # A line that is longer than all that is read at once is passed over.
        self.offset += len(whole + end) if end or len(data) < files.LOG_BYTES else len(data)
        return [Content(self._path, line) for line in whole.split(b"\n")] if whole else []

    def events(self) -> Iterator[dict[str, object]]:
        """The events since the last call.

        A line that is no event (cut off by a full disk, and continued) is left out.
        """
        for line in self.lines():
            with suppress(files.DamagedError):
                event = line.parsed(EVENT)
                if "event" in event:
                    yield event


@dataclass
class LaunchState:
    """The progress of a launch by a rank's log; rank 0's is used for all."""

    ready: bool = False
    started: list[str] = field(default_factory=list)
    """Run ids, in order."""
    cell_id: str | None = None
    part: str = ""
    """The event that began the phase; empty before the first run."""
    phase: str = "starting"
    waits_for: str | None = None
    """The ranks that the launch waits for, as its supervisor sees it; None for none."""
    kind: Kind = MEASURED
    """The kind of its study, which names phases."""

    @classmethod
    def of(cls, log: Path, kind: Kind = MEASURED) -> LaunchState:
        """The state by all events of a log so far."""
        state = cls(kind=kind)
        tail, before = LogTail(log), -1
        while tail.offset != before:
            before = tail.offset
            for event in tail.events():
                state.take(event)
        return state

    def take(self, event: dict[str, object]) -> None:
        """Update the state by one event."""
        name = event["event"]
        if name == "ready":
            self.ready = True
        elif name == "run":
            self.started.append(str(event.get("run")))
            self.cell_id = str(event.get("cell"))
            self.part, self.phase = "build", "building"
        elif words := {**_PHASES, **self.kind.phases}.get(str(name)):
            self.part, self.phase = str(name), words


class Pulse:
    """The time for which each rank's log has not changed, by this process's own monotonic clock.

    The times in and of a log are not used: they come from other hosts' clocks, or from a clock that was set.
    """

    def __init__(
        self, folder: Path, placement: Placement, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        ranks, nodes = placement.gpus, placement.nodes
        self._nodes = [torchrun_folder(folder, node) for node in range(nodes)] if nodes > 1 else []
        self._paths = [rank_log_path(folder, rank) for rank in range(ranks)]
        self._clock = clock
        self._seen = [_standing(path) for path in self._paths]
        self._changed = [clock()] * ranks

    def silence_s(self) -> dict[int, float]:
        """Seconds since each rank's log was seen to change, or since this object was made, by rank."""
        now = self._clock()
        for rank, path in enumerate(self._paths):
            standing = _standing(path)
            if standing != self._seen[rank]:
                self._seen[rank], self._changed[rank] = standing, now
        return {rank: now - changed for rank, changed in enumerate(self._changed)}

    def waits_for(self) -> str | None:
        """Name the nodes that have not begun while others have; else such ranks; else the silent ranks.

        `node 1 of 2 to start`; `ranks 1 and 3 to start`; `rank 3, silent for 24 s`;
        `all 4 ranks, silent for 2 min 05 s`.
        """
        ranks = len(self._paths)
        absent = [rank for rank, seen in enumerate(self._seen) if seen is None]
        if absent:
            return f"{self._absent_nodes() or _ranks(absent, ranks)} to start"
        silence = self.silence_s()
        quiet = [rank for rank, seconds in silence.items() if seconds >= QUIET_S]
        if not quiet:
            return None
        return f"{_ranks(quiet, ranks)}, silent for {duration(min(silence[rank] for rank in quiet) * 1e9)}"

    def _absent_nodes(self) -> str | None:
        """Name the nodes that have not begun; None if none or all of them have."""
        missing = [str(node) for node, folder in enumerate(self._nodes) if not folder.exists()]
        if not 0 < len(missing) < len(self._nodes):
            return None
        return f"node{'' if len(missing) == 1 else 's'} {listed(missing)} of {len(self._nodes)}"


def _ranks(which: Sequence[int], ranks: int) -> str:
    if len(which) == ranks > 1:
        return f"all {ranks:,} ranks"
    return f"rank{'' if len(which) == 1 else 's'} {listed([f'{rank:,}' for rank in which])}"


def _standing(path: Path) -> tuple[int, int] | None:
    """Size and modification time of a log; None if it is not there yet."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


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


_RECORDING = msgspec.json.Decoder(_Recording)


Issued = tuple[int, str]
"""The number of collectives that one rank has issued in one process group, and the name of the last one, as
`gloo:all_reduce`."""


def heartbeats(folder: Path) -> dict[int, str]:
    """The time at which each rank wrote the last complete line of its log, by its own host's clock."""
    times: dict[int, str] = {}
    for rank, path in rank_log_paths(folder).items():
        lines: list[bytes] = []
        with suppress(OSError):
            lines = files.read_end(path, _TAIL_BYTES).data.split(b"\n")
        # The text after the last line's end is a line that was cut off.
        for line in reversed(lines[:-1]):
            with suppress(files.DamagedError, KeyError):
                times[rank] = str(Content(path, line).parsed(EVENT)["at"])
                break
    return times


def hang_reason(folder: Path, silence_s: Mapping[int, float], kind: Kind = MEASURED) -> str:
    """Why a launch hangs, a sentence; `silence_s`: seconds since each rank's log changed, by one clock."""
    rank, longest = max(silence_s.items(), key=lambda item: (item[1], -item[0]))
    state = LaunchState.of(rank_log_path(folder, rank), kind)
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
            recording = files.read(path).parsed(_RECORDING)
        except (OSError, files.DamagedError):
            continue
        for entry in recording.entries:
            ranks = found.setdefault(entry.process_group[0], {})
            known = ranks.get(rank)
            if not entry.is_p2p and (known is None or entry.collective_seq_id > known[0]):
                ranks[rank] = entry.collective_seq_id, entry.profiling_name
    return found


def laggard(found: Mapping[str, Mapping[int, Issued]]) -> str | None:
    """The rank that the others wait for, a clause; None if fewer than two ranks can be compared.

    It has issued fewer collectives of a group than another rank. With several groups, a rank may be behind in
    one because it waits in another, where it is ahead: such a rank waits too, and is not the laggard.
    """
    compared = [group for group in found.values() if len(group) > 1]
    if not compared:
        return None
    behind = {rank for group in compared for rank in group if group[rank][0] < _most(group)}
    if not behind:
        group = max(compared, key=lambda group: (len(group), _most(group)))
        number, last = group[min(group)]
        return f"{len(group)} ranks had issued {number} collectives each, the last of them {last}"
    ahead = {rank for group in compared for rank in group if group[rank][0] > min(group.values())[0]}
    return _behind(min(behind - ahead or behind), compared)


def _behind(rank: int, compared: Sequence[Mapping[int, Issued]]) -> str:
    """The clause about a rank that is behind, by the group in which it is furthest behind."""
    own = (group for group in compared if rank in group)
    group = max(own, key=lambda group: _most(group) - group[rank][0])
    other = next(other for other in sorted(group) if group[other][0] == _most(group))
    return (
        f"rank {rank} is behind: it issued {group[rank][0]} collectives, "
        f"rank {other} {group[other][0]}, the last of them {group[other][1]}"
    )


def _most(group: Mapping[int, Issued]) -> int:
    return max(group.values())[0]
