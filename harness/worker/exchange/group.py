"""The process group that gradients are exchanged over: it counts traffic, and it can be switched off.

Strategies get this group instead of the backend's. While it is on, it passes every call to the backend and
counts the bytes. While it is off, it returns finished work at once: sums and broadcasts leave this rank's
values, a gather returns what this rank sends, and a receive the last message that came at its place, as an
exchange of numbers of rows does (`stand_ins`). The difference between the two is the exposed communication,
and neither strategy nor model knows which of them runs.
"""

# The stubs of torch's process group list several signatures of each operation; C++ calls the ones below.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from harness.worker.exchange.buckets import BucketCounter
from harness.worker.exchange.recorder import Recorder, group_text
from harness.worker.exchange.staged import StagedGroup
from harness.worker.exchange.stand_ins import StandIns
from strategies.devices import StreamedDevice, device_of

_BACKEND = "bench_exchange"
_EVERYONE = -1
"""The source of a message that comes from all ranks of a group."""

# Options of a collective are opaque C++ structs that are only handed on.
Options = Any
# NCCL returns None for a synchronous operation (`options.asyncOp` False): it runs on the current stream, and
# torch waits for nothing. Only torch's Python functions with `async_op=False` ask for one, as FSDP2 does; its
# C++ and our own calls leave asyncOp True, and always get a work to wait for.
MaybeWork = dist.Work | None
Operation = Callable[..., MaybeWork]


@dataclass(slots=True)
class Traffic:
    """The traffic of a group and the groups split from it, and the switch that stops it."""

    enabled: bool = True
    stand_ins: StandIns = field(default_factory=StandIns)
    """It fills the places of other ranks' values while the exchange is off."""
    payload_bytes: int = 0
    """Bytes of the buffers handed to collectives and sends so far, while enabled."""
    operations: int = 0
    sends: int = 0
    """Messages that this rank has begun to send; they are among the operations."""
    received: int = 0
    """Messages that this rank has begun to receive; the sender counts them as operations."""
    buckets: BucketCounter | None = None
    """Counts buckets and operations; None outside of the period that is counted."""
    recorder: Recorder | None = None
    """Records every operation; None outside of recorded blocks."""


