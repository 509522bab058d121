"""Cells without a figure, and the reasons: a missing figure is a result too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from reports.analysis.pooling import Pool
from reports.text import count, listed
from results.cell import Cell, inferred_out_of_memory, pruning_reason
from results.grouping import grouped
from results.outcome import Outcome
from results.plan import Plan, Skip
from results.run import RunResult

NOT_RUN = "not run"
"""The state of a cell that was planned and has no run."""
UNUSABLE = "unusable"
"""The state of a cell whose newest run succeeded and still has no figure."""
EXCLUDED = "excluded"
"""The state of a cell of which reviewers have excluded all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A cell without one successful run."""

    cell: Cell
    outcome: str
    """The newest run's outcome, or `not run`, or `skipped`, or `unusable`, or `excluded`."""
    reason: str
    runs: int
    """Runs that were tried."""

    @property
    def text(self) -> str:
        """The outcome and the reason: `out of memory: rank 1: ...`."""
        return f"{outcome_words(self.outcome)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """The number of runs by their end: each run is ok, failed or excluded."""

    ok: int
    disturbed: int
    """Ok runs that other processes disturbed, in a figure or not."""
    failed: Mapping[str, int]
    """Runs without success by their outcome, `cancelled` too, the most frequent first."""
    excluded: int
    """Runs that reviewers excluded."""

    @property
    def text(self) -> str:
        """`12 runs: 10 ok, 2 of them disturbed; 1 crashed, 1 cancelled`."""
        total = self.ok + sum(self.failed.values()) + self.excluded
        disturbed = f", {self.disturbed:,} of them disturbed" if self.disturbed else ""
        failed = [f"{number:,} {outcome_words(outcome)}" for outcome, number in self.failed.items()]
        excluded = [f"{self.excluded:,} excluded by review"] if self.excluded else []
        parts = (f"{self.ok:,} ok{disturbed}", ", ".join(failed), *excluded)
        return f"{count(total, 'run')}: {'; '.join(filter(None, parts))}"


def run_counts(runs: Iterable[RunResult], excluded: Collection[str] = ()) -> RunCounts:
    """Count runs, as the terminal, the page and `bench status` show them; `excluded` are ids of runs."""
    every = list(runs)
    counted = [run for run in every if run.run_id not in excluded]
    ok = [run for run in counted if run.outcome is Outcome.OK]
    failed = Counter(str(run.outcome) for run in counted if run.outcome is not Outcome.OK)
    return RunCounts(
        ok=len(ok),
        disturbed=sum(run.disturbed for run in ok),
        failed=dict(failed.most_common()),
        excluded=len(every) - len(counted),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSizes:
    """Points of the matrix that were skipped for one reason and differ only in gpus."""

    skip: Skip
    """The first of them."""
    gpus: tuple[int, ...]


def failures(plans: Iterable[Plan], pools: Collection[Pool]) -> list[Failure]:
    """The cells that have no figure."""
    plans = list(plans)
    inferred = pruned(plans, (run for pool in pools for run in (*pool.runs, *pool.lost)))
    stepless = {cell.id for plan in plans if not plan.kind.has_steps for cell in plan.cells}
    return [
        _failure(pool, inferred.get(pool.cell.id))
        for pool in pools
        if not _needs_none(pool, has_steps=pool.cell.id not in stepless)
    ]


def _needs_none(pool: Pool, *, has_steps: bool) -> bool:
    """Whether a cell has its figure, has a good run and no steps, or is one that the study has not grown
    to."""
    done = not has_steps and any(run.outcome is Outcome.OK for run in pool.lost)
    return bool(pool.runs) or done or (pool.planned == 0 and not pool.every)


def _failure(pool: Pool, inferred: str | None) -> Failure:
    outcome: str = NOT_RUN
    reason = "the study ended before it; run the same command again to continue"
    if inferred is not None:
        outcome, reason = Outcome.SKIPPED, inferred
    elif pool.lost:
        newest = pool.lost[-1]
        outcome = UNUSABLE if newest.outcome is Outcome.OK else newest.outcome
        reason = reason_of(newest)
    elif pool.excluded:
        outcome, reason = EXCLUDED, pool.excluded[-1].reason
    return Failure(cell=pool.cell, outcome=outcome, reason=reason, runs=len(pool.lost))


def pruned(plans: Iterable[Plan], results: Iterable[RunResult]) -> dict[str, str]:
    """Why planned cells without a run need none, by id: a smaller batch of the same plan ran out of memory.

    Runs of the plan leave these cells out. A cell that was run nevertheless has its own outcome.
    """
    newest: dict[str, Outcome] = {}
    for result in sorted(results, key=lambda result: (result.started_at or "", result.run_id)):
        if newest.get(result.cell_id) is not Outcome.OK:
            newest[result.cell_id] = result.outcome
    exhausted = {cell_id for cell_id, outcome in newest.items() if outcome is Outcome.OUT_OF_MEMORY}
    return {
        cell_id: pruning_reason(cause)
        for plan in plans
        for cell_id, cause in inferred_out_of_memory(plan.cells, exhausted).items()
        if cell_id not in newest
    }


def skipped_sizes(skips: Iterable[Skip]) -> list[SkippedSizes]:
    """Skips grouped where only the size differs, sizes ascending."""
    groups = grouped(((skip.series_id, skip.reason), skip) for skip in skips)
    return [
        SkippedSizes(skip=group[0], gpus=tuple(sorted(skip.gpus for skip in group)))
        for group in groups.values()
    ]


def failures_text(failures: Iterable[Failure]) -> str:
    """Count failures by outcome, and name their workloads: `3 crashed (mlp), 1 not run (gpt-nano)`."""
    found = grouped((one.outcome, one) for one in failures)
    clauses = []
    for outcome, those in sorted(found.items(), key=lambda pair: -len(pair[1])):
        workloads = listed(list(dict.fromkeys(one.cell.workload for one in those)))
        clauses.append(f"{len(those):,} {outcome_words(outcome)} ({workloads})")
    return ", ".join(clauses)


def outcome_words(outcome: str) -> str:
    """An outcome as a reader reads it: `out of memory`; for an unknown one, what was found instead."""
    return "unreadable or unfinished record" if outcome == Outcome.UNKNOWN else outcome.replace("_", " ")


def reason_of(run: RunResult) -> str:
    """The reason why a run does not count for a figure."""
    if run.reason is not None:
        return run.reason
    if run.proof is not None and not run.proof.passed:
        return f"it did not train as it should: {run.proof.detail}"
    if run.outcome is Outcome.OK:
        return "the run left no step time"
    return "no reason was recorded; the launch's log may say more"
