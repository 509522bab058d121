"""The runs that a verdict is made from: how many, how good, and which are not in it."""

from __future__ import annotations

from dataclasses import dataclass

from reports.analysis.outcomes import UNUSABLE
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.missing import outcome_text
from reports.text import count, listed
from results.cell import label
from results.outcome import Evidence, Outcome
from results.run import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """The counted runs of a workload's measured cells."""

    cell_runs: tuple[tuple[int, int], ...]
    """Of each cell the counted and the planned runs."""
    scalings: int
    """How many kinds of scaling the cells are of."""
    disturbed: int
    """Runs that other processes disturbed."""
    baseline_disturbed: bool
    """Whether one of them is of a cell that others are measured against."""
    failed: tuple[str, ...]
    """Of cells with a figure, each failed run: `ddp on 2: crashed`."""

    @property
    def runs(self) -> int:
        return sum(runs for runs, _ in self.cell_runs)

    @property
    def sentence(self) -> str | None:
        """`Made from 18 runs, 14 disturbed.`; None if there is none."""
        if not self.runs:
            return None
        both = " of weak and strong scaling" if self.scalings > 1 else ""
        return f"Made from {self._counted}{both}{self._disturbed}{self._failed}."

    @property
    def _counted(self) -> str:
        planned = sum(max(pair) for pair in self.cell_runs)
        if self.runs == planned:
            return count(self.runs, "run")
        if len(set(self.cell_runs)) == 1:
            there, asked = self.cell_runs[0]
            return f"{count(self.runs, 'run')} ({there} of {count(asked, 'run')} a cell)"
        return f"{self.runs:,} of {count(planned, 'planned run')}"

    @property
    def _disturbed(self) -> str:
        if not self.disturbed:
            return ""
        which = " (some of the baseline)" if self.baseline_disturbed else ""
        return f", {self.disturbed:,} disturbed{which}"

    @property
    def _failed(self) -> str:
        if not self.failed:
            return ""
        return f"; not counted: {count(len(self.failed), 'failed run')} ({listed(self.failed)})"


def made_from(study: StudyFigures, workload: str) -> MadeFrom:
    """Of one workload."""
    cells = [
        one
        for one in study.cells.values()
        if one.cell.workload == workload and one.evidence is Evidence.MEASURED
    ]
    claims = (point.efficiency for curve in study.curves for point in curve.points)
    baselines = {claim.baseline.figures.cell.id for claim in claims if claim.baseline}
    return MadeFrom(
        cell_runs=tuple((len(one.runs), one.pool.planned) for one in cells),
        scalings=len({curve.key.kind for curve in study.curves if curve.key.workload == workload}),
        disturbed=sum(run.disturbed for one in cells for run in one.runs),
        baseline_disturbed=any(one.disturbed for one in cells if one.cell.id in baselines),
        failed=tuple(
            f"{label(one.cell)} on {one.cell.gpus:,}: {_outcome(one.run)}"
            for one in study.lost
            if one.cell.workload == workload
        ),
    )


def _outcome(run: RunResult) -> str:
    return UNUSABLE if run.outcome is Outcome.OK else outcome_text(run.outcome)
