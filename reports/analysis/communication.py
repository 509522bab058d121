"""The communication of a cell: how much of a step it takes, and whether the network limits the step.

The peak bandwidth of a study's networks is the bandwidth of plain all-reduces while nothing else runs, with
its variation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from reports.analysis.budget import CellBudget, budget
from reports.analysis.figures import CellFigures
from reports.text import devices, metric, percent, si, size
from results.cell import Cell
from results.derivation.communication import bus_factor
from results.grouping import grouped
from results.outcome import Evidence
from results.run import BudgetMethod, Communication, OperationSummary
from results.statistics import Metric

UNSTEADY_ABOVE = 2.0
"""Factor between the peaks of launches on one network above which the link's peak counts as unknown."""

Network = tuple[str, str, str, Evidence, int, int | None, int | None]
"""Device, backend, link, evidence, ranks, ranks of a virtual node and nodes, which cells of one peak
share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLinkPeak:
    """Bus bandwidth of plain all-reduces on one network at one size, over the launches that measured it."""

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

    @property
    def steady(self) -> bool:
        """Whether the peaks of the launches agree well enough that a measured bandwidth may be stated as a
        share of their median."""
        return self.highest_bytes_per_s <= UNSTEADY_ABOVE * self.lowest_bytes_per_s


LinkPeaks = Mapping[Network, PooledLinkPeak]


def network_of(figures: CellFigures) -> Network:
    """The network that a cell ran on, and its size."""
    cell, environment = figures.cell, figures.newest.environment
    nodes = None if environment is None else environment.nodes
    return cell.device, cell.backend, cell.link, figures.evidence, cell.gpus, cell.node_size, nodes


def link_peaks(cells: Iterable[CellFigures]) -> LinkPeaks:
    """The peak of every network and size on which one was measured."""
    found: dict[Network, set[float]] = {}
    for figures in cells:
        # A launch measures once for all of its runs, so equal figures count once.
        own = {
            run.communication.peak_bus_bytes_per_s for run in figures.runs if run.communication is not None
        }
        if peaks := {peak for peak in own if peak}:
            found.setdefault(network_of(figures), set()).update(peaks)
    return {
        network: PooledLinkPeak(
            bytes_per_s=median(peaks), lowest_bytes_per_s=min(peaks), highest_bytes_per_s=max(peaks)
        )
        for network, peaks in found.items()
    }


LIMITS_ABOVE = 0.10
"""Share of a step above which exposed transfer may mean that the network limits the step."""
FULL_FROM = 0.70
"""Share of the measured peak from which a link is called full; it is below 1, as nothing else runs in a
peak."""
CONTRADICTION_ABOVE = 1.05
"""Share of the peak above which the bandwidth and the peak contradict each other."""
FAR_BELOW = 0.50
"""Share of the peak below which something other than bandwidth limits."""
SMALL_BYTES = 2**16
"""Payload of an operation below which it is called small: 64 KiB take half a millisecond on 1 Gbit/s, not
much more than starting an operation."""
SLOW_BELOW = 0.50
"""Share of a link's expected bandwidth below which it is called slow."""
DISAGREE_ABOVE = 0.20
"""Share of a step by which two methods of one figure may differ without a remark."""
ON_LESS_OFF = (
    "how much longer a step takes with the exchange than without it, to the last rank: it contains some "
    "random wait, so it is not the sum of exposed transfer and exposed wait, which are of the mean rank"
)
"""Explains why "added by the exchange" is not the sum of two parts of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCommunication:
    """A cell's communication a step, as the mean over its runs; None where not every run recorded it."""

    figures: CellFigures
    budget: CellBudget | None
    recorded: tuple[Communication, ...]
    """One entry for each run; empty if a run did not record its communication."""
    peak: PooledLinkPeak | None
    """The peak of its network at its size, over all cells that measured it."""

    @property
    def cell(self) -> Cell:
        return self.figures.cell

    @property
    def method(self) -> BudgetMethod | None:
        """How the exposed transfer was found."""
        if self.budget is not None:
            return self.budget.method
        return "on-off" if self.figures.exposed_ns is not None else None

    @property
    def exposed_ns(self) -> Metric | None:
        """The difference of on-off blocks over the runs; a single run has the interval of its quads.

        A block without exchange averages the skew of its steps, so part of the difference is wait, not
        transfer.
        """
        return self.figures.exposed_ns if len(self.figures.runs) > 1 else self.figures.newest.exposed_ns

    @property
    def transfer_ns(self) -> Metric | None:
        """Exposed transfer by the budget; without a budget, all exposed communication."""
        return self.budget.transfer_ns if self.budget else self.exposed_ns

    @property
    def transfer_share(self) -> float | None:
        """Exposed transfer over the step."""
        return None if self.transfer_ns is None else self.transfer_ns.value / self.figures.step_ns.value

    @property
    def transfer_text(self) -> str:
        """Exposed transfer over the step, with the ends of its interval: `34.0 % (27.6 to 42.2)`."""
        if self.transfer_ns is None or self.transfer_ns.low is None:
            return percent(self.transfer_share or 0.0)
        share = self.transfer_ns.mapped(lambda ns: ns / self.figures.step_ns.value, "ratio")
        return f"{metric(share).value} ({metric(share).ends})"

    @property
    def wait_ns(self) -> Metric | None:
        """Time that the mean rank loses because another is slower."""
        return self.budget.wait_ns if self.budget else None

    @property
    def total_ns(self) -> float | None:
        return self.mean("total_ns")

    @property
    def seen_ns(self) -> float | None:
        """Exposed communication of the mean rank: exposed transfer and, where it is known, exposed wait."""
        if self.transfer_ns is None:
            return None
        return self.transfer_ns.value + (self.wait_ns.value if self.wait_ns else 0.0)

    @property
    def overlap(self) -> float | None:
        """Share of the time in flight that hides behind computation, 0 to 1; None without operations."""
        if self.seen_ns is None or not self.total_ns:
            return None
        return 1 - min(1.0, max(0.0, self.seen_ns) / self.total_ns)

    @property
    def disagreement_ns(self) -> float | None:
        """Communication by on-off blocks less the time blocked, if it exceeds `DISAGREE_ABOVE` of a step.

        Where a separate thread compresses, an unknown part of the time blocked is waiting for that
        computation, which on-off blocks count as compute. Any value in between then agrees.
        """
        blocked = self.mean("blocked_ns")
        if self.method != "on-off" or self.seen_ns is None or blocked is None:
            return None
        least = blocked - (self.mean("exchange_cpu_ns") or 0.0)
        apart = self.seen_ns - min(max(self.seen_ns, least), blocked)
        return apart if abs(apart) > DISAGREE_ABOVE * self.figures.step_ns.value else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bytes of all runs over their transfer time, which weights the runs' bandwidths by that time."""
        moved = spent_ns = 0.0
        for one in self.recorded:
            if one.bus_bytes_per_s is None:
                return None
            transfer_ns = sum(
                operation.transfer_ns or 0.0
                for operation in one.operations
                if bus_factor(operation.name, operation.group_size) is not None
            )
            moved += one.bus_bytes_per_s * transfer_ns
            spent_ns += transfer_ns
        return moved / spent_ns if spent_ns else None

    @property
    def peak_bytes_per_s(self) -> float | None:
        """Bandwidth of plain all-reduces with nothing else running, the median over launches."""
        return None if self.peak is None else self.peak.bytes_per_s

    @property
    def bandwidth_share(self) -> float | None:
        """Bandwidth over the link's peak; None if the peak varied too much to divide by it."""
        if self.bus_bytes_per_s is None or self.peak is None or not self.peak.steady:
            return None
        return self.bus_bytes_per_s / self.peak.bytes_per_s

    @property
    def bytes_per_operation(self) -> float | None:
        payload = self.figures.newest.exchange_payload_bytes
        operations = self.figures.newest.exchange_operations
        return payload / operations if operations and payload is not None else None

    @property
    def operations(self) -> tuple[OperationSummary, ...]:
        """The operations by kind and size of group, each the mean over the runs that have it."""
        every = (operation for one in self.recorded for operation in one.operations)
        kinds = grouped(((operation.name, operation.group_size), operation) for operation in every)

        return tuple(
            OperationSummary(
                name=name,
                group_size=size,
                count=_mean(found, "count") or 0.0,
                payload_bytes=_mean(found, "payload_bytes") or 0.0,
                duration_ns=_mean(found, "duration_ns") or 0.0,
                transfer_ns=_mean(found, "transfer_ns"),
                wait_ns=_mean(found, "wait_ns"),
            )
            for (name, size), found in kinds.items()
        )

    def mean(self, name: str) -> float | None:
        """The mean of a field of `Communication` over the runs; None if a run lacks it."""
        return _mean(self.recorded, name)


