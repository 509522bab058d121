"""What a node leaves behind that takes part no more in a launch which others may still be in.

Who waits in a collective for the ranks of such a node may wait until its time is over: not every transport
tells that a peer has gone (NCCL over InfiniBand does not, Gloo mostly does).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from results import files
from results.errors import StoreError


def say_left(folder: Path, node_rank: int, why: str) -> None:
    """Tell the launch's supervisor that node `node_rank` takes part no more, and `why`, in words.

    The first word stands. One that cannot be written is missed: without it ranks wait longer, no more.
    """
    with suppress(StoreError):
        files.write_once(_path(folder, node_rank), f"{why}\n".encode())


def who_left(folder: Path) -> str | None:
    """The nodes of a launch that said they left, each with its reason; None: none did."""
    words = {int(path.stem.removeprefix("left-")): path for path in folder.glob("left-*.txt")}
    said = []
    for node, path in sorted(words.items()):
        with suppress(OSError):
            said.append(f"node {node}: {path.read_text(encoding='utf-8').strip()}")
    return "; ".join(said) or None


def _path(folder: Path, node_rank: int) -> Path:
    return folder / f"left-{node_rank}.txt"
