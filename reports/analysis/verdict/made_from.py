"""The runs that a verdict is made from, their number and quality, and the points of a workload that were not
measured, or not as well as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.analysis.figures import EMULATED, CellFigures
from reports.analysis.outcomes import NOT_RUN, UNUSABLE, outcome_words
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from reports.text import count, listed
from results.cell import BASELINE_STRATEGY, label
from results.outcome import Outcome
from results.run import NOT_PROVEN

Named = tuple[str, int]
"""The label of a series, and a size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Points that are missing; each string names a strategy and its sizes: `ddp on 16 and 32`."""

    skipped: tuple[str, ...]
    failed: tuple[str, ...]
    """Failed points, with the outcome: `ddp on 64 (out of memory)`."""
    not_run: tuple[str, ...]
    """Planned points that were not run before the study ended."""
    emulated: tuple[str, ...]
    """Points with figures that make no claim, because they are stand-ins."""
    not_proven: tuple[str, ...]
    """Points with figures that make no claim, because their proof failed."""
    unproved: int
    """Cells whose training was not checked."""
    cells: int


def missing(study: StudyFigures, workload: str) -> Missing:
    """Find what is missing in all series of one workload and in its cells with figures."""
    curves = [curve for curve in study.curves if curve.key.workload == workload]
    cells = [one for one in study.cells.values() if one.cell.workload == workload]
    # How the cells of each strategy failed.
    failed: dict[str, dict[str, None]] = {}
    for curve in curves:
        for gap in curve.gaps:
            if gap.outcome is not None and gap.outcome != NOT_RUN:
                failed.setdefault(curve.key.label, {})[outcome_text(gap.outcome)] = None
    outcomes = {name: f" ({', '.join(those)})" for name, those in failed.items()}
    return Missing(
        skipped=_texts(_skipped(study, workload, curves)),
        failed=_texts(_gaps(curves, not_run=False), outcomes=outcomes),
        not_run=_texts(_gaps(curves, not_run=True)),
        emulated=_texts(_silent(cells, EMULATED)),
        not_proven=_texts(_silent(cells, NOT_PROVEN)),
        unproved=sum(cell.proof is None for cell in cells),
        cells=len(cells),
    )


def _skipped(study: StudyFigures, workload: str, curves: Sequence[Curve]) -> Iterator[Named]:
    """The skipped points that a reader may miss.

    Points that the user excluded, one device with an exchange and several with `single` are left out.
    """
    has_single = any(curve.single is not None for curve in curves)
    for group in study.skipped:
        if group.skip.excluded or group.skip.strategy == BASELINE_STRATEGY or group.skip.workload != workload:
            continue
        name = label(group.skip)
        own = [curve for curve in curves if curve.key.label == name]
        planned = {point.gpus for curve in own for point in curve.points}
        planned |= {gap.gpus for curve in own for gap in curve.gaps if not gap.skipped}
        if planned != {1}:
            yield from ((name, gpus) for gpus in group.gpus if gpus > 1 or not has_single)


def _silent(cells: Iterable[CellFigures], why: str) -> Iterator[Named]:
    """The points with figures that make no claim for this reason."""
    return ((label(one.cell), one.cell.gpus) for one in cells if one.no_claim == why)


def outcome_text(outcome: str) -> str:
    """An outcome in words: `out of memory`; for an unknown one, what was found instead."""
    return "unreadable or unfinished record" if outcome == Outcome.UNKNOWN else outcome_words(outcome)


def _gaps(curves: Iterable[Curve], *, not_run: bool) -> Iterator[Named]:
    for curve in curves:
        yield from (
            (curve.key.label, gap.gpus)
            for gap in curve.gaps
            if gap.outcome is not None and (gap.outcome == NOT_RUN) is not_run
        )


def _texts(points: Iterable[Named], *, outcomes: dict[str, str] | None = None) -> tuple[str, ...]:
    sizes: dict[str, set[int]] = {}
    for name, gpus in points:
        sizes.setdefault(name, set()).add(gpus)
    endings = outcomes or {}
    return tuple(
        f"{name} on {listed([f'{size:,}' for size in sorted(those)])}{endings.get(name, '')}"
        for name, those in sizes.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """The counted runs of a workload's measured cells."""

    cell_runs: tuple[tuple[int, int], ...]
    """The counted and the planned runs of each cell."""
    scalings: int
    """The number of kinds of scaling that the cells belong to."""
    disturbed: int
    """Counted runs that other processes disturbed."""
    disturbed_out: int
    """Runs that are left out because other processes disturbed them."""
    baseline_disturbed: bool
    """Whether some disturbed runs belong to a baseline of other cells."""
    failed: tuple[str, ...]
    """The failed runs of cells with a figure: `ddp on 2: crashed`."""

    @property
    def runs(self) -> int:
        return sum(runs for runs, _ in self.cell_runs)

    @property
    def sentence(self) -> str | None:
        """A sentence on the runs: `Made from 18 runs, 14 disturbed.`; None without runs."""
        if not self.runs:
            return None
        planned = sum(max(pair) for pair in self.cell_runs)
        if self.runs == planned:
            counted = count(self.runs, "run")
        elif len(set(self.cell_runs)) == 1:
            there, asked = self.cell_runs[0]
            counted = f"{count(self.runs, 'run')} ({there} of {count(asked, 'run')} a cell)"
        else:
            counted = f"{self.runs:,} of {count(planned, 'planned run')}"
        both = " of weak and strong scaling" if self.scalings > 1 else ""
        which = " (some of the baseline)" if self.baseline_disturbed else ""
        disturbed = f", {self.disturbed:,} disturbed{which}" if self.disturbed else ""
        out = [count(self.disturbed_out, "disturbed run")] if self.disturbed_out else []
        if self.failed:
            out.append(f"{count(len(self.failed), 'failed run')} ({listed(self.failed)})")
        not_counted = f"; not counted: {' and '.join(out)}" if out else ""
        return f"Made from {counted}{both}{disturbed}{not_counted}."


def made_from(study: StudyFigures, workload: str) -> MadeFrom:
    """Count the runs of one workload."""
    cells = [one for one in study.cells.values() if one.cell.workload == workload and one.no_claim is None]
    claims = (point.efficiency for curve in study.curves for point in curve.points)
    baselines = {claim.baseline.figures.cell.id for claim in claims if claim.baseline}
    return MadeFrom(
        cell_runs=tuple((len(one.runs), one.pool.planned) for one in cells),
        scalings=len({curve.key.kind for curve in study.curves if curve.key.workload == workload}),
        disturbed=sum(run.disturbed for one in cells for run in one.runs),
        disturbed_out=sum(one.pool.disturbed_out for one in cells),
        baseline_disturbed=any(one.disturbed for one in cells if one.cell.id in baselines),
        failed=tuple(
            f"{label(one.cell)} on {one.cell.gpus:,}: "
            f"{UNUSABLE if one.run.outcome is Outcome.OK else outcome_text(one.run.outcome)}"
            for one in study.lost
            if one.cell.workload == workload
        ),
    )
