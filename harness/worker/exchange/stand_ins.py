"""While the exchange is off, a rank computes with its own values and with the last messages that it received.

They fill every place that the exchange would fill. Else a place would hold what its memory was last used for,
such as NaN, or zeros, which a GPU at its power limit multiplies faster. The copies are queued on the stream
on which the operation is called, so that whoever waits for the operation waits for them. Their time is
measured, because steps with the exchange do without them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from strategies.devices import DeviceKind, Moment, device_of


class StandIns:
    """Holds the messages that a rank computes with while the exchange is off, and the times of copies.

    The k-th message of a shape from a rank in a period is used as the k-th in each period without exchange.
    """

    def __init__(self) -> None:
        self._keeps = self._timed = False
        self._room_bytes = math.inf
        self._messages: defaultdict[tuple[object, int, torch.Size], deque[Tensor]] = defaultdict(deque)
        self._copies: list[tuple[DeviceKind, Moment, Moment]] = []

    def keep_messages(self, room_bytes: float = math.inf) -> None:
        """Keep what is received from now on, which must be a complete period.

        Nothing is copied: a message stays in the memory that it came into, which nobody else gets meanwhile.
        When the kept messages fill `room_bytes`, no second message of a shape is added, and the kept ones are
        used again and again.
        """
        self._keeps, self._room_bytes = True, room_bytes

    def forget(self) -> None:
        """Keep no further message, and free the memory of those that were kept."""
        self._keeps = False
        self._messages.clear()

    def received(self, group: object, source: int, tensors: list[Tensor]) -> None:
        """Note what a group receives from a rank, while the exchange is on."""
        for tensor in tensors if self._keeps else ():
            messages = self._messages[group, source, tensor.shape]
            if self._room_bytes > 0 or not messages:
                self._room_bytes -= tensor.nbytes
                messages.append(tensor.detach())

    def receive(self, group: object, source: int, tensors: list[Tensor]) -> None:
        """Give `tensors` the message that the rank sent at this place of the kept period."""
        for tensor in tensors:
            # A stage's input requires gradients.
            place = tensor.detach()
            messages = self._messages[group, source, place.shape]
            if not messages:
                place.zero_()
            elif messages[0].data_ptr() != place.data_ptr():
                # From version 2.15 on torch receives each message of a pipeline in new memory.
                with self._copying(place):
                    place.copy_(messages[0])
            messages.rotate(-1)

    def fill(self, place: Tensor, values: Tensor) -> None:
        """Fill `place` with `values`, again and again."""
        with self._copying(place):
            place, own = place.detach(), values.detach().reshape(-1)
            if not len(own):
                place.zero_()
                return
            # A copy where the places are not next to one another in memory.
            flat = place.reshape(-1)
            times, rest = divmod(len(flat), len(own))
            flat[: len(flat) - rest].view(times, len(own)).copy_(own.expand(times, -1))
            if rest:
                flat[-rest:].copy_(own[:rest])
            if flat.data_ptr() != place.data_ptr():
                place.copy_(flat.view(place.shape))

    def time_copies(self) -> None:
        """Time the copies from now on; `copies_ns` ends it."""
        self._timed = True

    def copies_ns(self) -> int:
        """Return the time of the timed copies, which the device has done."""
        took_ns = sum(device.elapsed_ns(first, last) for device, first, last in self._copies)
        self._timed = False
        self._copies.clear()
        return took_ns

    @contextmanager
    def _copying(self, place: Tensor) -> Iterator[None]:
        if not self._timed:
            yield
            return
        device = device_of(place.device)
        first = device.moment()
        yield
        self._copies.append((device, first, device.moment()))
