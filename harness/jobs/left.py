"""The launches and the jobs that a study still needs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from harness.jobs.planned import PlannedJob, planned_jobs
from harness.launch.tally import Conditions, tally
from harness.plan.schedule import PlannedLaunch
from results.environment import CodeVersion
from results.job import RunOptions
from results.plan import Plan
from results.store import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Launches that are still to be run, and the jobs that run them."""

    launches: list[PlannedLaunch]
    jobs: list[PlannedJob]


def left(
    study: Study,
    plan: Plan,
    options: RunOptions,
    code: CodeVersion,
    *,
    per_cell: bool,
    held: Set[str] = frozenset(),
) -> Left:
    """The runs that are missing under this code, without the cells in `held`, which live jobs have.

    The hosts of the jobs are not known here, so that only the code of earlier runs is compared; the job that
    runs a cell compares the other conditions.
    """
    so_far = tally(
        study.results(),
        plan,
        Conditions.elsewhere(code),
        rerun_failed=options.rerun_failed,
        prune=options.prune,
    )
    so_far.closed |= dict.fromkeys(held, "a job has it")
    launches = so_far.planned(options.isolation)
    jobs = planned_jobs(plan, launches, per_cell=per_cell, known_step_ns=so_far.step_ns)
    return Left(launches=launches, jobs=jobs)
