"""Which nodes are slow or wrong: pure functions over what the ranks of a preflight have found.

A figure is slow below a share of the median over all nodes. The bandwidth of a node is the bandwidth of its
best pair: a partner that is slow does not make it slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec

from reports.text import percent, si
from results.grouping import grouped
from results.network import busbw_factor
from results.record import RankRecord
from results.schema import Schema

PREFLIGHT_FILE = "preflight.json"
UNITS = {"products": "FLOP/s", "free memory": "B"}
"""The units of figures that are not bytes a second."""


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces over some nodes, as one rank saw them."""

    over: str
    """The backend that moved them."""
    nodes: tuple[int, ...]
    ranks: int
    payload_bytes: int
    duration_ns: list[int]


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one rank."""

    products: list[float]
    """FLOP/s of its device in each slice, in their order."""
    free_bytes: int
    """Memory that was free before any work: of the GPU, or of the host."""
    faults: list[str] = []
    reduced: list[Reduced] = []


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The scheduler's name; without a scheduler, the host's."""
    host: str
    figures: dict[str, float]
    """Its lowest figures by name, such as `products`, in the unit of `UNITS`."""
    faults: tuple[str, ...] = ()
    """Why it is slow or wrong, clauses; empty: nothing was found."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one preflight."""

    measured_at: str
    slow_below: float
    nodes: tuple[NodeVerdict, ...]
    notes: tuple[str, ...] = ()
    """Sentences on findings of more than one node."""

    @property
    def named(self) -> tuple[NodeVerdict, ...]:
        """The nodes that are slow or wrong."""
        return tuple(node for node in self.nodes if node.faults)


# Version 1 is unreleased.
PREFLIGHT = Schema("preflight", 1, Verdict, advice="repeat the preflight: bench doctor --nodes N")
_Rates = Mapping[tuple[str, tuple[int, ...]], float]
"""Bus bandwidths by what moves the data and over which nodes."""


def judge(records: Sequence[RankRecord], names: Sequence[str], slow_below: float) -> Verdict:
    """Judge nodes by the records of all ranks of one run. `names` has the name of each node, in order."""
    found = [msgspec.convert(record.measured, Examined) for record in records]
    rates = _bandwidths(found)
    rows = [*_of_devices(records, found), *_of_nodes(rates)]
    faults = grouped([*_told(records, found), *_slow(rows, slow_below), *_unlike(records)])
    lowest = {(node, name): value for name, node, _, value in sorted(rows, key=lambda row: -row[3])}
    hosts = {record.node_rank: record.environment.host for record in records}
    kinds = dict.fromkeys(row[0] for row in rows)
    general = (text for record in records for text in record.warnings if not text.startswith("rank "))
    nodes = [
        NodeVerdict(
            name=name,
            host=hosts[node],
            figures={kind: lowest[node, kind] for kind in kinds if (node, kind) in lowest},
            faults=tuple(dict.fromkeys(faults.get(node, ()))),
        )
        for node, name in enumerate(names)
    ]
    return Verdict(
        measured_at=max(record.ended_at for record in records),
        slow_below=slow_below,
        nodes=tuple(nodes),
        notes=(
            *_notes(rates, names, faults, slow_below),
            # A busy machine makes nodes look slow that are not.
            *(f"Repeat this before you exclude a node: {text}." for text in dict.fromkeys(general)),
        ),
    )


def _told(records: Sequence[RankRecord], found: Sequence[Examined]) -> Iterator[tuple[int, str]]:
    """Yield the faults that devices report, with those during the run."""
    for record, one in zip(records, found, strict=True):
        during = [text for text in record.warnings if text.startswith(f"rank {record.rank}: ")]
        yield from ((record.node_rank, text) for text in (*one.faults, *during))


_Row = tuple[str, int, str, float]
"""A figure: its name, the node, the device in words (empty: the node as a whole), and the value."""


def _of_devices(records: Sequence[RankRecord], found: Sequence[Examined]) -> Iterator[_Row]:
    for record, one in zip(records, found, strict=True):
        node, where = record.node_rank, f"device {record.local_rank}: "
        # The later half is of a hot device.
        yield "products", node, where, median(one.products[len(one.products) // 2 :])
        yield "free memory", node, where, one.free_bytes


def _bandwidths(found: Sequence[Examined]) -> _Rates:
    """An all-reduce lasts as long as on its slowest rank; of several the median counts."""
    rates = {}
    for key, rows in grouped(((row.over, row.nodes), row) for one in found for row in one.reduced).items():
        slowest_ns = median(map(max, zip(*(row.duration_ns for row in rows), strict=True)))
        rates[key] = busbw_factor("all-reduce", rows[0].ranks) * rows[0].payload_bytes * 1e9 / slowest_ns
    return rates


def _of_nodes(rates: _Rates) -> Iterator[_Row]:
    best: dict[tuple[str, int], float] = {}
    for (over, nodes), rate in rates.items():
        for node in nodes if len(nodes) < 3 else ():
            name = "all-reduce inside" if len(nodes) == 1 else f"all-reduce with another over {over}"
            best[name, node] = max(rate, best.get((name, node), 0.0))
    return ((name, node, "", rate) for (name, node), rate in best.items())


def _slow(rows: Sequence[_Row], slow_below: float) -> Iterator[tuple[int, str]]:
    middles = {name: median(own) for name, own in grouped((row[0], row[3]) for row in rows).items()}
    for name, node, where, value in rows:
        if value < slow_below * middles[name]:
            share = percent(value / middles[name])
            yield node, f"{where}{name} {si(value, UNITS.get(name, 'B/s'))}, {share} of the median"


def _unlike(records: Sequence[RankRecord]) -> Iterator[tuple[int, str]]:
    """The nodes whose versions or hardware differ from what more than half of the nodes have."""
    firsts = {record.node_rank: record.environment for record in records if record.local_rank == 0}
    machines = {node: {"os": one.os, **one.machine()} for node, one in sorted(firsts.items())}
    for fact in machines[0]:
        values = {node: str(machine.get(fact)) for node, machine in machines.items()}
        usual, nodes = Counter(values.values()).most_common(1)[0]
        for node, value in values.items():
            if value != usual and 2 * nodes > len(values):
                yield node, f"{fact.replace('_', ' ')} is {value}, elsewhere {usual}"


def _notes(
    rates: _Rates, names: Sequence[str], faults: Mapping[int, object], slow_below: float
) -> Iterator[str]:
    """Say what all nodes reach together, and which pairs are slow though both of their nodes are fine."""
    for (over, nodes), rate in rates.items():
        every = [other for (by, pair), other in rates.items() if by == over and len(pair) == 2]
        said = f"{' and '.join(names[node] for node in nodes)} together: {si(rate, 'B/s')} over {over}"
        if len(nodes) > 2:
            yield f"An all-reduce over all nodes has {si(rate, 'B/s')} over {over}."
        elif len(nodes) == 2 and rate < slow_below * median(every) and not faults.keys() & set(nodes):
            yield f"{said}, {percent(rate / median(every))} of the median pair."
