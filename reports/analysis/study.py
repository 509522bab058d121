"""All figures of a study in one value, from which the page, the tables and the command line are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from reports.analysis.assumptions import Assumptions
from reports.analysis.figures import CellFigures, cell_figures
from reports.analysis.outcomes import (
    Failure,
    RunCounts,
    SkippedSizes,
    failures,
    failures_text,
    run_counts,
    skipped_sizes,
)
from reports.analysis.pooling import LeftOut, Pool, pool
from reports.analysis.scaling import Curve, curves
from reports.analysis.series import SeriesSetting, merged_series, setting_labels, standing_skips
from reports.text import capital, count, devices_word, moment
from results.cell import Cell
from results.errors import bench_call
from results.features import MEASURED, Kind
from results.grouping import grouped
from results.outcome import Outcome
from results.plan import Plan, Scaling
from results.record import StepColumns
from results.review import EXCLUDED, Review
from results.run import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Timings of the same cell in several allocations."""

    cell_id: str
    ratios: Mapping[str, float]
    """The mean step time of each allocation, such as `slurm 17`, over the median allocation's."""
    others: int
    """Allocations with other machines, software or code, which are not compared."""


def drift(results: Sequence[RunResult]) -> Drift | None:
    """The timings of the cell that most allocations timed; None without two allocations to compare.

    Allocations are compared within the environment that most of them have.
    """
    cells: dict[str, list[RunResult]] = {}
    for result in sorted(results, key=lambda result: (result.ranks_expected, result.cell_id, result.run_id)):
        allocated = result.environment is not None and result.environment.allocation is not None
        if allocated and result.outcome is Outcome.OK and result.step_ns is not None:
            cells.setdefault(result.cell_id, []).append(result)
    drifts = [found for cell_id, runs in cells.items() if (found := _drift(cell_id, runs)) is not None]
    return max(drifts, key=lambda found: len(found.ratios), default=None)


