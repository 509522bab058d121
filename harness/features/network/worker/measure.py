"""Measure the network: collectives over groups of ranks, with nothing else running (`bench network`).

Each sample is the mean of operations in a row, as in nccl-tests, so that the start of an operation hides
behind the one before, as it does in a step. Samples of all groups and sizes take turns, so that a disturbance
falls on all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from harness.features.network.order import NetworkOrder, measured_groups
from harness.worker.rank.context import Run
from harness.worker.rank.network import read_transports
from results.network import Collective, NetworkTimes
from results.plan import read_values
from strategies.collectives.link import Link
from strategies.devices import device_of

SMALLEST_BYTES = 64 * 2**10
LARGEST_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""The largest array, where time and memory allow it."""
GROWTH = 4
MEMORY_SHARE = 0.1
"""Share of the free memory that each of the two buffers of a rank may take."""
LONGEST_NS = 0.5e9
"""No operation is measured that would take longer than about this."""
SAMPLE_NS = 5e6
"""A sample has operations for about this time, at most `MOST_IN_A_ROW`."""
MOST_IN_A_ROW = 100
FEWEST_ROUNDS, MOST_ROUNDS = 6, 30
"""Samples of each case: six give an interval, and more follow while the budget lasts."""
_VALUE_BYTES = 4


@dataclass(kw_only=True)
class _Case:
    """One collective of one size over one group."""

    times: NetworkTimes
    link: Link
    call: Callable[[], None] | None
    """One operation; None on ranks that are not in the group."""
    in_a_row: int = 1


def measure_network(run: Run, values: Mapping[str, Any]) -> None:
    """Measure every group of the launch, and add this rank's times to the run's record; collective."""
    around, order = run.around, read_values(values, NetworkOrder)
    run.begin("build")
    around.exchange.reset()
    run.begin("measure")
    run.found["network"] = _Rounds(run, order).measure()
    if around.launch.backend == "nccl":
        own = [] if around.network_log is None else read_transports(around.network_log)
        run.transports = around.control.union(own)


class _Rounds:
    """The cases of one run, and the buffers that they share."""

    def __init__(self, run: Run, order: NetworkOrder) -> None:
        self._run, self._order = run, order
        self._control, self._device = run.around.control, run.around.device
        [negated] = self._control.largest([-self._room()])
        self._largest = int(-negated)
        # A group of p ranks needs up to p - 1 more values.
        values = self._largest // _VALUE_BYTES + run.around.rank.gpus
        self._sent, self._received = (torch.zeros(values, device=self._device) for _ in range(2))
        self._one = torch.zeros(1, device=self._device)

    def _room(self) -> float:
        """Bytes of the largest array that this rank has memory for."""
        figures, rank = device_of(self._device).memory(), self._run.around.rank
        free = psutil.virtual_memory().available / rank.local_gpus if figures is None else figures.free
        asked = self._order.largest_bytes or LARGEST_BYTES[self._run.around.launch.device]
        return min(float(asked), MEMORY_SHARE * free)

    def measure(self) -> list[NetworkTimes]:
        """The times of this rank; collective."""
        cases = list(self._cases())
        began, budget_s = time.monotonic(), self._run.cell.steps.budget_s
        for number in range(MOST_ROUNDS):
            for case in cases if number % 2 == 0 else reversed(cases):
                case.times.duration_ns.append(self._time_ns(case))
            over = self._control.from_first(float(time.monotonic() - began > budget_s))
            if over and number + 1 >= FEWEST_ROUNDS:
                break
        return [case.times for case in cases if case.call is not None]

    def _cases(self) -> Iterator[_Case]:
        """Every collective over every group, of growing size until one would take too long; collective."""
        around = self._run.around
        placement, everyone = around.launch.placement, range(around.rank.gpus)
        for members, nodes in measured_groups(placement.nodes, placement.gpus_per_node):
            others = [rank for rank in everyone if rank not in members]
            link = Link(around.exchange.split_into([members, others] if others else [members]))
            for collective in self._order.collectives:
                if collective == "send" and len(members) > 2:
                    continue
                array_bytes = min(SMALLEST_BYTES, self._largest)
                while array_bytes <= self._largest:
                    case = self._case(collective, link, (members, nodes), array_bytes)
                    # The first operation connects.
                    took_ns = [self._control.largest([self._time_ns(case)])[0] for _ in range(2)][-1]
                    case.in_a_row = max(1, min(MOST_IN_A_ROW, math.ceil(SAMPLE_NS / max(1.0, took_ns))))
                    yield case
                    if GROWTH * took_ns > LONGEST_NS:
                        break
                    array_bytes *= GROWTH

    def _case(
        self, collective: Collective, link: Link, group: tuple[tuple[int, ...], int], array_bytes: int
    ) -> _Case:
        members, nodes = group
        ranks = len(members)
        shard = max(1, array_bytes // _VALUE_BYTES // ranks)
        payload = shard if collective == "all-gather" else shard * ranks
        return _Case(
            times=NetworkTimes(
                collective=collective, payload_bytes=_VALUE_BYTES * payload, ranks=ranks, nodes=nodes
            ),
            link=link,
            call=self._call(collective, link, shard) if self._run.around.rank.rank in members else None,
        )

    def _call(self, collective: Collective, link: Link, shard: int) -> Callable[[], None]:
        """One operation on an array of `shard` values a rank."""
        whole = shard * link.size
        sent, received = self._sent[:whole], self._received[:whole]

        def pass_on() -> None:
            (link.receive(received, 0) if link.rank else link.send(sent, 1)).wait()

        calls: dict[Collective, Callable[[], None]] = {
            "all-reduce": lambda: link.all_reduce(sent),
            "all-gather": lambda: _wait(link.start_all_gather(received, sent[:shard])),
            "reduce-scatter": lambda: _wait(link.start_reduce_scatter(received[:shard], sent)),
            "all-to-all": lambda: _wait(link.start_all_to_all(received, sent)),
            "broadcast": lambda: link.broadcast(sent, 0),
            "send": pass_on,
        }
        return calls[collective]

    def _time_ns(self, case: _Case) -> float:
        """Mean time of the operations of a sample on this rank; 0 on ranks outside of the group.

        All ranks call it, and those outside wait for the next sample.
        """
        self._control.barrier()
        self._run.around.log.heartbeat()
        if case.call is None:
            return 0.0
        # Ranks leave the barrier some 0.1 ms apart.
        case.link.all_reduce(self._one)
        self._control.synchronize()
        began = time.perf_counter_ns()
        for _ in range(case.in_a_row):
            case.call()
        self._control.synchronize()
        return (time.perf_counter_ns() - began) / case.in_a_row


def _wait(work: torch.distributed.Work) -> None:
    work.wait()
