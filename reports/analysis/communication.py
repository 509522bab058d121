"""The communication of a cell: how much of a step it takes, and whether the network limits the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from reports.analysis.budget import CellBudget, budget
from reports.analysis.figures import CellFigures, OfCell
from reports.text import count, devices, metric, percent, si, size
from results.derivation.communication import bus_factor
from results.grouping import grouped
from results.outcome import Evidence
from results.run import Communication, DimensionSummary
from results.statistics import Metric

UNSTEADY_ABOVE = 2.0
"""Factor between the peaks of launches on one network above which the link's peak counts as unknown."""

Network = tuple[str, str, str, Evidence, int, int | None, int | None]
"""Device, backend, link, evidence, ranks, ranks of a virtual node and nodes, which cells of one peak
share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLinkPeak:
    """Bus bandwidth of plain all-reduces with nothing else running, on one network at one size."""

    bytes_per_s: float
    """The median over launches; the value of a launch is the best of a few all-reduces."""
    lowest_bytes_per_s: float
    highest_bytes_per_s: float

    @property
    def text(self) -> str:
        """`1.50 GB/s (1.26 GB/s to 1.86 GB/s)`."""
        lowest, highest = si(self.lowest_bytes_per_s, "B/s"), si(self.highest_bytes_per_s, "B/s")
        ends = f" ({lowest} to {highest})" if lowest != highest else ""
        return f"{si(self.bytes_per_s, 'B/s')}{ends}"


LinkPeaks = Mapping[Network, PooledLinkPeak]
Payloads = Mapping[tuple[str, int], float]
"""Bytes of a rank by the name of an operation and the size of its group."""


def network_of(figures: CellFigures) -> Network:
    """The network that a cell ran on, and its size."""
    cell, environment = figures.cell, figures.newest.environment
    nodes = None if environment is None else environment.nodes
    return cell.device, cell.backend, cell.link, figures.evidence, cell.gpus, cell.node_size, nodes


def link_peaks(cells: Iterable[CellFigures]) -> LinkPeaks:
    """The peak of every network and size on which one was measured."""
    found = grouped(
        (network_of(figures), run.communication.peak_bus_bytes_per_s)
        for figures in cells
        for run in figures.runs
        if run.communication is not None and run.communication.peak_bus_bytes_per_s
    )
    # A launch measures once for all of its runs, so equal figures count once.
    return {
        network: PooledLinkPeak(
            bytes_per_s=median({*peaks}), lowest_bytes_per_s=min(peaks), highest_bytes_per_s=max(peaks)
        )
        for network, peaks in found.items()
    }


LIMITS_ABOVE = 0.10
"""Share of a step above which exposed transfer may mean that the network limits the step."""
FULL_FROM, FAR_BELOW, CONTRADICTION_ABOVE = 0.70, 0.50, 1.05
"""Shares of the measured peak: from which a link is called full (below 1, as nothing else runs in a peak),
below which something other than bandwidth limits, and above which the two contradict each other."""
SMALL_BYTES = 2**16
"""Payload of an operation below which it is called small: 64 KiB take half a millisecond on 1 Gbit/s, not
much more than starting an operation."""
SLOW_BELOW = 0.50
"""Share of a link's expected bandwidth below which it is called slow."""
ON_LESS_OFF = (
    "how much longer a step takes with the exchange than without it, to the last rank: it contains some "
    "random wait, so it is not the sum of exposed transfer and exposed wait, which are of the mean rank"
)
"""Explains why "added by the exchange" is not the sum of two parts of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCommunication(OfCell):
    """A cell's communication a step, as the mean over its runs; None where not every run recorded it."""

    budget: CellBudget | None
    recorded: tuple[Communication, ...]
    """One entry for each run; empty if a run did not record its communication."""
    peak: PooledLinkPeak | None
    """The peak of its network at its size, over all cells that measured it."""

    @property
    def exposed_ns(self) -> Metric | None:
        """The difference of on-off blocks over the runs; a single run has the interval of its quads. Part of
        it is wait, because a block without exchange averages the skew of its steps."""
        return self.figures.exposed_ns if len(self.figures.runs) > 1 else self.figures.newest.exposed_ns

    @property
    def transfer_ns(self) -> Metric | None:
        """Exposed transfer by the budget; without a budget, all exposed communication."""
        return self.budget.transfer_ns if self.budget else self.exposed_ns

    @property
    def transfer_share(self) -> Metric | None:
        """Exposed transfer over the step."""
        step_ns = self.figures.step_ns.value
        return self.transfer_ns and self.transfer_ns.mapped(lambda ns: ns / step_ns, "ratio")

    @property
    def limited(self) -> bool:
        """Whether enough transfer is exposed to limit the step, and more than by chance."""
        share = self.transfer_share
        return share is not None and share.value > LIMITS_ABOVE and (share.low is None or share.low > 0)

    @property
    def seen_ns(self) -> float | None:
        """The time that the exchange holds up the mean rank: exposed transfer and, where they are known,
        exposed wait and imbalance of experts."""
        if self.transfer_ns is None:
            return None
        wait = (self.budget.part_ns.get(part, 0.0) for part in ("wait", "imbalance")) if self.budget else ()
        return self.transfer_ns.value + sum(wait)

    @property
    def exposed_total_ns(self) -> float | None:
        """Exposed transfer and wait with the bubble of a pipeline, which only occurs with the exchange."""
        bubble = self.budget.part_ns.get("bubble", 0.0) if self.budget else 0.0
        return None if self.seen_ns is None else self.seen_ns + bubble

    @property
    def dimensions(self) -> tuple[DimensionSummary, ...]:
        """The dimensions of the exchange as means over the runs; empty unless all runs have the same ones."""
        every = [one.dimensions for one in self.recorded]
        if len({tuple(own.name for own in one) for one in every}) != 1:
            return ()
        return tuple(
            DimensionSummary(name=own[0].name, **{field: _mean(own, field) for field in _SUMMED})
            for own in zip(*every, strict=True)
        )

    @property
    def overlap_ns(self) -> float | None:
        """The time by which transfers and waits of all dimensions, and what stages waited for messages,
        exceed the exposed total: they hide behind computation and behind each other."""
        if not self.dimensions or self.exposed_total_ns is None:
            return None
        spent = sum((own.transfer_ns or 0.0) + (own.wait_ns or 0.0) for own in self.dimensions)
        return spent + (self.mean("bubble_ns") or 0.0) - self.exposed_total_ns

    @property
    def overlap(self) -> float | None:
        """Share of the time in flight that hides behind computation, 0 to 1; None without operations."""
        total_ns = self.mean("total_ns")
        if self.seen_ns is None or not total_ns:
            return None
        return 1 - min(1.0, max(0.0, self.seen_ns) / total_ns)

    @property
    def disagreement(self) -> float:
        """Communication by on-off blocks less the time blocked, as a share of the step; 0 if one is unknown.

        Where a separate thread compresses, an unknown part of the time blocked is waiting for that
        computation, which on-off blocks count as compute. Any value in between then agrees.
        """
        blocked = self.mean("blocked_ns")
        recorded = self.budget is not None and self.budget.method != "on-off"
        if recorded or self.seen_ns is None or blocked is None:
            return 0.0
        least = blocked - (self.mean("exchange_cpu_ns") or 0.0)
        return (self.seen_ns - min(max(self.seen_ns, least), blocked)) / self.figures.step_ns.value

    @property
    def recorder_share(self) -> float:
        """The time that the recorder adds to a step, as a share of the step; 0 if it is unknown."""
        return (self.mean("step_ns") or self.figures.step_ns.value) / self.figures.step_ns.value - 1

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bytes of all runs over their transfer time, which weights the runs' bandwidths by that time."""
        rates = [one.bus_bytes_per_s for one in self.recorded if one.bus_bytes_per_s is not None]
        spent_ns = [0.0] * len(self.recorded)
        for place, one in enumerate(self.recorded):
            known = (own for own in one.operations if bus_factor(own.name, own.group_size) is not None)
            spent_ns[place] = sum(own.transfer_ns or 0.0 for own in known)
        return fmean(rates, spent_ns) if len(rates) == len(spent_ns) and any(spent_ns) else None

    @property
    def steady_peak(self) -> float:
        """The link's peak, if its launches agree well enough to compare a bandwidth with it, or else 0."""
        one = self.peak
        steady = one is not None and one.highest_bytes_per_s <= UNSTEADY_ABOVE * one.lowest_bytes_per_s
        return one.bytes_per_s if one and steady else 0.0

    @property
    def bandwidth_share(self) -> float | None:
        """Bandwidth over the link's peak; None if the peak varied too much to divide by it."""
        reached = self.bus_bytes_per_s
        return reached / self.steady_peak if reached is not None and self.steady_peak else None

    @property
    def payloads(self) -> Payloads:
        """The mean payload of each kind of operation over the runs that have it."""
        every = (own for one in self.recorded for own in one.operations)
        kinds = grouped(((own.name, own.group_size), own.payload_bytes) for own in every)
        return {kind: fmean(payloads) for kind, payloads in kinds.items()}

    def of_run(self, name: str) -> float | None:
        """The mean of a field of `RunResult` over the runs; None if a run lacks it."""
        values = [getattr(run, name) for run in self.figures.runs]
        return fmean(values) if values and None not in values else None

    def mean(self, name: str) -> float | None:
        """The mean of a field of `Communication` over the runs; None if a run lacks it."""
        values = [getattr(one, name) for one in self.recorded]
        return fmean(values) if values and None not in values else None


