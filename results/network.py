"""The network table: how long collectives take over groups of ranks, measured, and what follows for others.

Sizes and bandwidths follow nccl-tests (doc/PERFORMANCE.md there): algbw is the array over the time, and busbw
is algbw times what a rank must send of the array over the array.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import msgspec

from results.cell import Backend, Cell
from results.environment import Environment
from results.errors import UsageError
from results.grouping import grouped
from results.notation import link_text
from results.outcome import Evidence

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send"]
"""`strategies.closed_form.terms.Collective`."""
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
NETWORK_FILE = "network.json"
"""Its name in the folder of a study that it belongs to."""


def busbw_factor(collective: Collective, ranks: int) -> float:
    """Bytes that a rank must send over the bytes of the array (nccl-tests)."""
    if collective in ("broadcast", "send"):
        return 1.0
    return (2 if collective == "all-reduce" else 1) * (ranks - 1) / ranks


class NetworkTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one rank in one collective of one size over one group that it is in."""

    collective: Collective
    payload_bytes: int
    ranks: int
    nodes: int
    duration_ns: list[float] = []
    """Samples: means of operations in a row, from when all ranks are ready to when this rank is done."""


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an environment that decide how long a collective takes; None: not known."""

    backend: Backend
    device_name: str | None = None
    library: str | None = None
    """`NCCL 2.27.3`, or `Gloo of torch 2.13.0`."""
    link_mbit_per_s: float | None = None
    """Rate of each virtual node's link; None: the network is not shaped."""
    network: str | None = None
    """Transports between nodes, by NCCL's log."""
    settings: dict[str, str] | None = None
    """Variables of the libraries that change the cost of a collective."""

    @classmethod
    def of(cls, environment: Environment, cell: Cell) -> NetworkFacts:
        """The facts of a run of a cell in this environment."""
        nccl = cell.backend == "nccl"
        # An environment does not record the variables that the cell itself sets.
        own = dict(text.split("=", 1) for text in cell.env if "NCCL_" in text.partition("=")[0])
        return cls(
            backend=cell.backend,
            device_name=environment.device_name,
            library=f"NCCL {environment.nccl}" if nccl else f"Gloo of torch {environment.torch}",
            link_mbit_per_s=cell.link_mbit_per_s,
            network=environment.network or None,
            settings={**environment.nccl_settings, **own} if nccl else None,
        )

    def unlike(self, other: NetworkFacts) -> list[str]:
        """Return the differences, as `device: A100 in the table, H100 here`, of facts that both sides
        have."""
        mine, theirs = self._words(), other._words()
        return [
            f"{name}: {mine[name]} in the table, {theirs[name]} here"
            for name in mine
            if name in theirs and mine[name] != theirs[name]
        ]

    def _words(self) -> dict[str, str]:
        settings = self.settings
        words = {
            "backend": self.backend,
            "device": self.device_name,
            "library": self.library,
            "link": link_text(self.link_mbit_per_s),
            "transport between nodes": self.network,
            "settings": None
            if settings is None
            else " ".join(f"{name}={settings[name]}" for name in sorted(settings)) or "none",
        }
        return {name: word for name, word in words.items() if word is not None}


