"""The rows of the exported tables: a cell, a run or a rank, with all that is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from reports.analysis.budget import CellBudget, budget
from reports.analysis.communication import CellCommunication, LinkPeaks, communication, link_peaks
from reports.analysis.cost import CellCost, cell_costs
from reports.analysis.exchange import ExchangeRow, exchange_parts
from reports.analysis.figures import CellFigures
from reports.analysis.losses import loss_steps, trained_samples
from reports.analysis.memory import CellMemory, cell_memories
from reports.analysis.outcomes import Failure
from reports.analysis.pooling import Pool
from reports.analysis.scaling import CurvePoint
from reports.analysis.study import StudyFigures
from results.cell import Cell
from results.outcome import Outcome
from results.plan import Scaling, Skip
from results.run import RunResult


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """A planned cell with all that is known of it."""

    study: StudyFigures
    pool: Pool
    figures: CellFigures | None
    budget: CellBudget | None
    failure: Failure | None
    exchange: ExchangeRow | None
    cost: CellCost | None
    weak: CurvePoint | None
    strong: CurvePoint | None
    memory: CellMemory | None
    predicted_peak_bytes: int | None
    peaks: LinkPeaks
    """The peak rates of the study's links."""

    @cached_property
    def network(self) -> CellCommunication | None:
        return communication(self.figures, self.peaks) if self.figures else None

    @property
    def cell(self) -> Cell:
        return self.pool.cell

    @property
    def outcome(self) -> str:
        return self.failure.outcome if self.failure else Outcome.OK

    @property
    def scaling(self) -> str:
        return " ".join(self.study.scalings.get(self.cell.id, ()))

    def largest(self, path: str) -> float | None:
        """Over the counted runs; None if none has it."""
        return max(self._known(path), default=None)

    def mean(self, path: str) -> float | None:
        """Average over the counted runs; None if one of them lacks the figure."""
        known = self._known(path)
        return sum(known) / len(known) if known and len(known) == len(self.pool.runs) else None

    def _known(self, path: str) -> list[float]:
        values = (at(path, run) for run in self.pool.runs)
        return [value for value in values if isinstance(value, int | float)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run of a planned cell."""

    study: StudyFigures
    cell: Cell
    run: RunResult
    counted: bool
    """Whether the cell's figure is over this run too."""

    @property
    def loss_last_samples(self) -> int | None:
        return trained_samples(self.cell, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A rank of a counted run."""

    study: StudyFigures
    cell: Cell
    run: RunResult
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """One loss of a run that recorded its losses."""

    study: StudyFigures
    cell: Cell
    run: RunResult
    step: int
    """The last step that it is the mean of, from 1, the very first of the training."""
    loss: float

    @property
    def samples(self) -> int:
        """Samples of all replicas that were trained on until then."""
        return self.step * self.cell.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRow:
    """A point of the matrix that is not run."""

    study: StudyFigures
    skip: Skip
    gpus: int


def cell_rows(study: StudyFigures) -> list[CellRow]:
    """Every planned cell, in the order of the plans."""
    failures = {failure.cell.id: failure for failure in study.failures}
    exchanges = {row.cell.id: row for part in exchange_parts(study) for row in part.rows}
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    memories = {one.cell.id: one for one in cell_memories(study)}
    predicted, peaks = study.predicted_bytes, link_peaks(study.cells.values())
    points = {kind: _points(study, kind) for kind in ("weak", "strong")}
    return [
        CellRow(
            study=study,
            pool=pool,
            figures=(figures := study.cells.get(cell_id)),
            budget=budget(figures) if figures else None,
            failure=failures.get(cell_id),
            exchange=exchanges.get(cell_id),
            cost=costs.get(cell_id),
            weak=points["weak"].get(cell_id),
            strong=points["strong"].get(cell_id),
            memory=memories.get(cell_id),
            predicted_peak_bytes=predicted.get(cell_id),
            peaks=peaks,
        )
        for cell_id, pool in study.pools.items()
    ]


def run_rows(study: StudyFigures) -> list[RunRow]:
    """Every run of every planned cell, oldest first."""
    return [
        RunRow(study=study, cell=pool.cell, run=run, counted=run in pool.runs)
        for pool in study.pools.values()
        for run in sorted(
            (*pool.runs, *(left.run for left in pool.left_out), *pool.lost), key=lambda run: run.run_id
        )
    ]


def rank_rows(study: StudyFigures) -> list[RankRow]:
    """Every rank of every counted run that says something of its ranks."""
    return [
        RankRow(study=study, cell=pool.cell, run=run, rank=rank)
        for pool in study.pools.values()
        for run in pool.runs
        if run.ranks is not None
        for rank in range(len(run.ranks.compute_ns))
    ]


def loss_rows(study: StudyFigures) -> list[LossRow]:
    """List every loss of every counted run, including synthetic samples, whose loss shows no learning."""
    return [
        LossRow(study=study, cell=pool.cell, run=run, step=step, loss=loss)
        for pool in study.pools.values()
        for run in pool.runs
        for step, loss in zip(loss_steps(run), run.losses, strict=True)
    ]


def skip_rows(study: StudyFigures) -> list[SkipRow]:
    """Every point that is not run, a row a size."""
    return [
        SkipRow(study=study, skip=group.skip, gpus=gpus) for group in study.skipped for gpus in group.gpus
    ]


def _points(study: StudyFigures, kind: Scaling) -> dict[str, CurvePoint]:
    curves = [curve for curve in study.curves if curve.key.kind == kind]
    return {point.figures.cell.id: point for curve in curves for point in curve.points}


def at(path: str, value: object) -> object:
    """Follow a dotted path; None as soon as a step of it is None."""
    for name in path.split("."):
        if value is None:
            return None
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value
