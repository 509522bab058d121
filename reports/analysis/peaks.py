"""The peak bandwidth of a study's networks: of plain all-reduces alone, and how far it varied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from reports.analysis.figures import CellFigures
from reports.text import si
from results.outcome import Evidence

UNSTEADY_ABOVE = 2.0
"""Factor between the peaks of launches on one network above which the link's peak counts as unknown."""

Network = tuple[str, str, str, Evidence, int, int | None, int | None]
"""Device, backend, link, evidence, ranks, ranks of a virtual node and nodes: what cells of one peak share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLinkPeak:
    """Bus bandwidth of plain all-reduces on one network at one size, over the launches that measured it."""

    bytes_per_s: float
    """The median; each launch's is the best of a few."""
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
        """Whether the launches' peaks are near enough to each other to divide by."""
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
        # A launch measures once for all of its runs: equal figures are one.
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
