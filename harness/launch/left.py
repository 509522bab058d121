"""What a node leaves behind that is through with a launch which others may still run.

Who waits in a collective for the ranks of such a node may wait until its time is over: not every transport
tells that a peer has gone (NCCL over InfiniBand does not, Gloo mostly does).
"""

from __future__ import annotations

from pathlib import Path


def say_left(folder: Path, node_rank: int, why: str) -> None:
    """Tell the launch's supervisor that node `node_rank` takes part no more, and `why`, in words."""
    (folder / f"left-{node_rank}.txt").write_text(f"{why}\n", encoding="utf-8")


def who_left(folder: Path) -> str | None:
    """The nodes of a launch that said they left, each with its reason; None: all take part."""
    words = {int(path.stem.removeprefix("left-")): path for path in folder.glob("left-*.txt")}
    if not words:
        return None
    said = [
        f"node {node}: {path.read_text(encoding='utf-8').strip()}" for node, path in sorted(words.items())
    ]
    return "; ".join(said)
