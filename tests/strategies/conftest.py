"""Shared by the tests of training: one thread a rank, and many ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import Any

import pytest
import rank_builders
import torch
import torch.distributed as dist

from harness.worker.exchange.group import ExchangeGroup

TIMEOUT = timedelta(seconds=300)
"""It ends a hang: a machine may stand still for longer than Gloo would wait for a message."""
one_thread = rank_builders.one_thread


class ThreadGroup(ExchangeGroup):
    """The worker's group over a separate Gloo group: real sockets, but ranks are threads."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._splits = store, 0
        super().__init__(rank, size, dist.ProcessGroupGloo(store, rank, size, TIMEOUT))

    def _open(self, part: Sequence[int]) -> ExchangeGroup | None:
        self._splits += 1
        if self.rank() not in part:
            return None
        store = dist.PrefixStore(f"{self._splits}", self._store)
        rank, size = list(part).index(self.rank()), len(part)
        backend: Any = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        return ExchangeGroup(rank, size, backend, self.traffic, part)


@pytest.fixture
def threads() -> Callable[..., list[Any]]:
    """`threads(5, function, *arguments)` calls `function(group, *arguments)` on five ranks that are threads.

    Returns the results in the order of ranks. For what needs many ranks and little time; what a strategy
    does to a whole model is tested over processes (`ranks`).
    """

    def run(size: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
        store = dist.HashStore()
        # Kept until all ranks have returned: one that ends closes its connections, while others may still
        # be connecting.
        groups: list[ThreadGroup] = []

        def rank(index: int) -> Any:
            group = ThreadGroup(store, index, size)
            groups.append(group)
            # Whether gradients are recorded is each thread's own setting.
            with torch.no_grad():
                return function(group, *arguments)

        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(rank, index) for index in range(size)]
            # The first to fail is the cause: the others time out waiting for it.
            for future in as_completed(futures):
                future.result()
        return [future.result() for future in futures]

    return run
