"""Names and marks of what ranks and torchrun write into a launch's folder, beside the files with a schema."""

from __future__ import annotations

import re
from pathlib import Path

RUN_MARK = "--- run "
"""How a rank's stdout and stderr say that the output of a run begins; the run's id follows."""


def torchrun_log_path(folder: Path) -> Path:
    """What the process that starts the workers prints: torchrun, or srun."""
    return folder / "torchrun.log"


def rank_log_path(folder: Path, rank: int) -> Path:
    """A rank's events, one JSON object a line."""
    return folder / f"rank-{rank:05d}.jsonl"


def rank_log_paths(folder: Path) -> dict[int, Path]:
    """The logs that are there, by rank."""
    return _by_rank(folder, "rank-*.jsonl")


def torchrun_folder(folder: Path, node: int | str | None) -> Path:
    """The folder that a node's torchrun makes as soon as it starts; `node` None: the launch is on one."""
    return folder / "torchrun" if node is None else folder / "torchrun" / f"node-{node}"


def rank_output_paths(folder: Path) -> list[Path]:
    """What ranks print: stdout.log and stderr.log in a folder that has the rank's number on its node."""
    return sorted(folder.glob("torchrun/**/attempt_0/*/std*.log"))


def nccl_log_path(folder: Path, rank: int) -> Path:
    """What NCCL says of how it connects."""
    return folder / f"nccl-{rank:05d}.log"


def flight_path(folder: Path, rank: int) -> Path:
    """The last collectives of a rank without progress, as its backend keeps them."""
    return folder / f"flight-{rank:05d}.json"


def flight_paths(folder: Path) -> dict[int, Path]:
    """The recordings that are there, by rank."""
    return _by_rank(folder, "flight-*.json")


def _by_rank(folder: Path, pattern: str) -> dict[int, Path]:
    return {int(re.findall(r"\d+", path.name)[0]): path for path in sorted(folder.glob(pattern))}
