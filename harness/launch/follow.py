"""Following the workers' logs while they run: where they are, and whether they still are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PHASES = {"proof": "proof", "warm-up": "warm-up", "measure": "measuring", "exposed": "on and off"}


class LogTail:
    """New whole lines of one growing file, each time it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def events(self) -> Iterator[dict[str, object]]:
        """The events since the last call; a last line without its end waits for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole, _, _ = data.rpartition(b"\n")
        if not whole:
            return
        self._offset += len(whole) + 1
        for line in whole.split(b"\n"):
            yield json.loads(line)


@dataclass
class LaunchState:
    """What rank 0's log says of a launch."""

    ready: bool = False
    finished: bool = False
    started: list[str] = field(default_factory=list)
    """Run ids, in order."""
    cell_id: str | None = None
    phase: str = "starting"

    def take(self, event: dict[str, object]) -> None:
        """Learn from one event."""
        name = event["event"]
        if name == "ready":
            self.ready = True
        elif name == "run":
            self.started.append(str(event["run"]))
            self.cell_id = str(event["cell"])
            self.phase = "building"
        elif name == "finished":
            self.finished = True
        else:
            self.phase = _PHASES.get(str(name), self.phase)


def last_change(folder: Path) -> float:
    """When any rank's log last grew, as a modification time; 0 before the first."""
    return max((path.stat().st_mtime for path in folder.glob("rank-*.jsonl")), default=0.0)
