"""The peak bandwidth of a study's networks: the best of plain all-reduces alone, and how far it varied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reports.analysis.figures import CellFigures
from results.outcome import Evidence

UNSTEADY_ABOVE = 2.0
"""Factor between the peaks of cells on one network above which the link's peak counts as unknown."""

Network = tuple[str, str, str, Evidence, int, int | None, int | None]
"""Device, backend, link, evidence, ranks, ranks of a virtual node and nodes: what cells of one peak share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPeak:
    """Bus bandwidth of plain all-reduces on one network at one size, each cell's the best of its runs."""

    bytes_per_s: float
    """The best of all cells."""
    lowest_bytes_per_s: float
    """That of the cell with the lowest."""

    @property
    def steady(self) -> bool:
        """Whether the cells' peaks are near enough to each other to divide by."""
        return self.bytes_per_s <= UNSTEADY_ABOVE * self.lowest_bytes_per_s


LinkPeaks = Mapping[Network, LinkPeak]


def network_of(figures: CellFigures) -> Network:
    """The network that a cell ran on, and its size."""
    cell, environment = figures.cell, figures.newest.environment
    nodes = None if environment is None else environment.nodes
    return cell.device, cell.backend, cell.link, figures.evidence, cell.gpus, cell.node_size, nodes


def link_peaks(cells: Iterable[CellFigures]) -> LinkPeaks:
    """The peak of every network and size on which one was measured."""
    found: dict[Network, list[float]] = {}
    for figures in cells:
        peak = _own_peak(figures)
        if peak is not None:
            found.setdefault(network_of(figures), []).append(peak)
    return {
        network: LinkPeak(bytes_per_s=max(peaks), lowest_bytes_per_s=min(peaks))
        for network, peaks in found.items()
    }


def _own_peak(figures: CellFigures) -> float | None:
    recorded = (run.communication for run in figures.runs if run.communication is not None)
    return max((one.peak_bus_bytes_per_s for one in recorded if one.peak_bus_bytes_per_s), default=None)