_SUMMED = ("payload_bytes", "transfer_ns", "wait_ns")


def _mean(of_runs: Sequence[DimensionSummary], field: str) -> Any:
    values = [getattr(own, field) for own in of_runs]
    return None if None in values else fmean(values)


def communication(figures: CellFigures, peaks: LinkPeaks | None = None) -> CellCommunication:
    """A cell's communication, as far as it was measured, with the given peaks, or else the cell's peak."""
    known = link_peaks([figures]) if peaks is None else peaks
    recorded = tuple(run.communication for run in figures.runs if run.communication is not None)
    complete, peak = len(recorded) == len(figures.runs), known.get(network_of(figures))
    return CellCommunication(
        figures=figures, budget=budget(figures), recorded=recorded if complete else (), peak=peak
    )


def communication_finding(figures: CellFigures, peaks: LinkPeaks | None = None) -> str | None:
    """Sentences if the network limits the step of this cell or is slower than its rate; None if not."""
    one = communication(figures, peaks)
    nominal, found = (one.cell.link_mbit_per_s or 0.0) * 1e6 / 8, []
    if one.peak and one.transfer_share and one.limited and one.bus_bytes_per_s is not None:
        disturbed = "; other processes disturbed every run" * all(run.disturbed for run in figures.runs)
        exposed = metric(one.transfer_share).with_ends
        found.append(f"{exposed} of the step is exposed transfer; {_limit(one, one.peak)}{disturbed}.")
    # A ring on one link can reach the rate of the link.
    if 0 < one.steady_peak < SLOW_BELOW * nominal:
        found.append(f"{_slow(one, '', nominal)} of a {one.cell.link} link.")
    return " ".join(found) or None


