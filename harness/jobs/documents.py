"""Records of jobs with their numbers and names: the same plan and earlier jobs give the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from harness.jobs.planned import PlannedJob
from harness.plan.naming import plain_name
from results.environment import CodeVersion
from results.job import Job, Purpose, RunOptions
from results.job_store import JobStore
from results.outcome import Outcome
from results.plan import Placement, Plan
from results.site import TimeLimits
from results.store import Study

LONGER = 2.0
"""What a job asks for where one before it ran out of time, in parts of that one's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A job, and the script or the manifest that is submitted for it."""

    job: Job
    text: str

    @property
    def gpu_hours_expected(self) -> float | None:
        return self._gpu_hours(self.job.estimate_s)

    @property
    def gpu_hours_at_most(self) -> float | None:
        """Those of its time limit; None if the number of GPUs that it is charged for is not known."""
        return self._gpu_hours(self.job.time_limit_s)

    def _gpu_hours(self, seconds: float) -> float | None:
        return None if self.job.billed_gpus is None else self.job.billed_gpus * seconds / 3600


class JobMaker:
    """Numbers and names the jobs of one call."""

    def __init__(
        self, study: Study, plan: Plan, launcher: str, options: RunOptions, code: CodeVersion
    ) -> None:
        plans = study.numbered_plans()
        self.root = study.root.resolve()
        self._plan = plan
        self._number = next((number for number, one in plans.items() if one == plan), study.next_plan)
        self._launcher = launcher
        self._options = options
        self._code = code
        self._made = len(list(self.root.glob("jobs/*")))

    def run(self, planned: PlannedJob, time: TimeLimits, *, billed_gpus: int | None, site: object) -> Job:
        """The job of an allocation to come. Where one of its cells was in a job that ran out of time, it asks
        for longer, as far as the site allows."""
        place = planned.placement
        # Beside the cells' own launches there may be one of the baseline.
        launches = len(planned.launches) + (planned.baseline is not None)
        estimate_s = planned.estimate_s + launches * time.startup_s
        return self._job(
            f"{place.nodes}x{place.gpus_per_node}",
            placement=place,
            cells=planned.cells,
            baseline=None if planned.baseline is None else planned.baseline.id,
            estimate_s=estimate_s,
            time_limit_s=time.limit_s(estimate_s, least_s=LONGER * self._ran_out_s(planned.cells)),
            billed_gpus=billed_gpus,
            site=msgspec.to_builtins(site),
        )

    def follow_up(self, purpose: Purpose, time_limit_s: float, site: object) -> Job:
        """A job without cells that starts when other jobs have ended."""
        return self._job(
            purpose,
            purpose=purpose,
            placement=Placement(nodes=1, gpus_per_node=1),
            cells=(),
            baseline=None,
            estimate_s=time_limit_s,
            time_limit_s=time_limit_s,
            billed_gpus=0,
            site=msgspec.to_builtins(site),
        )

    def _ran_out_s(self, cells: Sequence[str]) -> float:
        """The longest limit of a job with one of these cells that ran out of it; 0.0 if none did."""
        wanted = set(cells)
        return max((job.time_limit_s for job in self._too_short if wanted & set(job.cells)), default=0.0)

    @cached_property
    def _too_short(self) -> list[Job]:
        """The jobs so far that ran out of their time, not of the user's `--max-time`."""
        store, found = JobStore(self.root), []
        for job in store.jobs():
            end, most_s = store.ended(job.job_id), job.options.max_time_s
            if (
                end is not None
                and end.outcome is Outcome.TIMED_OUT
                and (most_s or math.inf) > job.time_limit_s
            ):
                found.append(job)
        return found

    def _job(self, kind: str, **facts: Any) -> Job:
        self._made += 1
        job_id = f"{self._made:04d}-{kind}"
        return Job(
            job_id=job_id,
            name=f"{plain_name(self._plan.study)[:40]}-{self._digest}-{job_id}",
            launcher=self._launcher,
            plan=self._number,
            options=self._options,
            code=self._code,
            **facts,
        )

    @property
    def _digest(self) -> str:
        """4 digits of the study's folder: two studies may have the same name, two jobs of a user may not."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:4]
