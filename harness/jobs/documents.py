"""The records of jobs and what is submitted for them: the same for the same plan and the same jobs before."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.code import checkout
from harness.jobs.planned import PlannedJob
from harness.launch.kubernetes.manifest import Form, manifest
from harness.launch.kubernetes.profile import KubernetesProfile
from harness.plan.naming import plain_name
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import Job, Launcher, Purpose, RunOptions
from results.job_store import JobStore
from results.plan import Placement, Plan
from results.store import Study
from slurm import script
from slurm.site import SiteProfile, Times

SCRIPT, MANIFEST = "script.sh", "manifest.yaml"
_FOLLOW_UP_S = 900.0
"""Time for submitting what is left, or for writing a report."""


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
        """Those of its time limit; None if it is not known how many GPUs are paid for."""
        return self._gpu_hours(self.job.time_limit_s)

    def _gpu_hours(self, seconds: float) -> float | None:
        return None if self.job.billed_gpus is None else self.job.billed_gpus * seconds / 3600


class JobMaker:
    """Numbers and names the jobs of one call."""

    def __init__(
        self, study: Study, plan: Plan, launcher: Launcher, options: RunOptions, code: CodeVersion
    ) -> None:
        plans = study.plans()
        self.root = study.root.resolve()
        self._plan = plan
        self._number = plans.index(plan) + 1 if plan in plans else len(plans) + 1
        self._launcher: Launcher = launcher
        self._options = options
        self._code = code
        self._made = len(list(self.root.glob("jobs/*")))

    def run(self, planned: PlannedJob, time: Times, *, billed_gpus: int | None, site: object) -> Job:
        """The job of an allocation to come."""
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
            time_limit_s=time.limit_s(estimate_s),
            billed_gpus=billed_gpus,
            site=msgspec.to_builtins(site),
        )

    def follow_up(self, purpose: Purpose, time_limit_s: float, site: object) -> Job:
        """A job without cells that comes after others."""
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
        """Of the study's folder: two studies may have one name, two jobs of a user may not."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:4]


class SlurmDocuments:
    """Makes the jobs of one call and their scripts."""

    def __init__(
        self, study: Study, plan: Plan, site: SiteProfile, options: RunOptions, code: CodeVersion
    ) -> None:
        self._jobs = JobMaker(study, plan, "slurm", options, code)
        self._site = site

    def run(self, planned: PlannedJob) -> Document:
        """The job of an allocation to come."""
        site, root = self._site, self._jobs.root
        job = self._jobs.run(planned, site.time, billed_gpus=site.billed_gpus(planned.placement), site=site)
        folder = JobStore(root).folder(job.job_id)
        _require_mounts(site, root)
        text = script.job_script(
            site,
            script.Job(
                name=job.name,
                placement=job.placement,
                time_limit_s=job.time_limit_s,
                folder=root,
                log_folder=folder,
                command=self._command("harness.jobs.program", str(folder)),
                python_path=checkout(),
                requeue=job.options.retries > 0,
            ),
        )
        return Document(job=job, text=text)

    def follow_up(self, purpose: Purpose, arguments: Sequence[str], folder: Path) -> Document:
        """A small job that calls `bench` in `folder` after others."""
        job = self._jobs.follow_up(purpose, _FOLLOW_UP_S, self._site)
        text = script.follow_up_script(
            self._site,
            script.FollowUp(
                name=job.name,
                time_limit_s=_FOLLOW_UP_S,
                folder=folder,
                log_folder=JobStore(self._jobs.root).folder(job.job_id),
                command=self._command("harness.cli", *arguments),
                python_path=checkout(),
                requeue=job.options.retries > 0,
            ),
        )
        return Document(job=job, text=text)

    def _command(self, module: str, *arguments: str) -> tuple[str, ...]:
        python = self._site.python or sys.executable
        return (python, "-m", module, *arguments)


def _require_mounts(site: SiteProfile, root: Path) -> None:
    """Raises UsageError if ranks in a container would not see the study, or the code, at its path."""
    container = site.container
    if container is None:
        return
    seen = [
        Path(target) for source, target, *_ in (m.split(":") for m in container.mounts) if source == target
    ]
    seen += [Path.home()] if container.mount_home else []
    for what, path in (("the study", root), ("the code of bench", checkout())):
        if not any(path.is_relative_to(place) for place in seen):
            raise UsageError(
                f"{what} is in {path}, and the container sees nothing there: add {path}:{path} or a folder "
                f"above it to container.mounts in the profile, under the same path on both sides"
            )


class KubernetesDocuments:
    """Makes the jobs of one call and their manifests."""

    def __init__(
        self, study: Study, plan: Plan, profile: KubernetesProfile, options: RunOptions, code: CodeVersion
    ) -> None:
        self._jobs = JobMaker(study, plan, "kubernetes", options, code)
        self._profile = profile

    def run(self, planned: PlannedJob, form: Form) -> Document:
        """The job of the pods to come."""
        profile = self._profile
        billed = profile.billed_gpus(planned.placement)
        job = self._jobs.run(planned, profile.time, billed_gpus=billed, site=profile)
        folder = f"{self.study_folder}/jobs/{job.job_id}"
        return Document(job=job, text=manifest(profile, job, form=form, folder=folder))

    @property
    def study_folder(self) -> str:
        """Where pods find the study: at its own path if that is on the volume, else by its folder's name."""
        root, volume = self._jobs.root, Path(self._profile.mount_path)
        return str(root if root.is_relative_to(volume) else volume / root.name)
