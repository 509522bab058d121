"""The cost of an uneven load of experts: cells that differ only in how tokens choose experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from reports.analysis.effect import sides
from reports.analysis.exchange import FEW_RUNS, FEWEST_RUNS, incomparable
from reports.analysis.figures import CellFigures, OfCell
from reports.analysis.study import StudyFigures
from reports.text import metric, number
from results.statistics import Metric, ratio_of_runs

Change = Literal["longer", "shorter", "no difference shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance(OfCell):
    """A cell compared with the cell whose experts get as many rows each."""

    even: CellFigures
    ratio: Metric | None = None
    """The step time over the step time of the even cell: above 1 the imbalance costs time."""
    absent: str | None = None
    """Why the ratio is missing, or cannot be judged."""
    change: Change | None = None
    """Whether a step is longer or shorter than a step of the even cell; None: not judged."""

    @property
    def busiest(self) -> float | None:
        """The rows of the busiest expert over the mean of its layer, in the newest run."""
        found = self.figures.newest.busiest_expert
        return None if found is None else found.times_mean

    @property
    def finding(self) -> str:
        """`a step takes 1.20 times as long as with W (1.18 to 1.22, range of 3): longer`."""
        even = self.even.cell.workload
        if self.ratio is None:
            return f"not compared with {even}: {self.absent}"
        told = self.change or f"not judged, as {self.absent}"
        times = number(self.ratio.value)
        return f"a step takes {times} times as long as with {even} ({metric(self.ratio).note}): {told}"


def imbalances(study: StudyFigures) -> list[Imbalance]:
    """Every cell whose even counterpart has a figure in the study; all of them are judged together."""
    found = list(_compared(study))
    judged = [one for one in found if one.absent is None]
    told = sides(
        [(one.figures.run_step_ns, one.even.run_step_ns) for one in judged], study.assumptions.smallest_effect
    )
    # The even cell is the second of each pair: where it is faster, this one's step is longer.
    words: dict[str | None, Change] = {"faster": "longer", "slower": "shorter", None: "no difference shown"}
    changes = {one.cell.id: words[side] for one, side in zip(judged, told, strict=True)}
    return [replace(one, change=changes.get(one.cell.id)) for one in found]


def _compared(study: StudyFigures) -> Iterator[Imbalance]:
    for one in study.cells.values():
        even = study.cells.get(_even_id(one) or "")
        if even is None:
            continue
        if (why := incomparable(one, even)) is not None:
            yield Imbalance(figures=one, even=even, absent=why)
            continue
        few = FEW_RUNS if min(len(one.runs), len(even.runs)) < FEWEST_RUNS else None
        ratio = ratio_of_runs(one.run_step_ns, even.run_step_ns, "x")
        yield Imbalance(figures=one, even=even, ratio=ratio, absent=few)


def missing_even(study: StudyFigures) -> list[str]:
    """The even workloads that cells of the study would be compared with, and that have no figure at their
    size."""
    ids = {one.newest.even_workload: _even_id(one) for one in study.cells.values() if _even_id(one)}
    return [workload for workload, cell_id in ids.items() if workload and cell_id not in study.cells]


def _even_id(one: CellFigures) -> str | None:
    """The id of the cell that differs only in its even load; None for an even cell, or if it is unknown."""
    even = one.newest.even_workload
    return None if even in (None, one.cell.workload) else structs.replace(one.cell, workload=even).id
