"""Gloo for tensors of a device: they go through host memory.

NCCL refuses two ranks on one device. Over this, ranks that share a GPU run all that ranks on several GPUs do,
with the streams and events of the device; what they measure is emulated.

An operation copies what it sends to pinned host memory, on the current stream. When the stream has come
there, a thread issues the operation of Gloo, and another waits for its end and copies the result back on a
separate stream. The work's future knows the device, so that whoever waits for it makes the current stream
wait for the copy. One thread issues all operations of a group, in the order of the calls: Gloo matches
operations by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from strategies.devices import Stream, StreamedDevice

UNDER_WAY = 64
"""Operations that may wait for their end at once: a pipeline has several sends and receives under way."""
Call = Callable[[list[Tensor], list[Tensor]], dist.Work]


class _StagedWork(dist.Work):
    """An operation under way. It is written in Python, because a wait in C++ does not raise the error of a
    Python future."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for the result. Raises the error of the operation."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[Any]:
        return self._future


class StagedGroup:
    """The calls of a process group that an `ExchangeGroup` makes, for tensors of one device."""

    def __init__(self, gloo: Any, device: StreamedDevice) -> None:
        self._gloo = gloo
        self._device = device
        self._issuing = ThreadPoolExecutor(1, "staged-issue")
        self._ending = ThreadPoolExecutor(UNDER_WAY, "staged-end")

    @cached_property
    def _back(self) -> Stream:
        """The stream that copies results to the device, made at its first use: groups may stay unused."""
        return self._device.new_stream()

    def close(self) -> None:
        """End the threads, after the last operation."""
        self._issuing.shutdown()
        self._ending.shutdown()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._in_place(self._gloo.allreduce, tensors, options)

    def reduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._in_place(self._gloo.reduce, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._in_place(self._gloo.broadcast, tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:
        return self._stage(inputs, outputs[0], lambda sent, there: self._gloo.allgather([there], sent))

    def _allgather_base(self, output: Tensor, values: Tensor, options: Any = None) -> dist.Work:
        gather = self._gloo._allgather_base
        return self._stage(
            [values], [output], lambda sent, there: gather(there[0].view(-1), sent[0].view(-1))
        )

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, options: Any = None) -> dist.Work:
        scatter, averages = self._gloo._reduce_scatter_base, _summed(options)
        given = () if options is None else (options,)
        return self._stage(
            [values],
            [output],
            lambda sent, there: scatter(there[0].view(-1), sent[0].view(-1), *given),
            averages=averages,
        )

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(self, output: Tensor, values: Tensor, *splits: Any) -> dist.Work:
        exchange = self._gloo.alltoall_base
        return self._stage([values], [output], lambda sent, there: exchange(there[0], sent[0], *splits))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self._stage(tensors, [], lambda sent, there: self._gloo.send(sent, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._stage([], tensors, lambda sent, there: self._gloo.recv(there, source, tag))

    def _in_place(self, collective: Any, tensors: list[Tensor], options: Any) -> dist.Work:
        averages = _summed(options)
        given = () if options is None else (options,)
        return self._stage(tensors, tensors, lambda sent, there: collective(there, *given), averages=averages)

    def _stage(
        self, sends: Sequence[Tensor], receives: Sequence[Tensor], call: Call, *, averages: bool = False
    ) -> dist.Work:
        """Queue `call(sent, received)`: the tensors to send, and the tensors to receive into, both in host
        memory."""
        device = self._device
        sent = [device.begin_copy_to_host(tensor.detach()) for tensor in sends]
        there = sent if receives is sends else [device.room_on_host(tensor) for tensor in receives]
        copied = device.current_stream().record_event()
        future, back = device.future(), self._back

        def end(work: dist.Work) -> None:
            try:
                work.wait()
                self._land(receives, there, back, averages)
                # The stream of the copies is the current one here, because the future makes others wait for
                # that.
                with device.on_stream(back):
                    future.set_result(list(receives or sends))
            except Exception as error:
                # This is the outermost frame of the thread: whoever waits for the work raises the error.
                future.set_exception(error)

        def issue() -> None:
            try:
                copied.synchronize()
                self._ending.submit(end, call(sent, there))
            except Exception as error:
                # This is the outermost frame of the thread, too.
                future.set_exception(error)

        self._issuing.submit(issue)
        return _StagedWork(future)

    def _land(
        self, receives: Sequence[Tensor], there: Sequence[Tensor], back: Stream, averages: bool
    ) -> None:
        """Copy received values to the device.

        All that was queued before the operation is done by now: nothing else of the caller's reads or writes
        these tensors until it has waited.
        """
        with self._device.on_stream(back):
            for tensor, come in zip(receives, there, strict=True):
                if averages:
                    come /= self._gloo.size()
                tensor.detach().copy_(come, non_blocking=True)


def _summed(options: Any) -> bool:
    """Return whether an average was asked for. Gloo has no average: in the options a sum replaces it."""
    operation = getattr(options, "reduceOp", None)
    if operation is None or operation != dist.ReduceOp.AVG:
        return False
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return True
