"""Collectives of our own: each rank's sends and receives in order, and what carries them out.

What a collective does is decided by its schedules alone (Hoefler, Lumsdaine & Rehm 2007, Implementation and
performance analysis of non-blocking collective operations for MPI). They are plain data, so that they can
be counted and replayed without a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Work

    from strategies.collectives.link import Link

AHEAD = 8
"""Receives that wait for their data at any time. A chunk that is expected goes into the socket at once; Gloo
announces one that is not, and sends it when the answer has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """The values of a part, as they are then, to a rank."""

    part: slice
    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """The values of a part from a rank: added to what is there, or in its place."""

    part: slice
    source: int
    adds: bool


Schedule = Sequence[Send | Receive]


def chunks(start: int, stop: int, length: int) -> list[slice]:
    """`start` to `stop` in parts of `length`, of which the last may be shorter; no part if they are equal."""
    return [slice(begin, min(begin + length, stop)) for begin in range(start, stop, length)]


class ScheduledWire(ABC):
    """A `Wire` whose sums go by a schedule of point-to-point sends.

    Schedules of all ranks fit together: what one sends to another, the other receives in the same order.
    A part that is overwritten by what arrives has been sent before by this rank, and what arrives was
    made from it: its receive may be begun while that send is still under way.
    """

    def __init__(self, link: Link, *, chunk_bytes: int) -> None:
        """`chunk_bytes` are sent at once, or one element if it is longer."""
        self._link = link
        self._chunk_bytes = chunk_bytes
        self._scratch: dict[torch.dtype, Tensor] = {}

    @property
    def rank(self) -> int:
        return self._link.rank

    @property
    def size(self) -> int:
        return self._link.size

    @abstractmethod
    def sum_schedule(self, numel: int, chunk: int) -> Schedule:
        """Return the steps of this rank in an `all_reduce` of `numel` values, `chunk` at a time."""

    def all_reduce(self, values: Tensor) -> None:
        """Sum (n,) over the ranks, in place; the same bits on all of them."""
        self.carry_out(self.sum_schedule(values.numel(), self.chunk_of(values)), values)

    def largest(self, values: Tensor) -> None:
        """Each element's maximum over the ranks, in place, by the backend: it is for a few numbers."""
        self._link.largest(values)

    def all_gather(self, values: Tensor) -> Tensor:
        """(n,) of every rank as (size, n). Raises NotImplementedError where no schedule does it."""
        raise NotImplementedError(f"{type(self).__name__} has no all-gather")

    def all_to_all(self, values: Tensor) -> Tensor:
        """(size, n) to (size, n). Raises NotImplementedError where no schedule does it."""
        raise NotImplementedError(f"{type(self).__name__} has no all-to-all")

    def chunk_of(self, values: Tensor) -> int:
        """Elements of `values` in a chunk."""
        return max(1, self._chunk_bytes // values.element_size())

    def carry_out(self, schedule: Schedule, values: Tensor) -> None:
        """Carry out `schedule` on `values`, 1-D and contiguous; return when all of it is done.

        While a chunk is added the next ones arrive.
        """
        receives = self._receives(schedule, values)
        expected = deque(islice(receives, AHEAD))
        sent = []
        for step in schedule:
            if isinstance(step, Send):
                sent.append(self._link.send(values[step.part], step.to))
                continue
            under_way, arrived = expected.popleft()
            under_way.wait()
            if step.adds:
                values[step.part].add_(arrived)
            expected.extend(islice(receives, 1))
        for under_way in sent:
            under_way.wait()

    def _receives(self, schedule: Schedule, values: Tensor) -> Iterator[tuple[Work, Tensor]]:
        """Begin the receives of `schedule`, each when it is asked for: its work, and what it fills."""
        slots = cycle(self._slots(values))
        for step in schedule:
            if isinstance(step, Receive):
                place = values[step.part]
                target = next(slots)[: place.numel()] if step.adds else place
                yield self._link.receive(target, step.source), target

    def _slots(self, values: Tensor) -> Sequence[Tensor]:
        """The buffers in which chunks wait to be added: (AHEAD, chunk).

        Kept from call to call, as fresh memory costs page faults. Zero at first, as an exchange that is
        switched off leaves what it would receive as it was: sums are then of no meaning, and undone.
        """
        held = self._scratch.get(values.dtype)
        if held is None:
            held = self._scratch[values.dtype] = values.new_zeros(AHEAD, self.chunk_of(values))
        return held.unbind()
