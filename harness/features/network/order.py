"""The order of `bench network`, and how a campaign carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from harness.launch.conduct import Conduct
from harness.plan.estimate import LaunchTime
from harness.plan.schedule import PlannedLaunch
from reports.text import count, devices, duration
from results.network import Collective
from results.plan import Order, read_values
from results.store import Study


class NetworkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a launch to measure collectives instead of steps."""

    collectives: tuple[Collective, ...] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
    largest_bytes: int | None = None
    """The largest array; None: what time and memory allow."""

    @property
    def stored(self) -> Order:
        """The order as plans and launches store it."""
        return Order.of("network", self)


def measured_groups(nodes: int, per_node: int) -> list[tuple[tuple[int, ...], int]]:
    """The groups of ranks that are measured on `nodes` of `per_node` ranks each, and the nodes of each.

    Inside a node these are all sizes up to 8, then powers of two: the time of 3 ranks does not follow from
    the times of 2 and 4. Across nodes they are 2, 3, then powers of two and all of them, with one rank and
    with all ranks of each.
    """
    inside = [(tuple(range(size)), 1) for size in _sizes(per_node, dense=8)]
    counts = _sizes(nodes, dense=3)
    alone = [(tuple(range(0, on * per_node, per_node)), on) for on in counts]
    full = [(tuple(range(on * per_node)), on) for on in counts if per_node > 1]
    return [*inside, *alone, *full]


def _sizes(most: int, *, dense: int) -> list[int]:
    powers = {1 << bit for bit in range(1, most.bit_length())}
    return sorted({*range(2, min(most, dense) + 1), *powers, most} - {0, 1})


class NetworkConduct(Conduct):
    """Measures the network once a run, for the budget of its cell."""

    def header(self, study: Study, left: int) -> list[str]:
        assert self.plan.order is not None
        request, order = self.plan.request, read_values(self.plan.order.values, NetworkOrder)
        total = len(self.plan.cells) * request.repeats
        return [
            f"study {self.plan.study} in {study.root}",
            f"{', '.join(order.collectives)} over groups of up to "
            f"{devices(max(request.gpus), request.device)}, {request.backend}, for "
            f"{duration(request.steps.budget_s * 1e9)} or six samples of each; {left} of "
            f"{count(total, 'run')} to do",
        ]

    def times(self, launches: Sequence[PlannedLaunch], likely: Sequence[LaunchTime]) -> Sequence[LaunchTime]:
        each = (tuple((cell.id, {"measure": cell.steps.budget_s}) for cell in one.cells) for one in launches)
        return [LaunchTime(sum(parts["measure"] for _, parts in runs), 0.0, runs) for runs in each]

    def names(self, names: Mapping[str, str]) -> Mapping[str, str]:
        return dict.fromkeys(names, "network")
