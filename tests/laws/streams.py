"""A device with streams that is simulated on CPU tensors, and a process group that answers as NCCL does.

For ranks of tests: `simulated_device()` replaces the CPU by the device, and `open_nccl_like()` is an exchange
over the group. What a call queues is computed at once, but a transfer lands in its tensors only when
somebody touches them who was made to wait for it. A touch that no wait orders behind the transfer, or behind
what another stream has written, raises `UnorderedError`: on a GPU it would be a race that some runs show.

Order is kept by vector clocks (Lamport 1978; Fidge 1988): each stream counts what is queued in it, and knows
how far it has waited for every other one, as torch's own CUDA sanitizer does it (torch/cuda/_sanitizer.py).
Accesses are taken from the calls of torch's dispatcher, by storage and range of bytes.

What the group holds its callers to, as ProcessGroupNCCL of torch 2.11 to 2.13 does:

- A synchronous call (`asyncOp` False) returns no work: it runs in the order of the current stream.
- `wait()` makes the current stream wait, and returns at once. `is_completed()` must not be asked.
- Futures are completed on another thread, and a callback runs on a stream that waits for the transfer.
- Collectives of a group run one after another, on one stream, and are numbered; sends and receives between
  two ranks likewise, unnumbered and on a stream of their pair, and a send ends when the other rank receives.
- Tensors are contiguous, dense, of a type that NCCL has, and on the device.
- A group is destroyed by all ranks, once each of its transfers has been waited for.

Not simulated: memory that the allocator gives to another stream while the first one still uses it.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, partialmethod
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from harness.worker.exchange.group import ExchangeGroup, open_exchange
from strategies.devices import KINDS, Host, MemoryFigures, StreamedDevice

BACKEND = "nccl_like"
TRANSFER_S = 20.0
"""How long a transfer may take: two ranks that wait for each other's receive would wait for ever."""
TYPES = frozenset(
    (
        *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
)
"""The data types that NCCL moves (`ncclDataType` of torch's NCCLUtils)."""


DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
"""torch computes both on the CPU, and distinguishes them in Python."""
FACTORIES = (
    *("tensor", "as_tensor", "frombuffer", "zeros", "ones", "empty", "full", "rand", "randn", "randint"),
    *("randperm", "arange", "linspace", "eye"),
)
READERS = "numpy", "tolist", "__array__"
"""Methods that read without a kernel."""
_FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"


class UnorderedError(AssertionError):
    """A touch that no wait orders behind what it depends on."""


class NcclError(AssertionError):
    """A call that NCCL does not take."""


class Stream:
    """A queue, and how far it has waited for others: `known` has of each stream how much of it is done."""

    def __init__(self, name: str = "a stream of torch's", priority: int = 0) -> None:
        # torch makes streams of its own kind with a priority for the only argument.
        self.name = name if isinstance(name, str) else "a stream of torch's"
        self.queued = 0
        self.known: dict[Stream, int] = {}
        self.late: list[Transfer] = []
        """Transfers that this stream waits for and that may not have ended."""
        if SIMULATION is not None:
            SIMULATION.streams.add(self)

    def queue(self) -> int:
        self.queued += 1
        return self.queued

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event | None) -> None:
        if event is None:
            return
        for stream, count in event.known.items():
            if stream is not self:
                self.known[stream] = max(count, self.known.get(stream, 0))
        self.late += [transfer for transfer in event.late if transfer not in self.late]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits until what is queued by now is done: all that it queues from then on comes later."""
        event = self.record_event()
        event.synchronize()
        self.late.clear()


class Event:
    """A place in a stream."""

    def __init__(self, **_: object) -> None:
        self.known: dict[Stream, int] = {}
        self.late: list[Transfer] = []
        self.recorded_ns = 0

    def record(self, stream: Stream | None = None) -> Event:
        stream = stream or SIMULATION.current
        stream.late[:] = [transfer for transfer in stream.late if not transfer.ended.is_set()]
        self.known = {**stream.known, stream: stream.queued}
        self.late = list(stream.late)
        self.recorded_ns = time.perf_counter_ns()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or SIMULATION.current).wait_event(self)

    def synchronize(self) -> None:
        for transfer in self.late:
            transfer.ended.wait(TRANSFER_S)
        for stream, count in self.known.items():
            SIMULATION.over[stream] = max(count, SIMULATION.over.get(stream, 0))

    @property
    def at_ns(self) -> int:
        """When the stream has come here, which it has."""
        assert all(transfer.ended.is_set() for transfer in self.late), "the device has not come here"
        return max([self.recorded_ns, *(transfer.ended_ns for transfer in self.late)])


@dataclass(slots=True, kw_only=True)
class Access:
    """An access to bytes of a storage by work queued in a stream."""

    first: int
    end: int
    stream: Stream
    place: int
    writes: bool
    what: str
    transfer: Transfer | None = None
    handed_over: Event | None = None
    """A future of the device: who takes the values from it has waited for this event."""

    def meets(self, other: Access) -> bool:
        return self.first < other.end and other.first < self.end and (self.writes or other.writes)

    def within(self, other: Access) -> bool:
        return other.first <= self.first and self.end <= other.end


class Simulation:
    """All streams of a rank, and who has touched which memory."""

    def __init__(self) -> None:
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.default = Stream("the current stream")
        self.streams.add(self.default)
        self._here = threading.local()
        self._lock = threading.RLock()
        self._accesses: dict[int, tuple[StorageWeakRef, list[Access]]] = {}
        self._host: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self._counted = 0
        """The sum of `_sizes`, which may hold storages that are gone."""
        self.peak = 0
        self._kept = 4096
        self.over: dict[Stream, int] = {}
        """How much of each stream the host has waited for."""
        self.transfers: list[Transfer] = []
        self.errors: list[str] = []

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self._here.stream = stream or before
        try:
            yield
        finally:
            self._here.stream = before

    def touch(self, tensor: Tensor, stream: Stream, **access: Any) -> None:
        """Raises UnorderedError for an `Access` that nothing orders."""
        if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        first, end = span(tensor)
        own = Access(first=first, end=end, stream=stream, **access)
        with self._lock:
            if storage._cdata not in self._accesses and not self.on_host(tensor):
                self._count(storage)
            known, others = self._accesses.setdefault(storage._cdata, (StorageWeakRef(storage), []))
            if known.expired():
                self._count(storage)
                others = []
                self._accesses[storage._cdata] = StorageWeakRef(storage), others
            for other in list(others):
                if other.meets(own):
                    self._require_order(other, own, tensor)
            others[:] = [
                other
                for other in others
                if not (_follows(own, other) and other.within(own) and (own.writes or not other.writes))
            ]
            others.append(own)
            self._forget()

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a storage that is touched for the first time."""
        _, replaced = self._sizes.pop(storage._cdata, (None, 0))
        self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._counted += storage.nbytes() - replaced
        self._take_off(down_to=self.peak)
        self.peak = max(self.peak, self._counted)

    def allocated(self) -> int:
        """Bytes of the storages on the device that are there."""
        self._take_off(down_to=0)
        return self._counted

    def _take_off(self, *, down_to: int) -> None:
        """Take storages that are gone off the count until it is at most `down_to`: the latest first, as most
        storages live for a short time."""
        gone = []
        for key, (storage, size) in reversed(self._sizes.items()):
            if self._counted <= down_to:
                break
            if storage.expired():
                self._counted -= size
                gone.append(key)
        for key in gone:
            del self._sizes[key]

    def _require_order(self, other: Access, own: Access, tensor: Tensor) -> None:
        # torch's reducer waits for futures in C++, before it reads their buckets.
        if other.transfer is not None and other.transfer.awaited_by_torch:
            own.stream.wait_event(other.transfer.done)
        elif other.handed_over is not None and own.stream is self.default:
            own.stream.wait_event(other.handed_over)
        if not _follows(own, other):
            error = (
                f"{own.what} on {own.stream.name} touches {tuple(tensor.shape)} before {other.what} on "
                f"{other.stream.name} is done: nothing makes it wait"
            )
            self.errors.append(error)
            raise UnorderedError(error)
        if other.transfer is not None:
            other.transfer.land()

    def _forget(self) -> None:
        """Storages that are gone."""
        if len(self._accesses) > 2 * self._kept:
            for key in [key for key, (storage, _) in self._accesses.items() if storage.expired()]:
                del self._accesses[key]
            for key in [key for key, storage in self._host.items() if storage.expired()]:
                del self._host[key]
            self._kept = max(4096, len(self._accesses))

    def on_host(self, tensor: Tensor) -> bool:
        """Whether it lies in the host's memory."""
        if tensor.layout is not torch.strided:
            return False
        known = self._host.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def put_on_host(self, result: Any) -> Any:
        """Remember that what a call made lies in the host's memory."""
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            self._host[storage._cdata] = StorageWeakRef(storage)
        return result

    def take_from_host(self, tensor: Tensor) -> Tensor:
        """Remember that it lies on the device."""
        self._host.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def handed_over(self, values: object, event: Event) -> None:
        """Who gets `values` by a future of the device waits for `event`: torch does so in C++."""
        with self._lock:
            for tensor in _tensors(values):
                known = self._accesses.get(tensor.untyped_storage()._cdata)
                for access in known[1] if known else ():
                    if event.known.get(access.stream, 0) >= access.place:
                        access.handed_over = event


