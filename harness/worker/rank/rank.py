"""Who this process is among the workers of a launch, as torchrun tells it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    rank: int
    local_rank: int
    node_rank: int
    gpus: int
    """Workers of the launch."""
    local_gpus: int
    """Workers of the launch on this node."""

    @classmethod
    def from_torchrun(cls) -> Rank:
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            node_rank=int(os.environ["GROUP_RANK"]),
            gpus=int(os.environ["WORLD_SIZE"]),
            local_gpus=int(os.environ["LOCAL_WORLD_SIZE"]),
        )
