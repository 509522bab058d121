"""The records and scripts of a study's Slurm jobs: the same for the same plan and the same jobs before."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.code import checkout
from harness.jobs.planned import PlannedJob
from harness.plan.naming import plain_name
from results.environment import CodeVersion
from results.job import Job, Purpose, RunOptions
from results.job_store import JobStore
from results.plan import Placement, Plan
from results.store import Study
from slurm import script
from slurm.site import SiteProfile

SCRIPT = "script.sh"
_SMALL = Placement(nodes=1, gpus_per_node=1)
_FOLLOW_UP_S = 900.0
"""Time for submitting what is left, or for writing a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A job and the script that is submitted for it."""

    job: Job
    script: str

    @property
    def gpu_hours_expected(self) -> float | None:
        return self._gpu_hours(self.job.estimate_s)

    @property
    def gpu_hours_at_most(self) -> float | None:
        """Those of its time limit; None if it is not known how many GPUs are paid for."""
        return self._gpu_hours(self.job.time_limit_s)

    def _gpu_hours(self, seconds: float) -> float | None:
        return None if self.job.billed_gpus is None else self.job.billed_gpus * seconds / 3600


class Documents:
    """Makes the jobs of one call."""

    def __init__(
        self, study: Study, plan: Plan, site: SiteProfile, options: RunOptions, code: CodeVersion
    ) -> None:
        self._study = study
        self._plan = plan
        plans = study.plans()
        self._number = plans.index(plan) + 1 if plan in plans else len(plans) + 1
        self._site = site
        self._options = options
        self._code = code
        self._folder = study.root.resolve()
        self._made = len(list(self._folder.glob("jobs/*")))

    def run(self, planned: PlannedJob) -> Document:
        """The job of an allocation to come."""
        limit_s = self._site.time.limit_s(planned.estimate_s)
        job = self._job(
            "run",
            placement=planned.placement,
            cells=planned.cells,
            estimate_s=planned.estimate_s,
            time_limit_s=limit_s,
            billed_gpus=self._site.billed_gpus(planned.placement),
            baseline=None if planned.baseline is None else planned.baseline.id,
        )
        folder = JobStore(self._folder).folder(job.job_id)
        text = script.job_script(
            self._site,
            script.Job(
                name=job.name,
                placement=planned.placement,
                time_limit_s=limit_s,
                folder=self._folder,
                log_folder=folder,
                command=self._command("harness.jobs.program", str(folder)),
                requeue=self._options.retries > 0,
            ),
        )
        return Document(job=job, script=text)

    def follow_up(self, purpose: Purpose, arguments: Sequence[str], folder: Path) -> Document:
        """A small job that calls `bench` in `folder` after others."""
        job = self._job(purpose, placement=_SMALL, time_limit_s=_FOLLOW_UP_S, billed_gpus=0)
        text = script.follow_up_script(
            self._site,
            script.FollowUp(
                name=job.name,
                time_limit_s=_FOLLOW_UP_S,
                folder=folder,
                log_folder=JobStore(self._folder).folder(job.job_id),
                command=self._command("harness.cli", *arguments),
            ),
        )
        return Document(job=job, script=text)

    def _job(
        self,
        purpose: Purpose,
        *,
        placement: Placement,
        time_limit_s: float,
        billed_gpus: int | None,
        **more: object,
    ) -> Job:
        self._made += 1
        kind = f"{placement.nodes}x{placement.gpus_per_node}" if purpose == "run" else purpose
        job_id = f"{self._made:04d}-{kind}"
        return Job(
            job_id=job_id,
            purpose=purpose,
            name=f"{plain_name(self._plan.study)[:40]}-{self._digest}-{job_id}",
            launcher="slurm",
            placement=placement,
            plan=self._number,
            options=self._options,
            code=self._code,
            time_limit_s=time_limit_s,
            billed_gpus=billed_gpus,
            site=msgspec.to_builtins(self._site),
            **{"cells": (), "baseline": None, "estimate_s": time_limit_s, **more},  # type: ignore[arg-type]
        )

    @property
    def _digest(self) -> str:
        """Of the study's folder: two studies may have one name, two jobs of a user may not."""
        return hashlib.sha256(str(self._folder).encode()).hexdigest()[:4]

    def _command(self, module: str, *arguments: str) -> tuple[str, ...]:
        python = self._site.python or sys.executable
        return ("env", f"PYTHONPATH={checkout()}", python, "-m", module, *arguments)