def _follows(own: Access, other: Access) -> bool:
    known = max(own.stream.known.get(other.stream, 0), SIMULATION.over.get(other.stream, 0))
    return other.stream is own.stream or known >= other.place


def span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that it lies in."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * tensor.itemsize
    return first, first + (last + 1) * tensor.itemsize


SIMULATION: Any = None
"""The device of this rank, while `simulated_device` is open."""


class Watch(TorchDispatchMode):
    """Tells the simulation of all that torch computes on this thread, and on those that autograd starts."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            # A DTensor calls for its local tensors next; what is fake has no memory.
            fake = any(issubclass(kind, FakeTensor) for kind in types)
            return func(*args, **kwargs) if fake else NotImplemented
        if func.namespace in ("c10d", "_c10d_functional", "profiler") or func.is_view:
            return func(*args, **kwargs)
        stream, what = SIMULATION.current, str(func)
        place = stream.queue()
        tensors = list(_arguments(func, args, kwargs))
        for tensor, writes in tensors:
            SIMULATION.touch(tensor, stream, writes=writes, what=what, place=place)
        _require_one_memory(what, [tensor for tensor, _ in tensors])
        if what == "aten._local_scalar_dense.default":
            stream.synchronize()
        result = func(*args, **kwargs)
        # A number goes where the others are.
        places = [tensor for tensor, _ in tensors if tensor.dim()] or [tensor for tensor, _ in tensors]
        if places and all(SIMULATION.on_host(tensor) for tensor in places):
            SIMULATION.put_on_host(result)
        elif "empty" not in what:
            given = {id(tensor.untyped_storage()) for tensor, _ in tensors if tensor.layout is torch.strided}
            for tensor in _tensors(result):
                if id(tensor.untyped_storage()) not in given:
                    SIMULATION.touch(tensor, stream, writes=True, what=what, place=place)
        return result


@cache
def _written(func: Any) -> dict[str, bool]:
    """Whether an operator writes to its argument, by name. Torch makes a schema anew each time it is read."""
    return {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    }


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator is given, and whether it writes to them."""
    declared = _written(func)
    given = [*zip(declared.values(), args, strict=False)]
    given += [(declared[name], value) for name, value in kwargs.items()]
    for writes, value in given:
        if isinstance(value, Tensor):
            yield value, writes
        elif isinstance(value, list | tuple):
            yield from ((tensor, writes) for tensor in value if isinstance(tensor, Tensor))


