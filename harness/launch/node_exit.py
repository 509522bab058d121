"""The note of a node that leaves a launch in which other nodes may still run.

A rank that waits in a collective for the ranks of such a node may wait until its time-out: not every
transport reports that a peer has gone (NCCL over InfiniBand does not, Gloo mostly does).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from results import files
from results.errors import StoreError


def say_left(folder: Path, node_rank: int, why: str) -> None:
    """Tell the launch's supervisor that node `node_rank` has left, and `why`, a clause.

    The first note of a node stays. If the note cannot be written, the other ranks wait longer, no more.
    """
    with suppress(StoreError):
        files.write_once(_path(folder, node_rank), f"{why}\n".encode())


def who_left(folder: Path) -> str | None:
    """The nodes of a launch that have left, each with its reason; None: none has."""
    words = {int(path.stem.removeprefix("left-")): path for path in folder.glob("left-*.txt")}
    said = []
    for node, path in sorted(words.items()):
        with suppress(OSError):
            said.append(f"node {node}: {path.read_text(encoding='utf-8').strip()}")
    return "; ".join(said) or None


def _path(folder: Path, node_rank: int) -> Path:
    return folder / f"left-{node_rank}.txt"
