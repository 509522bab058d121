"""The state of each cell of a study: done, held by a job, failed and why, or still to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.jobs.job_status import JobStatus
from harness.launch.follow import LaunchState
from harness.launch.tally import Conditions, Tally, study_tally
from reports.analysis.scaling import NOT_REACHED
from results.grouping import grouped
from results.job import RunOptions
from results.launch import rank_log_path
from results.outcome import Outcome
from results.plan import Plan
from results.run import NOT_PROVEN, RunResult
from results.store import Study

CellState = Literal["done", "running", "waiting", "failed", "skipped", "to do"]
OTHER_CONDITIONS = "ok under other conditions"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellProgress:
    cell: str
    state: CellState
    ok: int
    planned: int
    others: str
    """The outcomes of the other runs, and why the last one failed; else why the runs are not proven."""


def progress(
    study: Study, plans: Sequence[Plan], conditions: Conditions, jobs: Sequence[JobStatus], busy: bool = False
) -> list[CellProgress]:
    """All planned cells, in the order of the plans. Writes only derived results.
    `busy`: a bench here works on the study.

    Runs that could not be pooled with new ones are counted apart. A cell is failed or skipped if the same
    `bench matrix` command would leave it out.
    """
    results = study.review().counted(study.results(keep=True))
    found = grouped((result.cell_id, result) for result in results)
    in_hand, running = _in_hand(study, jobs, busy=busy)
    tallies: dict[str, Tally] = {}
    for plan in plans:
        so_far = study_tally(study, plan, results, conditions, RunOptions())
        tallies |= {cell.id: so_far for cell in plan.cells}
    rows = []
    for cell, so_far in tallies.items():
        runs, job = found.get(cell, []), in_hand.get(cell)
        ok, repeats = so_far.ok_runs.get(cell, 0), so_far.plan.wanted(cell)
        state: CellState = "failed" if cell in so_far.closed else "to do"
        if repeats == 0:
            state = "skipped"
        elif ok >= repeats:
            state = "done"
        elif cell in running:
            state = "running"
        elif job is not None:
            state = "waiting"
        elif cell in so_far.inferred or so_far.closed.get(cell) == Outcome.SKIPPED:
            state = "skipped"
        others = so_far.closed[cell] if cell in so_far.inferred else _others(runs, so_far)
        if not others and job is not None and job.is_running and cell not in running:
            others = f"job {job.job.job_id} runs and has not reached it"
        if not others:
            unreached = NOT_REACHED if repeats == 0 else ""
            others = unreached or next(filter(None, map(_why_unproven, reversed(runs))), "")
        rows.append(CellProgress(cell=cell, state=state, ok=ok, planned=repeats, others=others))
    return rows


def _why_unproven(run: RunResult) -> str | None:
    return run.absent.get("proof") if run.unproven is None else f"{NOT_PROVEN}: {run.unproven}"


def _others(runs: Sequence[RunResult], so_far: Tally) -> str:
    """Count the runs by outcome, except runs that count as ok, and say why the last one failed."""
    kinds: Counter[str] = Counter()
    for run in runs:
        changes = so_far.changes(run) if run.outcome is Outcome.OK else ""
        kinds[f"{OTHER_CONDITIONS} ({changes})" if changes else str(run.outcome)] += 1
    kinds.pop(str(Outcome.OK), None)
    others = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    failed = [run for run in runs if run.outcome is not Outcome.OK]
    return f"{others}: {failed[-1].reason}" if failed and failed[-1].reason else others


def _in_hand(study: Study, jobs: Sequence[JobStatus], *, busy: bool) -> tuple[dict[str, JobStatus], set[str]]:
    """The live job of each cell, and the cells that run: a cell runs from the start of its launch."""
    known = {status.job.job_id: status for status in jobs if status.job.cells}
    job_of = {cell: status for status in known.values() if status.is_live for cell in status.job.cells}
    running: set[str] = set()
    for launch in study.launches() if busy or any(status.is_running for status in known.values()) else []:
        # Launches of a call, also of one that a job makes, run while a process has the study's lock.
        status = known.get(launch.job_id or "")
        runs = busy if status is None else status.is_live and status.is_running
        if runs and not study.has_attempt(launch.launch_id):
            # While its workers start, the launch is at the first cell.
            state = LaunchState.of(rank_log_path(study.launch_folder(launch.launch_id), 0))
            cell = state.cell_id or launch.slots[0].cell_id
            if status is None:
                running.add(cell)
            elif cell in job_of:
                job_of[cell] = status
                running.add(cell)
    return job_of, running