Key = tuple[Collective, int, int, int]
"""The collective of a measurement, the bytes that a rank hands over, ranks and nodes."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one size over one group of ranks with nothing else running: the slowest rank's
    time."""

    collective: Collective
    payload_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Bytes of the buffer that a rank hands over, as of `Term`: of an all-gather its own shard."""
    ranks: Annotated[int, msgspec.Meta(ge=2)]
    nodes: Annotated[int, msgspec.Meta(ge=1)]
    median_s: Annotated[float, msgspec.Meta(gt=0)]
    low_s: Annotated[float, msgspec.Meta(gt=0)]
    high_s: float
    """With `low_s` the 95 % interval of the median by order statistics; the range of fewer than 6 samples."""
    runs: Annotated[int, msgspec.Meta(ge=1)]
    """Samples behind the median."""

    @classmethod
    def of(cls, key: Key, median_s: float, low_s: float, high_s: float, runs: int) -> Measurement:
        values = (*key, median_s, low_s, high_s, runs)
        fields: dict[str, Any] = dict(zip(cls.__struct_fields__, values, strict=True))
        return cls(**fields)

    def __post_init__(self) -> None:
        if not self.low_s <= self.median_s <= self.high_s < math.inf:
            raise ValueError(f"the interval {self.low_s:g} to {self.high_s:g} s has no {self.median_s:g} s")
        if self.ranks < self.nodes:
            raise ValueError(f"{self.ranks} ranks cannot be on {self.nodes} nodes")

    @property
    def array_bytes(self) -> float:
        """Bytes of the array as nccl-tests counts them: of an all-gather what a rank ends with."""
        return array_bytes(self.collective, self.payload_bytes, self.ranks)

    @property
    def algbw(self) -> float:
        """Bytes of the array a second."""
        return self.array_bytes / self.median_s

    @property
    def busbw(self) -> float:
        """Bytes a second that each rank sends at least."""
        return self.algbw * busbw_factor(self.collective, self.ranks)


def array_bytes(collective: Collective, payload_bytes: float, ranks: int) -> float:
    """Bytes of the array of which a rank hands over `payload_bytes`."""
    return payload_bytes * ranks if collective == "all-gather" else payload_bytes


class NetworkTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Measurements of one network, and the environment that they belong to."""

    source: Literal["bench", "nccl-tests"]
    measured_at: str
    facts: NetworkFacts
    evidence: Evidence
    """`emulated` where ranks share cores, or nodes a host."""
    measurements: Annotated[tuple[Measurement, ...], msgspec.Meta(min_length=1)]
    absent: dict[str, str] = {}
    """Reasons why something was not measured, or a line was left out."""

    def __post_init__(self) -> None:
        keys = [(row.collective, row.ranks, row.nodes, row.payload_bytes) for row in self.measurements]
        if len(set(keys)) < len(keys):
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            raise ValueError("{} of {} ranks on {} nodes has {} bytes twice".format(*twice))

    @cached_property
    def groups(self) -> Mapping[tuple[Collective, int, int], Sequence[Measurement]]:
        """The measurements by collective, ranks and nodes, the smallest payload first."""
        rows = sorted(self.measurements, key=lambda row: (row.nodes, row.ranks, row.payload_bytes))
        return grouped(((row.collective, row.ranks, row.nodes), row) for row in rows)

    def covers(self, collective: Collective, ranks: int, nodes: int) -> bool:
        """Whether the level of such a group was measured.

        Inside a node that is a group of as many ranks or more: what more ranks share there is not known.
        Across nodes it is any number of nodes from 2 on with as many ranks on each.
        """
        return ranks <= 1 or self._reference(collective, ranks, nodes) is not None

    def seconds(self, collective: Collective, payload_bytes: float, ranks: int, nodes: int) -> float:
        """The seconds of an operation for which a rank hands over `payload_bytes`.

        Between measured sizes of a measured group, times are interpolated in logarithms. Above the largest
        its bandwidth is kept, and below the smallest its time: no line through larger sizes is continued
        below them. Groups of other sizes scale `_other_group`. Raises UsageError for a level that was not
        measured (`covers`).
        """
        key = collective, payload_bytes, ranks, nodes
        if key not in self._asked:
            self._asked[key] = self._seconds(*key)
        return self._asked[key]

    @cached_property
    def _asked(self) -> dict[tuple[Collective, float, int, int], float]:
        """The answers so far: a replay asks for one operation thousands of times."""
        return {}

    def _seconds(self, collective: Collective, payload_bytes: float, ranks: int, nodes: int) -> float:
        if ranks <= 1 or payload_bytes <= 0:
            return 0.0
        group = self._reference(collective, ranks, nodes)
        if group is None:
            where = "inside a node" if nodes == 1 else f"over nodes with {ranks / nodes:g} ranks each"
            raise UsageError(
                f"the network table has no {collective} of {ranks} ranks {where}: measure that level by "
                f"bench network, or give another table"
            )
        if collective == "send" or (ranks, nodes) == group:
            return self._same_group(collective, payload_bytes, group)
        return self._other_group(collective, payload_bytes, ranks, group)

    def _reference(self, collective: Collective, ranks: int, nodes: int) -> tuple[int, int] | None:
        """Ranks and nodes of the measured group that is nearest: the smallest that is not smaller, else the
        largest; None if its level was not measured."""
        if collective == "send":
            ranks, nodes = 2, min(nodes, 2)
        level = [
            (has, on)
            for name, has, on in self.groups
            if name == collective and (on == 1) == (nodes == 1) and (nodes == 1 or has * nodes == ranks * on)
        ]
        larger = [group for group in level if group[0] >= ranks]
        return min(larger, default=None if nodes == 1 else max(level, default=None))

    def _same_group(self, collective: Collective, payload_bytes: float, group: tuple[int, int]) -> float:
        rows = self.groups[collective, *group]
        place = bisect_left(rows, payload_bytes, key=lambda row: row.payload_bytes)
        if place == len(rows):
            return payload_bytes / rows[-1].payload_bytes * rows[-1].median_s
        before, after = rows[max(place - 1, 0)], rows[place]
        if before is after:
            return after.median_s
        share = math.log(payload_bytes / before.payload_bytes)
        share /= math.log(after.payload_bytes / before.payload_bytes)
        return math.exp((1 - share) * math.log(before.median_s) + share * math.log(after.median_s))

    def _other_group(
        self, collective: Collective, payload_bytes: float, ranks: int, group: tuple[int, int]
    ) -> float:
        """Scale the time of the same array over another group of the level.

        Its latency (`_line`) grows by the mean of a logarithmic and a linear law of the ranks; the rest keeps
        its busbw.
        """
        known = group[0]
        array = array_bytes(collective, payload_bytes, ranks)
        payload = array / known if collective == "all-gather" else array
        latency, per_byte = _line(self.groups[collective, *group])
        moving = max(self._same_group(collective, payload, group) - latency, array * per_byte)
        moving *= busbw_factor(collective, ranks) / busbw_factor(collective, known)
        return latency * (math.log2(ranks) / math.log2(known) + (ranks - 1) / (known - 1)) / 2 + moving


def _line(rows: Sequence[Measurement]) -> tuple[float, float]:
    """Seconds of latency, and seconds a byte of the array, by the smallest measurement and the one with the
    highest bandwidth: no latency where these are one."""
    first, best = rows[0], max(rows, key=lambda row: row.busbw)
    if first is best:
        return 0.0, best.median_s / best.array_bytes
    per_byte = (best.median_s - first.median_s) / (best.array_bytes - first.array_bytes)
    return max(0.0, first.median_s - per_byte * first.array_bytes), max(0.0, per_byte)