class ExchangeGroup(dist.ProcessGroup):
    """The ranks of a backend's group, all of the launch's at first, and groups split from them.

    Called from C++ with one of the many signatures that the stubs of its base class list.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        backend: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
        members: Sequence[int] | None = None,
        staged_for: StreamedDevice | None = None,
    ) -> None:
        """Exchange over `backend` (None: the default group), and count the exchange in `traffic`.

        `members` are the ranks of the launch that are in it (None: the first `size`). `staged_for` is a
        device whose tensors the backend cannot move: they go through host memory (`StagedGroup`).
        """
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch calls it for other Python groups
        self._size = size
        self._rank = rank
        self._backend: Any = dist.group.WORLD if backend is None else backend
        self._staged_for = staged_for
        self._transport: Any = self._backend if staged_for is None else StagedGroup(self._backend, staged_for)
        self._downward_transport: Any = None
        """The backend of messages from a rank to a lower one; None: `_transport` carries both directions."""
        self._members = range(size) if members is None else members
        self._recorded_as = group_text(self._members)
        self._name = ""
        self._parts: list[ExchangeGroup] = []
        self.timeout: timedelta | None = None
        """How long a rank waits in a group that is split from this one; None: torch's default."""
        self.traffic = Traffic() if traffic is None else traffic

    @property
    def joins_a_pair_twice(self) -> bool:
        """Whether two ranks have several groups in common that were split from this one."""
        parts = [part for part in self._parts for _ in range(1 + (part._downward_transport is not None))]
        members = [set(part._members) for part in parts]
        return any(len(one & other) > 1 for one, other in combinations(members, 2))

    def reset(self) -> None:
        """Renew the group for the next cell: zero counts, switched on, no group split from it. Collective."""
        self.traffic = Traffic()
        for part in self._parts:
            for group in (part, *part.backends()):
                dist.destroy_process_group(group)
        self._parts.clear()

    def shutdown(self) -> None:
        """Release the backend; torch calls this when it destroys the group."""
        # DTensor's caches hold the meshes of past cells, and these their groups. Without this the threads of
        # the backend would poll until the worker ends.
        if self._staged_for is not None:
            self._transport.close()
        self._backend = self._transport = self._downward_transport = None

    @property
    def class_name(self) -> str:
        """The class of torch that moves the data, such as ProcessGroupNCCL."""
        devices = self._backend._device_types
        transport = self._backend._get_backend(devices[0]) if devices else self._backend
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the group in another.
        return type(getattr(transport, "wrapped_pg", transport)).__name__

    @property
    def backend(self) -> dist.ProcessGroup:
        """The process group that moves the data."""
        backend: dist.ProcessGroup = self._backend
        return backend

    def backends(self) -> list[dist.ProcessGroup]:
        """Return the process groups that move the data of this group and of the groups split from it."""
        own = [group for group in (self._backend, self._downward_transport) if group is not None]
        return own + [backend for part in self._parts for backend in part.backends()]

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return _BACKEND

    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> ExchangeGroup:
        """Return this group as its own backend.

        torch's `batch_isend_irecv` gets the backend of a group and reads its `supports_coalescing`.
        """
        return self

    @property
    def group_name(self) -> str:
        # torch names the group after construction, and asks for the name even after forgetting the group.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def split_into(self, parts: Sequence[Sequence[int]], *, duplex: bool = False) -> ExchangeGroup:
        """The group of the part that this rank is in, counted and switched with this one; collective.

        torch knows it by name, as meshes and pipelines ask for. `duplex` has the meaning that it has in
        `Link.split`.
        """
        groups = [self._open(part) for part in parts]
        # Gloo has a connection for each direction. NCCL carries out all messages of two ranks one by one, and
        # a message ends when the other rank receives it: two that send to each other first never would.
        if duplex and dist.get_backend(self._backend) != dist.Backend.GLOO:
            for part, group in zip(parts, groups, strict=True):
                downward = self._new_backend([self._members[rank] for rank in part])
                if group is not None:
                    group._downward_transport = downward
        _await_connections()
        own = next(group for group in groups if group is not None)
        self._parts.append(own)
        return own

    def _open(self, part: Sequence[int]) -> ExchangeGroup | None:
        """Open a group of these ranks over another backend; None where this rank is not in it."""
        ranks = [self._members[rank] for rank in part]
        return _open_over(self._new_backend(ranks), ranks, self.timeout, self.traffic, self._staged_for)

    def _new_backend(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, timeout=self.timeout, backend=dist.get_backend(self._backend))

    def announce_bucket(self) -> None:
        """Count a bucket that a strategy begins to exchange over this group."""
        if self.traffic.buckets is not None:
            self.traffic.buckets.announced()

    def allreduce(self, tensors: list[Tensor], options: Options = None) -> MaybeWork:
        return self._run("allreduce", tensors, tensors, (tensors,), options)

    def reduce(self, tensors: list[Tensor], options: Options = None) -> MaybeWork:
        return self._run("reduce", tensors, tensors, (tensors,), options)

    def broadcast(self, tensors: list[Tensor], options: Options = None) -> MaybeWork:
        return self._run("broadcast", tensors, tensors, (tensors,), options)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Options = None
    ) -> MaybeWork:
        if not self.traffic.enabled:
            for output in outputs[0]:
                self.traffic.stand_ins.fill(output, inputs[0])
        return self._run("allgather", inputs, outputs, (outputs, inputs), options)

    def _allgather_base(self, output: Tensor, values: Tensor, options: Options = None) -> MaybeWork:
        if not self.traffic.enabled:
            self.traffic.stand_ins.fill(output, values)
        return self._run("_allgather_base", [values], [output], (output, values), options)

    # From version 2.13 on torch calls these two operations by these names.
    all_gather_single = _allgather_base  # type: ignore[assignment]

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, options: Options = None) -> MaybeWork:
        if not self.traffic.enabled:
            self.traffic.stand_ins.fill(output, values.reshape(self._size, -1)[self._rank])
        return self._run("_reduce_scatter_base", [values], [output], (output, values), options)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, values: Tensor, *splits: list[int], options: Options = None
    ) -> MaybeWork:
        if values.is_floating_point():
            if not self.traffic.enabled:
                self.traffic.stand_ins.fill(output, values)
        elif self.traffic.enabled:
            # Numbers of rows: what a rank computes while the exchange is off follows from the kept ones.
            self.traffic.stand_ins.received(self, _EVERYONE, [output])
        else:
            self.traffic.stand_ins.receive(self, _EVERYONE, [output])
        return self._run("alltoall_base", [values], [output], (output, values, *splits), options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> MaybeWork:
        self.traffic.sends += self.traffic.enabled
        return self._run("send", tensors, tensors, (tensors, to, tag), None, self._way(self._rank, to))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MaybeWork:
        # The sender counts the bytes.
        if not self.traffic.enabled:
            self.traffic.stand_ins.receive(self, source, tensors)
            return _finished(tensors)
        self.traffic.stand_ins.received(self, source, tensors)
        self.traffic.received += 1
        receive = self._way(source, self._rank).recv
        return self._issued("recv", tensors, receive, (tensors, source, tag))

    def _way(self, source: int, to: int) -> Any:
        """Return what carries messages from one rank to another."""
        return self._transport if source < to else self._downward_transport or self._transport

    def _run(
        self,
        name: str,
        sent: list[Tensor],
        result: Any,
        arguments: tuple[object, ...],
        options: Options,
        transport: Any = None,
    ) -> MaybeWork:
        if not self.traffic.enabled:
            return _finished(result)
        self.traffic.payload_bytes += _bytes(sent)
        self.traffic.operations += 1
        collective = getattr(transport or self._transport, name)
        if options is not None:
            arguments = (*arguments, options)
        return self._issued(name, sent, collective, arguments)

    def _issued(
        self, name: str, buffers: list[Tensor], operation: Operation, arguments: tuple[object, ...]
    ) -> MaybeWork:
        if self.traffic.recorder is None:
            return operation(*arguments)
        if self.traffic.buckets is not None:
            self.traffic.buckets.issued(name)
        call = partial(operation, *arguments)
        return self.traffic.recorder.issue(name, self._recorded_as, _bytes(buffers), call)


def _bytes(buffers: Iterable[Tensor]) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _finished(result: list[Tensor] | list[list[Tensor]]) -> dist.Work:
    buffers = [buffer for item in result for buffer in (item if isinstance(item, list) else [item])]
    future = device_of(buffers[0].device).future()
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


_making: list[Callable[[int, int], ExchangeGroup]] = []
"""Makes the group that is being opened: torch chooses the arguments of `_create`."""


def _create(store: object, rank: int, size: int, timeout: timedelta) -> ExchangeGroup:
    group = _making[-1](rank, size)
    group.timeout = timeout
    return group


def _open_over(
    backend: dist.ProcessGroup,
    members: Sequence[int],
    timeout: timedelta | None,
    traffic: Traffic,
    staged_for: StreamedDevice | None,
) -> ExchangeGroup | None:
    """Open an exchange over `backend` that torch knows by name; None where this rank is not in it."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    _making.append(
        partial(ExchangeGroup, backend=backend, traffic=traffic, members=members, staged_for=staged_for)
    )
    try:
        group = dist.new_group(list(members), timeout=timeout, backend=_BACKEND)
    finally:
        _making.pop()
    return group if isinstance(group, ExchangeGroup) else None


def open_exchange(
    timeout: timedelta | None = None,
    *,
    backend: str | None = None,
    staged_for: StreamedDevice | None = None,
) -> ExchangeGroup:
    """Open a new exchange over all ranks of the default group; collective.

    `backend` is the name of what moves the data (None: the default group's, or the default group itself if it
    has this one). `timeout` is how long a collective waits for its ranks (None: torch's default); what goes
    over the default group waits as that does. `staged_for` has the meaning that it has in `ExchangeGroup`.
    """
    transport = dist.group.WORLD
    if backend not in (None, dist.get_backend()):
        transport = dist.new_group(timeout=timeout, backend=backend)
    assert transport is not None
    group = _open_over(transport, range(dist.get_world_size()), timeout, Traffic(), staged_for)
    assert group is not None
    _await_connections()
    return group


class OwnCollectiveError(Exception):
    """A model or its loss calls torch.distributed while one rank alone computes it."""


@contextmanager
def no_collectives() -> Iterator[None]:
    """Make every operation that this rank starts in a process group raise OwnCollectiveError.

    With one rank operations are left as they are, because they wait for nobody.
    """
    if dist.get_world_size() == 1:
        yield
        return

    def refuse(*_: object, **__: object) -> None:
        raise OwnCollectiveError

    group = dist.ProcessGroup
    # Every function of torch.distributed calls a method of the group, whatever name a model imported it by.
    operations = {name: vars(group)[name] for name in _OPERATIONS if name in vars(group)}
    try:
        for name in operations:
            setattr(group, name, refuse)
        yield
    finally:
        for name, call in operations.items():
            setattr(group, name, call)


_OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall", "alltoall_base"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("send", "recv", "recv_anysource", "monitored_barrier"),
)
"""Methods of a group that exchange something, by the names of any torch that is supported."""


def _await_connections() -> None:
    """Wait until every rank has opened its groups; collective over the default group, where there is one.

    Gloo connects while a group is opened, and torch lets the rank that is done first go on. If it fails at
    once, as all do for a refused cell, it closes its connections, and a rank that still connects would report
    that instead of the failure.
    """
    if dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:
        dist.barrier()
