"""A launch of any size in one process: every operation is noted, and ends at once.

torch knows the group, as its own strategies
ask for. Sums stay this rank's own, and what would be gathered is what this rank sends: shapes and what
travels are as in a real launch, values are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from harness.worker.exchange.group import ExchangeGroup, Traffic, open_exchange

_BACKEND = "recorded_world"


class Call(NamedTuple):
    operation: str
    ranks: int
    """The ranks of the group that it went over."""
    payload_bytes: int
    """The bytes that this rank hands over."""


class RecordedGroup(dist.ProcessGroup):
    """Notes what it is asked for in `calls`, which all groups share."""

    calls: ClassVar[list[Call]] = []

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names.get(self, "")

    def _done(self, operation: str, sent: list[Tensor], result: Any) -> dist.Work:
        size = sum(buffer.numel() * buffer.element_size() for buffer in sent)
        self.calls.append(Call(operation, self._size, size))
        future: Future[Any] = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._done("all_reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._done("broadcast", tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._done("all_gather", inputs, outputs)

    def _allgather_base(self, output: Tensor, values: Tensor, options: Any = None) -> dist.Work:
        output.view(self._size, -1).copy_(values.view(1, -1).expand(self._size, -1))
        return self._done("all_gather", [values], [output])

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, options: Any = None) -> dist.Work:
        output.view(-1).copy_(values.view(self._size, -1)[self._rank])
        return self._done("reduce_scatter", [values], [output])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self._done("send", tensors, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        # Ones: the stages of torch's pipelines vote by them.
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(1)
        return self._done("recv", tensors, tensors)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def _create(store: object, rank: int, size: int, timeout: timedelta) -> RecordedGroup:
    return RecordedGroup(rank, size)


@contextmanager
def opened(rank: int, size: int) -> Iterator[tuple[ExchangeGroup, list[Call]]]:
    """The exchange group of one rank of `size`, and the calls so far; whoever counts clears them."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
    dist.init_process_group(_BACKEND, rank=rank, world_size=size, store=dist.HashStore())
    RecordedGroup.calls.clear()
    try:
        yield open_exchange(), RecordedGroup.calls
    finally:
        dist.destroy_process_group()


class RecordingGroup(ExchangeGroup):
    """The worker's group over a backend that is always switched off: what would come from the others is what
    this rank sends. Counted as over a real one; groups split from it write to the same list."""

    def __init__(
        self, rank: int, size: int, traffic: Traffic | None = None, seen: list[tuple[str, int]] | None = None
    ) -> None:
        silent = ExchangeGroup(rank, size, traffic=Traffic(enabled=False))
        super().__init__(rank, size, silent, traffic)
        self.seen: list[tuple[str, int]] = [] if seen is None else seen
        """The name of each operation and the bytes of the buffers handed over, in the order of issue."""

    def _run(self, name: str, sent: list[Tensor], *arguments: Any) -> dist.Work:
        self.seen.append((name, sum(buffer.nbytes for buffer in sent)))
        return super()._run(name, sent, *arguments)

    def _open(self, part: Sequence[int]) -> ExchangeGroup | None:
        if self.rank() not in part:
            return None
        return RecordingGroup(list(part).index(self.rank()), len(part), self.traffic, self.seen)
