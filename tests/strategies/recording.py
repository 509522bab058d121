"""One rank of a big world in one process: what it hands to its group is recorded, and nothing moves.

Loaded by `conftest.py`, which hands out `RecordingGroup` as `recording`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from harness.worker.exchange.group import ExchangeGroup, Traffic


class RecordingGroup(ExchangeGroup):
    """The worker's group over a backend that is always switched off: what would come from the others is what
    this rank sends. Counted as over a real one; groups split from it write to the same list."""

    def __init__(
        self, rank: int, size: int, traffic: Traffic | None = None, seen: list[tuple[str, int]] | None = None
    ) -> None:
        silent = ExchangeGroup(rank, size, traffic=Traffic(enabled=False))
        super().__init__(rank, size, silent, traffic)
        self.seen: list[tuple[str, int]] = [] if seen is None else seen
        """Of each operation its name and the bytes of the buffers handed over, in the order of issue."""

    def _run(self, name: str, sent: list[Tensor], *arguments: Any) -> dist.Work:
        self.seen.append((name, sum(buffer.nbytes for buffer in sent)))
        return super()._run(name, sent, *arguments)

    def _open(self, part: Sequence[int]) -> ExchangeGroup | None:
        if self.rank() not in part:
            return None
        return RecordingGroup(list(part).index(self.rank()), len(part), self.traffic, self.seen)
