"""Shards in host memory, and their copies from and to a device, concurrently with its computation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Work

from strategies.devices import Event, StreamedDevice, device_of
from strategies.exchange.lane import Pending


class HostShards:
    """The copies of one model's shards. On CPU shards are in host memory anyway, and need no copies.

    Copies have a separate stream, so that computation does not wait for them. A rank writes to its shards in
    host memory only after `settle`.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is the device of the gathered parameters."""
        on = device_of(device)
        self._device = on if isinstance(on, StreamedDevice) else None
        self._stream = None if self._device is None else self._device.new_stream()

    def take(self, values: Tensor) -> Tensor:
        """Begin to copy `values` from the device to host memory, where they may be read after `settle`."""
        if self._device is None or self._stream is None:
            return values
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            copy = self._device.begin_copy_to_host(values)
        self._device.keep_memory(values, self._stream)
        return copy

    def hand_over(self, shard: Tensor, like: Tensor, call: Callable[[Tensor], Work]) -> Pending:
        """Copy `shard` to the device, in the data type of `like`, and begin the operation `call` with the
        copy."""
        if self._device is None or self._stream is None:
            return call(shard.to(like))
        # The memory belongs to the computing stream, which reuses it after the operation.
        own = like.new_empty(shard.shape)
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            own.copy_(shard, non_blocking=True)
            work = call(own)
            begun = self._stream.record_event()
        self._device.keep_memory(own, self._stream)
        return _Begun(self._device, work, begun)

    def settle(self) -> None:
        """Make the host wait for all copies."""
        if self._stream is not None:
            self._stream.record_event().synchronize()


class _Begun:
    """An operation that another stream has begun."""

    def __init__(self, device: StreamedDevice, work: Work, begun: Event) -> None:
        self._device, self._work, self._begun = device, work, begun

    def wait(self) -> None:
        self._work.wait()
        # With the exchange switched off the operation was a copy on that stream, and no transfer.
        self._device.current_stream().wait_event(self._begun)
