"""The process group that gradients are exchanged over: it counts, and it can be told to move nothing.

Strategies get this group instead of the backend's own. With the exchange on it hands every call to the
backend and counts the bytes; with it off it returns finished work and leaves the buffers as they are, a
local no-op of the same shapes. The difference between the two is the exposed communication, and neither
strategy nor model knows which of them runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

_BACKEND = "bench_exchange"

# Options of a collective are opaque C++ structs that are only handed on.
Options = Any


class ExchangeGroup(dist.ProcessGroup):
    """All ranks of the launch, over the backend of the default group.

    Called from C++ with one of the many signatures that the stubs of its base class list.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch calls it for other Python groups
        self._size = size
        self._rank = rank
        self._backend = dist.group.WORLD
        self._name = ""
        self.enabled = True
        self.payload_bytes = 0
        """Bytes of the buffers handed to collectives so far, while enabled."""
        self.operations = 0

    def reset(self) -> None:
        """As new, for the next cell."""
        self.enabled = True
        self.payload_bytes = self.operations = 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        # Given by torch after construction, and asked for once more after torch has forgotten the group.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: Options = None
    ) -> dist.Work:
        return self._run("allreduce", tensors, (tensors,), options)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], options: Options = None
    ) -> dist.Work:
        return self._run("broadcast", tensors, (tensors,), options)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Options = None
    ) -> dist.Work:
        return self._run("allgather", inputs, (outputs, inputs), options)

    def _run(
        self, name: str, buffers: list[Tensor], arguments: tuple[object, ...], options: Options
    ) -> dist.Work:
        if not self.enabled:
            return _finished(buffers)
        self.payload_bytes += _bytes(buffers)
        self.operations += 1
        collective = getattr(self._backend, name)
        work: dist.Work = collective(*arguments) if options is None else collective(*arguments, options)
        return work


def _bytes(buffers: Iterable[Tensor]) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _finished(buffers: list[Tensor]) -> dist.Work:
    devices = sorted({buffer.device.index for buffer in buffers if buffer.is_cuda})
    future: Future[list[Tensor]] = Future(devices=[torch.device("cuda", index) for index in devices])
    future.set_result(buffers)
    work: dist.Work = _create_work_from_future(future)
    return work


def _create(store: object, rank: int, size: int, timeout: timedelta) -> ExchangeGroup:
    return ExchangeGroup(rank, size)


def open_exchange() -> ExchangeGroup:
    """A new exchange over all ranks of the default group; collective."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    group = dist.new_group(backend=_BACKEND)
    assert isinstance(group, ExchangeGroup)
    return group
