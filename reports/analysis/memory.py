"""Memory that a cell took, compared with the memory of its device or host."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reports.analysis.figures import CellFigures, OfCell
from reports.analysis.study import StudyFigures
from results.cell import Cell
from results.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CellMemory(OfCell):
    """The largest memory of any rank and counted run. None: not recorded, or without a capacity to
    compare."""

    device_peak_bytes: int | None
    """The peak of the allocator on a GPU."""
    device_bytes: int | None
    """Memory of one GPU."""
    rss_peak_bytes: int | None
    rss_over_idle_bytes: int | None
    host_bytes: int | None
    """Memory of one host, which runs on CPU record."""
    ranks_per_host: int
    predicted_bytes: int | None
    """The prediction for the fullest rank, in closed form."""

    @property
    def device_share(self) -> float | None:
        return _over(self.device_peak_bytes, self.device_bytes)

    @property
    def host_share(self) -> float | None:
        """An upper bound: every rank of the host counts like the largest, with the memory that ranks
        share."""
        return _over(self.rss_peak_bytes, self.host_bytes, times=self.ranks_per_host)

    @property
    def share(self) -> float | None:
        """The share of the memory that fills up first: of the GPU, or of the host of CPU ranks."""
        return self.host_share if self.cell.device == "cpu" else self.device_share

    @property
    def step_bytes(self) -> int | None:
        """The memory that is predicted: the allocator's peak on a GPU; on a CPU what the run took over
        idle."""
        return self.rss_over_idle_bytes if self.cell.device == "cpu" else self.device_peak_bytes

    @property
    def over_prediction(self) -> float | None:
        """Measured over predicted."""
        return _over(self.step_bytes, self.predicted_bytes)


def cell_memories(study: StudyFigures) -> list[CellMemory]:
    """The memory of every cell with a figure, in the study's order."""
    predicted, memories = study.predicted_bytes, []
    for cell_id, one in study.cells.items():
        on_cpu, environment = one.cell.device == "cpu", one.newest.environment
        capacity = environment.device_memory_bytes if environment else None
        memories.append(
            CellMemory(
                figures=one,
                device_peak_bytes=_largest(one, "device_allocated_peak_bytes"),
                device_bytes=None if on_cpu else capacity,
                rss_peak_bytes=_largest(one, "rss_peak_bytes"),
                rss_over_idle_bytes=_largest(one, "rss_over_idle_bytes"),
                host_bytes=capacity if on_cpu else None,
                ranks_per_host=math.ceil(one.cell.gpus / max(1, len(one.newest.hosts))),
                predicted_bytes=predicted.get(cell_id),
            )
        )
    return memories


def cells_out_of_memory(study: StudyFigures) -> list[Cell]:
    """Cells without a figure because memory ran out."""
    return [failure.cell for failure in study.failures if failure.outcome == Outcome.OUT_OF_MEMORY]


def _largest(one: CellFigures, name: str) -> int | None:
    known = [value for run in one.runs if (value := getattr(run, name)) is not None]
    return max(known, default=None)


def _over(part: int | None, whole: int | None, *, times: int = 1) -> float | None:
    return None if part is None or not whole else part * times / whole
