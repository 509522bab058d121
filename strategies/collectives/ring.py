"""`ring`: every rank sends to the next one and receives from the one before.

A sum is a reduce-scatter and an all-gather around the ring, 2 (p - 1) / p of the vector sent by each rank,
which no algorithm undercuts (Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of
workstations, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from results.spec import Spec
from strategies.collectives.facts import CHUNK_MB, CollectiveFacts
from strategies.collectives.route import Flat, Route
from strategies.collectives.schedule import Receive, Schedule, ScheduledWire, Send, chunks

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.link import Link


class RingFacts(CollectiveFacts):
    """Point-to-point messages between CPU ranks."""

    name = "ring"
    help = "ours: reduce-scatter and all-gather around a ring of point-to-point sends"
    options = MappingProxyType({"chunk_mb": CHUNK_MB})
    sends = True
    route = "strategies.collectives.ring:route"
    implements = frozenset(("all-reduce", "all-gather"))
    on_cuda = "--collective default with NCCL_ALGO=Ring"


class Ring(ScheduledWire):
    """Sums and gathers around the ring of ranks; for any number of ranks and values.

    A segment is summed in one order around the ring, starting at the rank of its number, and the sum is then
    passed around: all ranks end with the same bits.
    """

    def sum_schedule(self, numel: int, chunk: int) -> Schedule:
        bounds = [numel * rank // self.size for rank in range(self.size + 1)]
        # The first time round the ranks add, the second time they pass the sums on.
        adds = [True] * (self.size - 1) + [False] * (self.size - 1)
        return _rounds(self.rank, bounds, chunk, adds)

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather the (n,) values of every rank into (size, n) values, one row per rank, in rank order."""
        # All rows are set, not only this rank's: a switched-off exchange may leave them as they are.
        rows = values.repeat(self.size, 1)
        bounds = [values.numel() * rank for rank in range(self.size + 1)]
        schedule = _rounds(self.rank, bounds, self.chunk_of(values), [False] * (self.size - 1))
        self.carry_out(schedule, rows.view(-1))
        return rows


def _rounds(rank: int, bounds: Sequence[int], chunk: int, adds: Sequence[bool]) -> Schedule:
    """Return the steps of a rank: send its segment, then forward each segment that it receives, but the last.

    Segment s is `bounds[s]` to `bounds[s + 1]`, one a rank. `adds` has for each received segment whether it
    is added to the present values.
    """
    size = len(bounds) - 1

    def segment(index: int) -> list[slice]:
        return chunks(bounds[index % size], bounds[index % size + 1], chunk)

    after, before = (rank + 1) % size, (rank - 1) % size
    steps: list[Send | Receive] = []
    if adds:
        steps += [Send(part=part, to=after) for part in segment(rank)]
    for back, added in enumerate(adds, start=1):
        for part in segment(rank - back):
            steps.append(Receive(part=part, source=before, adds=added))
            if back < len(adds):
                steps.append(Send(part=part, to=after))
    return steps


def route(spec: Spec, link: Link, node_size: int) -> Route:
    """All ranks at once."""
    return Flat(Ring(link, chunk_bytes=int(spec.number("chunk_mb") * 2**20)))
