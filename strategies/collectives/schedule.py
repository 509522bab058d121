"""Our own collectives: the schedule of each rank's sends and receives, and the wire that executes it.

Only its schedules decide what a collective does (Hoefler, Lumsdaine & Rehm 2007, Implementation and
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
"""Number of receives that are posted in advance. Gloo sends a chunk at once if its receive is posted; else it
announces the chunk, and sends it after the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send the present values of a part to a rank."""

    part: slice
    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive the values of a part from a rank, and add them to the present ones or overwrite these."""

    part: slice
    source: int
    adds: bool


Schedule = Sequence[Send | Receive]


def chunks(start: int, stop: int, length: int) -> list[slice]:
    """Cut `start` to `stop` into parts of `length`, the last one shorter; no part if they are equal."""
    return [slice(begin, min(begin + length, stop)) for begin in range(start, stop, length)]


class ScheduledWire(ABC):
    """A `Wire` whose sums follow a schedule of point-to-point messages.

    The schedules of all ranks match: a rank receives from another in the order in which that one sends.
    A rank has sent a part before it receives the part's final values, which were computed from what it sent:
    the receive may be posted while that send is still under way.
    """

    def __init__(self, link: Link, *, chunk_bytes: int) -> None:
        """`chunk_bytes` are sent at once, or one element if it is longer."""
        self._link = link
        self.rank, self.size = link.rank, link.size
        self._chunk_bytes = chunk_bytes
        self._scratch: dict[torch.dtype, Tensor] = {}

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
        """Gather the (n,) values of every rank into (size, n) values, one row per rank.

        Raises NotImplementedError if no schedule gathers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no all-gather")

    def all_to_all(self, values: Tensor) -> Tensor:
        """(size, n) to (size, n). Raises NotImplementedError where no schedule does it."""
        raise NotImplementedError(f"{type(self).__name__} has no all-to-all")

    def chunk_of(self, values: Tensor) -> int:
        """Elements of `values` in a chunk."""
        return max(1, self._chunk_bytes // values.element_size())

    def carry_out(self, schedule: Schedule, values: Tensor) -> None:
        """Carry out `schedule` on `values`, 1-D and contiguous; return when all of it is done.

        The next chunks arrive while one is added.
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
        """Post the next receive of `schedule` at each iteration; yield its work and the tensor that it
        fills."""
        slots = cycle(self._slots(values))
        for step in schedule:
            if isinstance(step, Receive):
                place = values[step.part]
                target = next(slots)[: place.numel()] if step.adds else place
                yield self._link.receive(target, step.source), target

    def _slots(self, values: Tensor) -> Sequence[Tensor]:
        """Return the buffers for received chunks that are to be added: (AHEAD, chunk).

        They are reused, as fresh memory costs page faults. In a switched-off exchange they hold the chunks of
        the last step: its sums have no meaning, and are undone.
        """
        held = self._scratch.get(values.dtype)
        if held is None:
            held = self._scratch[values.dtype] = values.new_zeros(AHEAD, self.chunk_of(values))
        return held.unbind()
