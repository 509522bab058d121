"""What a study still wants of a cluster."""

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
    """The launches that are to come, and the jobs that run them."""

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
    """What no run has done yet under this code, and none of the jobs that have the cells in `held` will do.

    Where the runs were made is not known here: of their conditions the code alone is compared, and the job
    that comes to a cell looks at the rest.
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