def _tensors(values: Any) -> list[Tensor]:
    """The tensors that have separate memory."""
    leaves = [values] if isinstance(values, Tensor) else tree_leaves(values)
    return [value for value in leaves if isinstance(value, Tensor) and value.layout is torch.strided]


def _require_one_memory(what: str, tensors: Sequence[Tensor]) -> None:
    """Kernels of a device require this; a copy, an index and a number may lie elsewhere."""
    if what.startswith(("aten.copy_", "aten._to_copy", "aten.index")):
        return
    places = {SIMULATION.on_host(tensor) for tensor in tensors if tensor.dim()}
    if len(places) > 1:
        shapes = [(tuple(tensor.shape), SIMULATION.on_host(tensor)) for tensor in tensors]
        raise NcclError(f"{what} of tensors of the device and of the host: {shapes}")


def _placing() -> Iterator[Any]:
    """Yield patches of torch that distinguish the device's memory, `cpu:0` in Python, from the host's, `cpu`.

    A tensor made without a device is on the host, and a tensor made by C++ is where its inputs are. No mode
    for torch's functions, as that does not reach the hooks of a backward pass.
    """
    for name in FACTORIES:
        yield patch.object(torch, name, partial(_made, getattr(torch, name)))
    for name in READERS:
        yield patch.object(Tensor, name, _reading(name, getattr(Tensor, name)))
    move, place = Tensor.to, Tensor.device

    def to(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        wanted = [*arguments, *named.values()]
        places = [torch.device(given) == HOST for given in wanted if isinstance(given, torch.device | str)]
        places += [SIMULATION.on_host(given) for given in wanted if isinstance(given, Tensor)]
        return _moved(tensor, places, partial(move, tensor, *arguments, **named))

    def cpu(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return _moved(tensor, [True], partial(move, tensor, "cpu", *arguments, **named))

    def device(tensor: Tensor) -> torch.device:
        real: torch.device = place.__get__(tensor)
        return DEVICE if real == HOST and not SIMULATION.on_host(tensor) else real

    yield patch.object(Tensor, "to", to)
    yield patch.object(Tensor, "cpu", cpu)
    yield patch.object(Tensor, "device", property(device))


def _made(make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    result = make(*arguments, **named)
    of_others = any(isinstance(given, Tensor) for given in arguments)
    if not of_others and named.get("device") in (None, "cpu", HOST):
        SIMULATION.put_on_host(result)
    return result


def _reading(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        _read(tensor, name)
        return read(tensor, *arguments, **named)

    return wrapped


def _read(tensor: Tensor, what: str) -> None:
    """The host waits for the current stream."""
    if not SIMULATION.on_host(tensor):
        stream = SIMULATION.current
        SIMULATION.touch(tensor, stream, writes=False, what=what, place=stream.queue())
        stream.synchronize()


def _moved(tensor: Tensor, places: Sequence[bool], move: Callable[[], Tensor]) -> Tensor:
    """The result of `move` to where the first of `places` says: whether it is the host's memory."""
    if not places or type(tensor) not in (Tensor, torch.nn.Parameter):
        return move()
    there, here = places[0], SIMULATION.on_host(tensor)
    if there and not here:
        _read(tensor, "a copy to the host")
    result = move()
    if there == here:
        return result
    result = result.clone() if result is tensor else result
    return cast(Tensor, SIMULATION.put_on_host(result) if there else SIMULATION.take_from_host(result))


class Transfer:
    """An operation under way on a stream of the group. It works on copies, and lands when it is waited
    for."""

    def __init__(self, name: str, stream: Stream) -> None:
        self.name, self.stream = name, stream
        self.landing: list[tuple[Tensor, Tensor]] = []
        """Tensors, and copies of them that Gloo works on."""
        self.ended, self.ended_ns = threading.Event(), 0
        self.failure: Exception | None = None
        self.done = Event()
        """The moment at which the stream has done it."""
        self.awaited_by_torch = False
        self.waited = False

    def run(self, operation: Callable[[], Any]) -> None:
        """On a thread of the group."""
        try:
            operation().wait(timedelta(seconds=TRANSFER_S))
        except Exception as error:
            # The border of the thread: who lands it raises.
            self.failure = error
        self.ended_ns = time.perf_counter_ns()
        self.ended.set()

    def land(self) -> None:
        """Put what has come where it belongs."""
        if not self.ended.wait(2 * TRANSFER_S) or self.failure is not None:
            raise NcclError(f"{self.name} on {self.stream.name} did not end: {self.failure}")
        landing, self.landing = self.landing, []
        with torch._C._DisableTorchDispatch():
            for there, arrived in landing:
                if there.untyped_storage().nbytes() >= span(there)[1]:
                    there.copy_(arrived)
                elif not self.waited:
                    raise UnorderedError(f"memory was given back before {self.name} was done with it")


class StreamFuture(Future):
    """A future of a device: it is set when the values are queued, and who waits has his stream wait for
    theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._event = Event()

    def set_result(self, result: Any) -> None:
        self._event.record()
        SIMULATION.handed_over(result, self._event)
        super().set_result(result)

    def wait(self) -> Any:
        value = super().wait()
        SIMULATION.current.wait_event(self._event)
        return value

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """On a stream that waits for the values, whether it is called later or at once."""

        def run(_: Any) -> None:
            stream = Stream("a callback")
            stream.wait_event(self._event)
            with ExitStack() as stack:
                stack.enter_context(SIMULATION.on(stream))
                if _get_current_dispatch_mode() is None:
                    stack.enter_context(Watch())
                callback(self)

        super().add_done_callback(run)

    def then(self, callback: Callable[[Any], Any]) -> StreamFuture:
        """A future of the device too, as the callback's values are."""
        following = StreamFuture()

        def run(future: Any) -> None:
            try:
                following.set_result(callback(future))
            except Exception as error:
                # The border of the callback: who waits raises it.
                following.set_exception(error)

        self.add_done_callback(run)
        return following


class _OfTransfer(StreamFuture):
    """The future of a work, which a separate thread completes."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._event = transfer.done

    def finish(self, result: Any) -> None:
        Future.set_result(self, result)


class Work(dist.Work):
    """The work of an asynchronous call."""

    def __init__(self, transfer: Transfer, future: _OfTransfer) -> None:
        super().__init__()
        self._transfer, self._future = transfer, future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._transfer.waited = True
        SIMULATION.current.wait_event(self._transfer.done)
        return True

    def is_completed(self) -> bool:
        raise NcclError(
            "is_completed() says of a transfer on a device whether it has begun, not that it is done"
        )

    def get_future(self) -> Future[Any]:
        self._transfer.waited = True
        if sys._getframe(1).f_code.co_name == "_engine_run_backward":
            self._transfer.awaited_by_torch = True
        return self._future


class NcclLike(dist.ProcessGroup):
    """Moves tensors by a separate Gloo group, and takes and gives what NCCL does."""

    open: ClassVar[weakref.WeakSet[NcclLike]] = weakref.WeakSet()

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo, self._rank, self._size = gloo, rank, size
        self._queues: dict[str, tuple[Stream, ThreadPoolExecutor]] = {}
        self._pending: list[Transfer] = []
        self._numbered = 0
        NcclLike.open.add(self)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    _device_types = (torch.device("cpu"),)

    def _get_backend(self, device: torch.device) -> NcclLike:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._numbered

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names.get(self, ""))

    def shutdown(self) -> None:
        """Called by torch as it destroys the group."""
        for transfer in self._pending:
            if not transfer.waited:
                raise NcclError(f"the group was destroyed while {transfer.name} was under way")
            transfer.land()
        self._pending.clear()
        for _, thread in self._queues.values():
            thread.shutdown()
        self._queues.clear()
        self._gloo = None
        NcclLike.open.discard(self)

    def _queue(self, name: str) -> tuple[Stream, ThreadPoolExecutor]:
        if name not in self._queues:
            self._queues[name] = Stream(f"NCCL's stream of {name}"), ThreadPoolExecutor(1)
        return self._queues[name]

    def _issue(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        call: Callable[[list[Tensor], list[Tensor]], Any],
        *,
        queue: str = "collectives",
        options: Any = None,
    ) -> dist.Work | None:
        """Queue `call(copies of reads, copies of writes)`, which returns the work of Gloo."""
        if self._gloo is None:
            raise NcclError(f"{name} on a group that was destroyed")
        for tensor in (*reads, *writes):
            _require_ours(name, tensor)
        stream, thread = self._queue(queue)
        self._numbered += queue == "collectives"
        current = SIMULATION.current
        stream.wait_stream(current)
        place = stream.queue()
        copies: dict[tuple[int, int], Tensor] = {}
        given: list[list[Tensor]] = [[], []]
        transfer = Transfer(name, stream)
        for written, tensors in enumerate((reads, writes)):
            for tensor in tensors:
                own = transfer if written else None
                SIMULATION.touch(tensor, stream, writes=bool(written), what=name, place=place, transfer=own)
                key = tensor.data_ptr(), tensor.nbytes
                if key not in copies:
                    with torch._C._DisableTorchDispatch():
                        copies[key] = tensor.detach().clone()
                given[written].append(copies[key])
                if written:
                    transfer.landing.append((tensor.data, copies[key]))
        SIMULATION.transfers.append(transfer)
        transfer.done.known, transfer.done.late = {**stream.known, stream: place}, [transfer]
        stream.late.append(transfer)
        future = _OfTransfer(transfer)
        self._pending = [other for other in self._pending if other.landing or not other.waited]
        self._pending.append(transfer)
        thread.submit(transfer.run, partial(call, *given))
        # Each on a thread of its own: a callback may issue an operation, and wait for its future.
        values = list(writes or reads)
        threading.Thread(target=future.finish, args=(values,), daemon=True).start()
        if options is not None and not options.asyncOp:
            transfer.waited = True
            current.wait_event(transfer.done)
            return None
        return Work(transfer, future)

    def _in_place(self, tensors: list[Tensor], options: Any = None, *, name: str) -> dist.Work | None:
        _require_one(name, tensors)
        collective, more = getattr(self._gloo, name), () if options is None else (options,)
        return self._issue(
            name, tensors, tensors, lambda _, writes: collective(writes, *more), options=options
        )

    allreduce = partialmethod(_in_place, name="allreduce")
    reduce = partialmethod(_in_place, name="reduce")
    broadcast = partialmethod(_in_place, name="broadcast")

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> dist.Work | None:
        _require_one("allgather", inputs)
        gather = self._gloo.allgather
        return self._issue(
            "allgather", inputs, outputs[0], lambda reads, writes: gather([writes], reads), options=options
        )

    def _allgather_base(self, output: Tensor, values: Tensor, options: Any = None) -> dist.Work | None:
        if output.numel() != self._size * values.numel() or output.dtype != values.dtype:
            raise NcclError("_allgather_base: the output must hold the values of all ranks")
        gather = self._gloo._allgather_base

        def call(reads: list[Tensor], writes: list[Tensor]) -> Any:
            return gather(writes[0].view(-1), reads[0].view(-1))

        return self._issue("_allgather_base", [values], [output], call, options=options)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, options: Any = None) -> dist.Work | None:
        if values.numel() != self._size * output.numel() or output.dtype != values.dtype:
            raise NcclError("_reduce_scatter_base: the values must have a part for each rank")
        gloo, operation, size = self._gloo, dist.ReduceOp.SUM, self._size
        if options is not None:
            operation = getattr(options.reduceOp, "op", options.reduceOp)

        def call(reads: list[Tensor], writes: list[Tensor]) -> Any:
            received = torch.empty_like(reads[0].view(-1))
            work = gloo.alltoall_base(received, reads[0].view(-1), [], [])
            work.wait()
            rows = received.view(size, -1)
            total = rows.sum(0) if operation != dist.ReduceOp.MAX else rows.amax(0)
            writes[0].view(-1).copy_(total / size if operation == dist.ReduceOp.AVG else total)
            return work

        return self._issue("_reduce_scatter_base", [values], [output], call, options=options)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: Tensor, values: Tensor, *splits: list[int], options: Any = None
    ) -> dist.Work | None:
        exchange = self._gloo.alltoall_base
        if splits and not isinstance(splits[-1], list):
            *splits, options = splits

        def call(reads: list[Tensor], writes: list[Tensor]) -> Any:
            return exchange(writes[0], reads[0], *splits)

        return self._issue("alltoall_base", [values], [output], call, options=options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work | None:
        _require_one("send", tensors)
        send = self._gloo.send
        return self._issue("send", tensors, [], lambda reads, _: send(reads, to, tag), queue=self._pair(to))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work | None:
        _require_one("recv", tensors)
        receive, queue = self._gloo.recv, self._pair(source)
        return self._issue("recv", [], tensors, lambda _, writes: receive(writes, source, tag), queue=queue)

    def _pair(self, other: int) -> str:
        return f"ranks {min(self._rank, other)} and {max(self._rank, other)}"


def _require_one(name: str, tensors: list[Tensor]) -> None:
    if len(tensors) != 1:
        raise NcclError(f"{name} takes one tensor, and got {len(tensors)}")


def _require_ours(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise NcclError(f"{name}: tensors must be contiguous and dense")
    if SIMULATION.on_host(tensor):
        raise NcclError(f"{name}: {tuple(tensor.shape)} lies in the host's memory")
    if tensor.dtype not in TYPES:
        raise NcclError(f"{name}: NCCL has no {tensor.dtype}")


class SimulatedDevice(StreamedDevice, Host):
    """In the place of the CPU."""

    kind = "cuda"
    clock = "cuda-event"

    def synchronize(self) -> None:
        for stream in list(SIMULATION.streams):
            stream.synchronize()

    def begin_copy_to_host(self, values: Tensor) -> Tensor:
        return self.room_on_host(values).copy_(values, non_blocking=True)

    def room_on_host(self, values: Tensor) -> Tensor:
        return cast(Tensor, SIMULATION.put_on_host(torch.empty_like(values, device="cpu")))

    def moment(self) -> Event:
        return SIMULATION.current.record_event()

    def elapsed_ns(self, first: Event, second: Event) -> int:
        return second.at_ns - first.at_ns

    def future(self) -> Future[Any]:
        return StreamFuture()

    def memory(self) -> MemoryFigures:
        now, peak = SIMULATION.allocated(), SIMULATION.peak
        return MemoryFigures(
            allocated=now, allocated_peak=peak, reserved=now, reserved_peak=peak, free=2**26, total=2**30
        )

    def reset_memory_peaks(self) -> None:
        SIMULATION.peak = SIMULATION.allocated()

    def new_stream(self) -> Any:
        return Stream("a lane")

    def current_stream(self) -> Any:
        return SIMULATION.current

    def on_stream(self, stream: Any) -> Any:
        return SIMULATION.on(stream)

    def keep_memory(self, values: Tensor, stream: Any) -> None:
        """No memory is given to others."""


@contextmanager
def simulated_device() -> Iterator[Simulation]:
    """The CPU is a device with streams meanwhile, for torch's FSDP too."""
    global SIMULATION
    SIMULATION = Simulation()
    patches = (
        patch.dict(KINDS, cpu=SimulatedDevice),
        patch("torch.cpu.Stream", Stream),
        patch("torch.cpu.Event", Event),
        patch("torch.cpu.stream", SIMULATION.on),
        patch("torch.cpu.current_stream", lambda device=None: SIMULATION.current),
        # torch's FSDP computes on the device that it makes of the mesh's.
        patch(f"{_FSDP}._get_device_from_mesh", lambda mesh: DEVICE),
    )
    try:
        with ExitStack() as stack:
            for one in (*patches, *_placing(), Watch()):
                stack.enter_context(one)
            yield SIMULATION
    finally:
        SIMULATION = None


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> NcclLike:
    return NcclLike(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def open_nccl_like() -> ExchangeGroup:
    """An exchange over such a group; collective."""
    # It compiles code of torch as it is imported, which the patches of `_placing` would be in the way of.
    importlib.import_module("torch.distributed.optim")
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    return open_exchange(timedelta(seconds=TRANSFER_S), backend=BACKEND)