def _limit(one: CellCommunication, peak: PooledLinkPeak) -> str:
    """The causes that the bandwidth of the collectives is consistent with."""
    used, newest = one.bandwidth_share, one.figures.newest
    if used is None:
        return f"the link's own peak of {peak.text} varied too much to judge the bandwidth"
    told = "consistent with a link that is the main limit"
    if used > CONTRADICTION_ABOVE:
        told = "more than the link carries, so one of the two is wrong and the link is not judged"
    elif used >= FULL_FROM:
        told = "consistent with a full link"
    elif used < FAR_BELOW:
        told = "consistent with latency or contention that limits, not the bandwidth"
        if newest.exchange_operations and newest.exchange_payload_bytes is not None:
            each = newest.exchange_payload_bytes / newest.exchange_operations
            told = told.replace(" or contention", "" if each < SMALL_BYTES else " or contention")
            told += f", with {newest.exchange_operations:,.4g} operations of {size(each)} a step"
    return f"its collectives reach {percent(used)} of the {peak.text} that plain all-reduces reach: {told}"


def slow_links(cells: Sequence[CellFigures], peaks: LinkPeaks | None = None) -> list[tuple[int, str]]:
    """The smallest slow size of each network that has one, and a sentence: the peak is below `SLOW_BELOW` of
    the best peak at a smaller size.

    The network inside of a node and the network between nodes are compared separately, because the second is
    expected to be slower. Bus bandwidth is defined so that it does not depend on the number of ranks.
    Cells that make no claim are left out (ranks of emulated ones share cores), and so are sizes at which the
    peak varied.
    """
    known = link_peaks(cells) if peaks is None else peaks
    every = [communication(figures, known) for figures in cells if figures.no_claim is None]
    links = grouped((_link_of(one.figures), one) for one in every if one.steady_peak)
    return [slow for those in links.values() for slow in _slow_sizes(those)]


def _link_of(figures: CellFigures) -> tuple[object, ...]:
    environment, cell = figures.newest.environment, figures.cell
    device, nodes = (environment.device_name, environment.nodes) if environment else (None, 1)
    return cell.device, cell.backend, cell.link, device, nodes > 1


def _slow_sizes(cells: Sequence[CellCommunication]) -> Iterator[tuple[int, str]]:
    """The slow sizes of one network."""
    by_size = sorted(grouped((one.cell.gpus, one) for one in cells).items())
    best, *larger = (max(those, key=lambda one: one.steady_peak) for _, those in by_size)
    slow = []
    for own in larger:
        if own.steady_peak < SLOW_BELOW * best.steady_peak:
            slow.append(own)
        elif not slow:
            best = max(best, own, key=lambda one: one.steady_peak)
    if slow:
        later = ", ".join(str(one.cell.gpus) for one in slow[1:])
        too = f"; below half at {later} too" if later else ""
        told = _slow(slow[0], f" on {_where(slow[0])}", best.steady_peak)
        yield slow[0].cell.gpus, f"{told} on {_where(best)}{too}."


def _slow(one: CellCommunication, where: str, expected: float) -> str:
    """`Slow link: plain all-reduces reach only 490 MB/s on 8 GPUs, 49.0 % of the 1.00 GB/s`."""
    share = f"{percent(one.steady_peak / expected)} of the {si(expected, 'B/s')}"
    return f"Slow link: plain all-reduces reach only {si(one.steady_peak, 'B/s')}{where}, {share}"


def _where(one: CellCommunication) -> str:
    """`32 GPUs on 4 nodes`."""
    ranks = one.figures.newest.ranks
    nodes = f" on {count(len({*ranks.node}), 'node')}" if ranks else ""
    return f"{devices(one.cell.gpus, one.cell.device)}{nodes}"
