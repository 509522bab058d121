"""The launches that a study still needs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from harness.launch.tally import Conditions, tally
from harness.launch.training import trained_cells
from harness.plan.estimate import Earlier
from harness.plan.schedule import PlannedLaunch
from results.environment import CodeVersion
from results.job import RunOptions
from results.plan import Plan
from results.store import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Launches that are still to be run, and what runs so far took."""

    launches: list[PlannedLaunch]
    earlier: Mapping[str, Earlier]
    """By cell id."""


def left(
    study: Study,
    plan: Plan,
    options: RunOptions,
    code: CodeVersion,
    *,
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
        trained=trained_cells(study, plan),
    )
    so_far.closed |= dict.fromkeys(held, "a job has it")
    return Left(launches=so_far.planned(options.isolation), earlier=so_far.earlier)