def _drift(cell_id: str, runs: Sequence[RunResult]) -> Drift | None:
    by_environment: dict[object, dict[str, list[RunResult]]] = {}
    for run in runs:
        assert run.environment is not None
        settings = tuple(sorted((run.environment.settings or {}).items()))
        groups = by_environment.setdefault((run.fingerprint, settings), {})
        groups.setdefault(str(run.environment.allocation), []).append(run)
    largest = max(by_environment.values(), key=len)
    if len(largest) < 2:
        return None
    times = {
        name: fmean(run.step_ns.value for run in group if run.step_ns) for name, group in largest.items()
    }
    middle = median(times.values())
    return Drift(
        cell_id=cell_id,
        ratios={name: time / middle for name, time in times.items()},
        others=sum(len(groups) for groups in by_environment.values()) - len(largest),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFigures:
    """A study, analysed."""

    name: str
    plans: tuple[Plan, ...]
    cells: Mapping[str, CellFigures]
    """The cells with a figure, by id, in the order of the plans."""
    pools: Mapping[str, Pool]
    """Every planned cell, by id."""
    scalings: Mapping[str, tuple[Scaling, ...]]
    """The kinds of series that a cell is in, by its id."""
    settings: Mapping[SeriesSetting, str]
    """The values in which each setting differs from the others; an empty string for a single setting."""
    curves: tuple[Curve, ...]
    failures: tuple[Failure, ...]
    skipped: tuple[SkippedSizes, ...]
    drift: Drift | None
    """How much the allocations of a scheduler differ; None without two of them."""
    strangers: tuple[str, ...]
    """Ids of cells that have results, are in no plan and are not a baseline of allocations."""
    assumptions: Assumptions
    """The assumptions that the caller gave."""
    kind: Kind = MEASURED
    """The kind whose sections its page has."""
    complete: frozenset[str] = frozenset()
    """Ids of the cells that need no run, whatever their runs."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """The figures that features have read for their sections, by name."""
    placed: tuple[str, ...] = ()
    """The words of a `bench matrix` call by which it finds the study and its cluster; none: `--name NAME`."""
    steps: Callable[[RunResult], Mapping[int, StepColumns]] = lambda run: {}
    """Reads the single steps of a run, by rank, from the files of its study; by default it finds no steps."""
    measured: Callable[[RunResult], Mapping[int, Mapping[str, Any]]] = lambda run: {}
    """Reads what the ranks of a run of another package's kind have measured, by rank; nothing under a
    redaction."""
    compare_over: str | None = None
    """The setting over which the reader compares cells, although their work differs."""
    running: tuple[Mapping[str, str], ...] = ()
    """The state of each cell while the study runs, as `bench status` prints it, by head; empty if it does
    not run."""
    review: Review = field(default_factory=Review)
    approval: str = ""
    """The last approval by a reviewer, and what has changed since, in words; empty without one."""

    @property
    def devices_word(self) -> str:
        """The unit of a size in this study: `GPUs` or `ranks (CPU)`."""
        return devices_word({pool.cell.device for pool in self.pools.values()} or {"cuda"})

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(left for pool in self.pools.values() for left in pool.left_out)

    @property
    def lost(self) -> tuple[tuple[Cell, RunResult], ...]:
        """The failed runs of cells that have a figure from other runs, with their cells."""
        return tuple((pool.cell, run) for pool in self.pools.values() if pool.runs for run in pool.lost)

    @property
    def review_text(self) -> str:
        """`2 of 36 runs excluded by review; approved by Ann on ...`; empty for neither."""
        excluded = sum(len(pool.excluded) for pool in self.pools.values())
        runs = count(sum(len(pool.every) for pool in self.pools.values()), "run")
        words = f"{excluded:,} of {runs} {EXCLUDED}" if excluded else ""
        return "; ".join(text for text in (words, self.approval) if text)

    @property
    def run_counts(self) -> RunCounts:
        return run_counts((run for pool in self.pools.values() for run in pool.every), self.review.excluded)

    @property
    def cells_text(self) -> str:
        """`cells with a figure: 5 of 8; without one: 2 crashed (mlp), 1 not run (mlp)`."""
        without = [one for one in self.failures if one.cell.id not in self.complete]
        missing = f"; without one: {failures_text(without)}" if without else ""
        return f"cells with a figure: {len(self.cells):,} of {len(self.pools):,}{missing}"

    def logs_call(self, cell_id: str) -> str:
        """The command that prints what the ranks of a cell's last run have printed."""
        return bench_call("logs", self.placed[1] if self.placed else self.name, "--cell", cell_id)

    @property
    def commands(self) -> tuple[str, ...]:
        """The calls that planned it, oldest first; old plans do not record them."""
        return tuple(dict.fromkeys(bench_call(*plan.command) for plan in self.plans if plan.command))

    @property
    def predicted_bytes(self) -> Mapping[str, int]:
        """Memory of the fullest rank in closed form, by cell, from the newest plan that has it."""
        return {cell: size for plan in self.plans for cell, size in plan.predicted_bytes.items()}

    @property
    def unpredicted(self) -> Mapping[str, str]:
        """Why memory is not predicted, by workload, from the newest plan that says so."""
        return {workload: why for plan in self.plans for workload, why in plan.unpredicted.items()}

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """The runs that the figures are made of."""
        return tuple(run for one in self.cells.values() for run in one.runs)


def analyse(
    name: str,
    plans: Sequence[Plan],
    results: Sequence[RunResult],
    assumptions: Assumptions | None = None,
    review: Review | None = None,
) -> StudyFigures:
    """The figures of the study called `name`, from all its plans, the results of all its runs, and the
    review that excludes some of them."""
    review = review or Review()
    assumptions = assumptions or Assumptions()
    pools = _pools(plans, results, review.excluded)
    kind = plans[-1].kind if plans else MEASURED
    unproven = assumptions.unproven or not kind.proves
    found = {
        cell_id: figures
        for cell_id, runs in pools.items()
        if (figures := cell_figures(runs, unproven=unproven)) is not None
    }
    drifted = drift(review.counted(results))
    known = pools.keys() | ({drifted.cell_id} if drifted else set())
    failed = failures(plans, pools.values())
    return StudyFigures(
        name=name,
        plans=tuple(plans),
        cells=found,
        pools=pools,
        scalings=_scalings(plans),
        settings=setting_labels(one.cell for one in pools.values()),
        curves=tuple(curves(merged_series(plans), found, {one.cell.id: one for one in failed})),
        failures=tuple(failed),
        skipped=tuple(skipped_sizes(standing_skips(plans))),
        drift=drifted,
        strangers=tuple(sorted({result.cell_id for result in results} - known)),
        assumptions=assumptions,
        review=review,
        approval=review.approval(results)[0],
        kind=kind,
    )


def _pools(
    plans: Sequence[Plan], results: Sequence[RunResult], excluded: Mapping[str, str]
) -> dict[str, Pool]:
    """The runs of every planned cell, by its id, with the most repeats that a plan wants."""
    by_cell = grouped((result.cell_id, result) for result in results)
    planned = grouped((cell.id, (cell, plan)) for plan in plans for cell in plan.cells)
    return {
        cell_id: pool(
            of[-1][0],
            by_cell.get(cell_id, []),
            planned=max(plan.wanted(cell_id) for _, plan in of),
            excluded=excluded,
            # Runs of a later plan without rounds have other repeats.
            by_rounds=of[-1][1].round is not None,
        )
        for cell_id, of in planned.items()
    }


def _scalings(plans: Iterable[Plan]) -> dict[str, tuple[Scaling, ...]]:
    """The kinds of series that each cell is in, by its id."""
    kinds = grouped(
        (cell_id, series.kind) for plan in plans for series in plan.series for cell_id in series.cells
    )
    return {cell_id: tuple(sorted(set(found), reverse=True)) for cell_id, found in kinds.items()}


def summary(study: StudyFigures) -> str:
    """`Scaling of distributed training; cells with a figure: 5 of 6. ... Planned 2026-01-02 03:04 UTC.`"""
    planned = ", ".join(moment(plan.created_at) for plan in study.plans)
    counts = f"{study.cells_text}. {capital(study.run_counts.text)}"
    return f"Scaling of distributed training; {counts}. Planned {planned}."
