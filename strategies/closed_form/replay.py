"""Replays one training step of a rank: its computation, and the operations that overlap with it.

A step is data. Its computation is a line of `Work.compute_s` seconds: the passes of each micro-batch, then
the update. An operation has two places on that line: where it can begin (`ready_s`), and where computation
stops until it has ended (`needed_s`). Records and closed forms (`operations_of`) state the same places.

Operations of one group begin in their order, and at most `at_once` of them run together: 1 of an NCCL
communicator, 2 of a group of Gloo. Operations that run together share the network: of k each advances at a
k-th of its rate. Operations do not slow computation down.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import islice
from math import ceil, inf
from statistics import fmean
from typing import Literal

from results.groups import Dimension, GroupLayout
from strategies.closed_form.terms import Collective, Overlap, Term, wire_factor

Passes = Literal["forward", "backward", "compute"]
MOST_PIECES = 128
"""Operations of one term that are replayed one by one; of more, neighbours are joined."""
AT_ONCE = {"nccl": 1, "gloo": 2}
"""Operations of one group that a backend runs together."""
_DONE_S = 1e-12
"""Seconds of an operation that are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Computation of one step of one rank without any exchange, in seconds."""

    forward_s: float
    """All forward passes."""
    backward_s: float
    """All backward passes, with what activation checkpointing repeats."""
    update_s: float = 0.0
    micro_batches: int = 1

    @property
    def passes_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def compute_s(self) -> float:
        return self.passes_s + self.update_s

    def place(self, passes: Passes, share: float, micro_batch: int) -> float:
        """Return the computation before a share of a micro-batch's pass."""
        forward, backward = self.forward_s / self.micro_batches, self.backward_s / self.micro_batches
        begin = micro_batch * (forward + backward)
        if passes == "compute":
            return begin + share * (forward + backward)
        return begin + (share * forward if passes == "forward" else forward + share * backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a step, or `count` equal ones in a row."""

    collective: Collective
    payload_bytes: float
    """Bytes of the buffer that this rank hands over in one operation, as in `Term`."""
    ranks: int
    """Ranks of the group."""
    nodes: int = 1
    """Nodes that the group lies on."""
    dimension: Dimension = "replicate"
    """The group: operations of one group wait for each other."""
    rivals: int = 1
    """Groups of this dimension that cross the way out of the same node at the same time."""
    ready_s: float
    """Computation after which it can begin."""
    needed_s: float
    """Computation that continues only after its end; equal to `ready_s`: it blocks."""
    count: float = 1.0
    """Occurrences in a step: a fraction if not every step has this operation."""

    @property
    def blocks(self) -> bool:
        return self.ready_s >= self.needed_s

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends in one operation."""
        return wire_factor(self.collective, self.ranks) * self.payload_bytes


Seconds = Callable[[Operation], float]
"""Returns the seconds of one operation while no other runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step in seconds: computation + exposed + waits."""

    compute_s: float
    """Computation of the mean rank."""
    exposed_s: float
    """Communication that computation waits for, if all ranks are alike."""
    waits_s: float
    """The time that a step takes longer because its slowest rank is slower than the mean rank."""
    exchange: Mapping[Dimension, tuple[float, float]]
    """Seconds of the messages along each dimension while nothing else is sent, and the part of `exposed_s` in
    which computation waits for these messages."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.waits_s


def replay(
    work: Work,
    operations: Sequence[Operation],
    seconds: Seconds,
    *,
    at_once: int = 1,
    delays_s: Sequence[float] = (),
) -> ReplayedStep:
    """Replay a step of the mean rank, and of slowest ranks.

    `delays_s` is a sample of the time that the slowest rank of a step computes longer than the mean rank.
    All ranks wait for the slowest rank in its operations, so that its
    step is the step of all; its delay is spread over its computation. Without delays all ranks are alike.
    """
    times = [each.count * seconds(each) for each in operations]
    alike, waited = _wall_s(work.compute_s, operations, times, at_once, 1.0)
    slowest, sent = alike, dict.fromkeys((each.dimension for each in operations), 0.0)
    for each, seconds_of_it in zip(operations, times, strict=True):
        sent[each.dimension] += seconds_of_it
    if delays_s and work.compute_s:
        stretched = [max(0.0, 1.0 + delay / work.compute_s) for delay in delays_s]
        walls = (_wall_s(work.compute_s, operations, times, at_once, factor)[0] for factor in stretched)
        slowest = fmean(walls)
    return ReplayedStep(
        compute_s=work.compute_s,
        exposed_s=alike - work.compute_s,
        waits_s=max(0.0, slowest - alike),
        exchange={dimension: (busy, waited.get(dimension, 0.0)) for dimension, busy in sent.items()},
    )


def _wall_s(
    compute_s: float, operations: Sequence[Operation], times: Sequence[float], at_once: int, factor: float
) -> tuple[float, Mapping[Dimension, float]]:
    """Return the end of a step whose computation takes `factor` times as long, event by event, and the
    seconds for which computation waits for the operations of each dimension.

    `times` are the seconds of each operation while no other runs.
    """
    waited: dict[Dimension, float] = defaultdict(float)
    end = factor * compute_s
    line = _Line(operations, times, at_once, end, factor)
    now = computed = 0.0
    while line.to_come or line.deadlines or computed < end:
        line.begin(computed)
        running = line.running()
        goal = min(end, line.next_event())
        # Computation stands still where an operation is needed.
        ahead = max(0.0, goal - computed)
        first = min((line.left[index] for index in running), default=inf) * len(running)
        passed = min(ahead, first) if ahead and running else ahead or first
        now += passed
        if ahead:
            computed = goal if passed == ahead else computed + passed
        else:
            waited[operations[line.deadlines[0][1]].dimension] += passed
        line.advance(running, passed)
    return now, waited


class _Line:
    """The operations of a step whose computation ends at `end`, each by its index."""

    def __init__(
        self,
        operations: Sequence[Operation],
        times: Sequence[float],
        at_once: int,
        end: float,
        factor: float,
    ) -> None:
        self._operations, self._at_once = operations, at_once
        self._ready = [min(end, factor * each.ready_s) for each in operations]
        self._needed = [min(end, factor * max(each.ready_s, each.needed_s)) for each in operations]
        self.left = [*times, 0.0]
        """Seconds that each operation still takes; then 0.0, for a `_blocking` of -1: none blocks."""
        self.to_come = sorted(range(len(times)), key=self._ready.__getitem__)[::-1]
        """Operations that have not begun, the next one at the end."""
        self.deadlines: list[tuple[float, int]] = []
        """A heap of the operations under way, by the place where computation needs them."""
        self._blocking = -1
        self._queues: dict[Dimension, deque[int]] = defaultdict(deque)

    def begin(self, computed: float) -> None:
        """Begin what can begin; a thread that waits for an operation begins no other."""
        while self.to_come and self._ready[self.to_come[-1]] <= computed and self._waits_for_none():
            index = self.to_come.pop()
            if self._operations[index].blocks:
                self._blocking = index
            self._queues[self._operations[index].dimension].append(index)
            heappush(self.deadlines, (self._needed[index], index))

    def _waits_for_none(self) -> bool:
        return self.left[self._blocking] <= _DONE_S

    def running(self) -> list[int]:
        return [index for queue in self._queues.values() for index in islice(queue, self._at_once)]

    def next_event(self) -> float:
        """Return the place on the computation where the next operation can begin, or one is needed."""
        begins = self._ready[self.to_come[-1]] if self.to_come else inf
        return min(begins, self.deadlines[0][0] if self.deadlines else inf)

    def advance(self, running: Sequence[int], passed: float) -> None:
        """Let `passed` seconds go by for operations that share the network."""
        for index in running:
            self.left[index] -= passed / len(running)
            if self.left[index] <= _DONE_S:
                self._queues[self._operations[index].dimension].remove(index)
        while self.deadlines and self.left[self.deadlines[0][1]] <= _DONE_S:
            heappop(self.deadlines)


def operations_of(terms: Iterable[Term], work: Work, groups: GroupLayout, node_size: int) -> list[Operation]:
    """Place the messages of a step on its computation.

    A message that overlaps with nothing blocks. A sum begins when its gradients are ready, and must
    have ended when all passes are over. A gathering begins when the pass that needs the previous gathering
    begins, and must have ended when its own pass begins.
    """
    found: list[Operation] = []
    for term in terms:
        nodes, rivals = span(groups, term.dimension, node_size)
        like = Operation(
            collective=term.collective,
            payload_bytes=term.payload_bytes / (term.operations or 1),
            ranks=term.ranks,
            nodes=nodes,
            dimension=term.dimension,
            rivals=rivals,
            ready_s=work.compute_s,
            needed_s=work.compute_s,
            count=term.operations,
        )
        if term.overlap != "none":
            found += _beside(term, work, like)
        elif term.pieces:
            sizes = Counter(piece.payload_bytes for piece in term.pieces)
            each = term.operations / len(term.pieces)
            found += [replace(like, payload_bytes=size, count=each * many) for size, many in sizes.items()]
        else:
            found.append(like)
    return found


@cache
def span(groups: GroupLayout, dimension: Dimension, node_size: int) -> tuple[int, int]:
    """Return the largest number of nodes of a group of this dimension, and of such groups that leave one
    node."""
    nodes, leaving = 1, Counter[int]()
    for ranks in groups.peers(dimension):
        there = {rank // node_size for rank in ranks}
        nodes = max(nodes, len(there))
        if len(there) > 1:
            leaving.update(there)
    return nodes, max(leaving.values(), default=1)


_ROUNDS: Mapping[Overlap, tuple[Passes, slice]] = {
    "first forward": ("forward", slice(0, 1)),
    "forward": ("forward", slice(None)),
    "last backward": ("backward", slice(-1, None)),
    "backward": ("backward", slice(None)),
    "compute": ("compute", slice(None)),
}


def _beside(term: Term, work: Work, like: Operation) -> Iterator[Operation]:
    """Yield the operations of a term that overlaps with computation, in their order."""
    passes, which = _ROUNDS[term.overlap]
    rounds = range(work.micro_batches)[which]
    gathers = term.collective == "all-gather"
    before = None
    for micro_batch in rounds:
        for payload, count, share in _pieces(term, len(rounds), gathers):
            place = work.place(passes, share, micro_batch)
            if gathers:
                ready, needed = place if before is None else before, place
                before = place
            else:
                ready, needed = place, work.passes_s
            yield replace(like, payload_bytes=payload, count=count, ready_s=ready, needed_s=needed)


def _pieces(term: Term, rounds: int, gathers: bool) -> Iterator[tuple[float, float, float]]:
    """Yield payload, count and share of the operations of one round; of too many, neighbours as one."""
    each = term.operations / rounds
    most = max(1, MOST_PIECES // rounds)
    if not term.pieces:
        number = min(most, ceil(each))
        for index in range(number):
            share = (index if gathers else index + 1) / number
            yield term.payload_bytes / term.operations, each / number, share
        return
    size = ceil(len(term.pieces) / most)
    for begin in range(0, len(term.pieces), size):
        joined = term.pieces[begin : begin + size]
        share = joined[0 if gathers else -1].share
        yield fmean(piece.payload_bytes for piece in joined), len(joined), share
