"""While the exchange is off, a rank computes with its own values and with the last messages that it received.

They fill every place that the exchange would fill. Else a place would hold what its memory was last used for,
such as NaN, or zeros, which a GPU at its power limit multiplies faster. The copies are queued on the stream
on which the operation is called, so that whoever waits for the operation waits for them. Their time is
measured, because steps with the exchange do without them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from strategies.devices import DeviceKind, Moment, device_of


class StandIns:
    """Holds the messages that a rank computes with while the exchange is off, and the times of copies.

    The k-th message from a rank in a period is used as the k-th message in each period without exchange.
    """

    def __init__(self) -> None:
        self._keeps = self._timed = False
        self._messages: defaultdict[tuple[object, int], deque[Tensor]] = defaultdict(deque)
        self._copies: list[tuple[DeviceKind, Moment, Moment]] = []

    def keep_messages(self) -> None:
        """Keep what is received from now on, which must be a complete period.

        Nothing is copied: a message stays in the memory that it came into, which nobody else gets meanwhile.
        """
        self._keeps = True

    def forget(self) -> None:
        """Keep no further message, and free the memory of those that were kept."""
        self._keeps = False
        self._messages.clear()

    def received(self, group: object, source: int, tensors: list[Tensor]) -> None:
        """Note what a group receives from a rank, while the exchange is on."""
        if self._keeps:
            self._messages[group, source].extend(tensor.detach() for tensor in tensors)

    def receive(self, group: object, source: int, tensors: list[Tensor]) -> None:
        """Give `tensors` the message that the rank sent at this place of the kept period."""
        messages = self._messages[group, source]
        for tensor in tensors:
            # A stage's input requires gradients.
            place = tensor.detach()
            message = messages[0] if messages else None
            messages.rotate(-1)
            if message is None or message.shape != place.shape:
                place.zero_()
            elif message.data_ptr() != place.data_ptr():
                # From version 2.15 on torch receives each message of a pipeline in new memory.
                with self._copying(place):
                    place.copy_(message)

    def fill(self, place: Tensor, values: Tensor) -> None:
        """Fill `place` with `values`, again and again."""
        flat, own = place.detach().view(-1), values.detach().view(-1)
        times, rest = divmod(len(flat), max(1, len(own)))
        with self._copying(flat):
            if not len(own):
                flat.zero_()
                return
            flat[: len(flat) - rest].view(times, -1).copy_(own.expand(times, -1))
            if rest:
                flat[-rest:].copy_(own[:rest])

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