def _mean(found: Sequence[Communication | OperationSummary], name: str) -> float | None:
    values = [getattr(one, name) for one in found]
    return fmean(values) if values and None not in values else None


def communication(figures: CellFigures, peaks: LinkPeaks | None = None) -> CellCommunication:
    """A cell's communication, as far as it was measured, with the given peaks, or else the cell's peak."""
    known = link_peaks([figures]) if peaks is None else peaks
    recorded = [run.communication for run in figures.runs if run.communication is not None]
    complete = len(recorded) == len(figures.runs)
    return CellCommunication(
        figures=figures,
        budget=budget(figures),
        recorded=tuple(recorded) if complete else (),
        peak=known.get(network_of(figures)),
    )


def communication_finding(figures: CellFigures, peaks: LinkPeaks | None = None) -> str | None:
    """A sentence if the network limits the step of this cell or is slower than its rate; None if not."""
    one = communication(figures, peaks)
    found = [text for text in (_limit(one), _below_nominal(one)) if text is not None]
    return " ".join(found) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A network on which plain all-reduces are much slower at some sizes than at a smaller one."""

    one: CellCommunication
    """The smallest of these sizes."""
    smaller: CellCommunication
    """The smaller size with the highest peak."""
    later: tuple[int, ...]
    """The other sizes below half of it."""

    @property
    def finding(self) -> str:
        slow, fast = _peak(self.one), _peak(self.smaller)
        too = f"; below half at {', '.join(map(str, self.later))} too" if self.later else ""
        return (
            f"Slow link: plain all-reduces reach only {si(slow, 'B/s')} on {_where(self.one)}, "
            f"{percent(slow / fast)} of the {si(fast, 'B/s')} on {_where(self.smaller)}{too}."
        )


def slow_links(cells: Sequence[CellFigures], peaks: LinkPeaks | None = None) -> list[SlowLink]:
    """The networks that are slow at some size: the peak is below `SLOW_BELOW` of the best peak at a smaller
    size.

    The network inside of a node and the network between nodes are compared separately, because the second is
    expected to be slower. Bus bandwidth is defined so that it does not depend on the number of ranks.
    Cells that make no claim are left out (ranks of emulated ones share cores), and so are sizes at which the
    peak varied.
    """
    known = link_peaks(cells) if peaks is None else peaks
    networks: dict[tuple[object, ...], dict[int, CellCommunication]] = {}
    for figures in cells:
        one = communication(figures, known)
        if figures.no_claim is None and one.peak is not None and one.peak.steady:
            environment, cell = figures.newest.environment, figures.cell
            device, nodes = (environment.device_name, environment.nodes) if environment else (None, 1)
            sizes = networks.setdefault((cell.device, cell.backend, cell.link, device, nodes > 1), {})
            best = sizes.setdefault(figures.cell.gpus, one)
            sizes[figures.cell.gpus] = max(best, one, key=_peak)
    return [slow for sizes in networks.values() if (slow := _slow_link(sizes)) is not None]


def _slow_link(sizes: dict[int, CellCommunication]) -> SlowLink | None:
    slow = []
    best: CellCommunication | None = None
    for gpus in sorted(sizes):
        if best is not None and _peak(sizes[gpus]) < SLOW_BELOW * _peak(best):
            slow.append(gpus)
        elif not slow:
            best = sizes[gpus] if best is None else max(best, sizes[gpus], key=_peak)
    if best is None or not slow:
        return None
    return SlowLink(one=sizes[slow[0]], smaller=best, later=tuple(slow[1:]))


def _peak(one: CellCommunication) -> float:
    return one.peak_bytes_per_s or 0.0


def _limit(one: CellCommunication) -> str | None:
    if not _exposed(one) or one.bus_bytes_per_s is None or one.peak is None:
        return None
    seen = f"{one.transfer_text} of the step is exposed transfer"
    used = one.bandwidth_share
    if used is None:
        ends = f"{si(one.peak.lowest_bytes_per_s, 'B/s')} to {si(one.peak.highest_bytes_per_s, 'B/s')}"
        return f"{seen}; the link's own peak varied from {ends}, so the bandwidth is not judged."
    reach = f"its collectives reach {percent(used)} of the {one.peak.text} that plain all-reduces reach"
    if used > CONTRADICTION_ABOVE:
        told = "that is more than the link carries, so one of the two is wrong and the link is not judged"
    elif used >= FULL_FROM:
        told = "consistent with a full link"
    elif used >= FAR_BELOW:
        told = "consistent with a link that is the main limit"
    else:
        told = f"consistent with {_why_far(one)}"
    every = all(run.disturbed for run in one.figures.runs)
    disturbed = " Other processes disturbed every run of it." if every else ""
    return f"{seen}, and {reach}: {told}.{disturbed}"


def _exposed(one: CellCommunication) -> bool:
    """Whether enough transfer is exposed to limit the step, and more than by chance."""
    share, transfer = one.transfer_share, one.transfer_ns
    if share is None or share <= LIMITS_ABOVE or transfer is None:
        return False
    return transfer.low is None or transfer.low > 0


def _why_far(one: CellCommunication) -> str:
    each = one.bytes_per_operation
    if each is None:
        return "latency or contention that limits, not the bandwidth"
    many = f"{one.figures.newest.exchange_operations or 0:,.4g} operations of {size(each)} a step"
    if each < SMALL_BYTES:
        return f"latency that limits, with {many}"
    return f"contention or latency that limits, not the bandwidth, with {many}"


def _below_nominal(one: CellCommunication) -> str | None:
    """A sentence if plain all-reduces are far below the link's rate, which a ring on one link can reach."""
    rate, peak = one.cell.link_mbit_per_s, one.peak_bytes_per_s
    if rate is None or peak is None or (one.peak and not one.peak.steady):
        return None
    nominal = rate * 1e6 / 8
    if peak >= SLOW_BELOW * nominal:
        return None
    return (
        f"Slow link: plain all-reduces reach only {si(peak, 'B/s')}, {percent(peak / nominal)} of the "
        f"{si(nominal, 'B/s')} of a {one.cell.link} link."
    )


def _where(one: CellCommunication) -> str:
    """`32 GPUs on 4 nodes`."""
    ranks = one.figures.newest.ranks
    text = devices(one.cell.gpus, one.cell.device)
    if ranks is None:
        return text
    nodes = len(set(ranks.node))
    return f"{text} on {nodes:,} node{'' if nodes == 1 else 's'}"
