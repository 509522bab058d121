"""The jobs of a call for Slurm, and their scripts: the same for the same plan and the same jobs before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.jobs.documents import Document, JobMaker
from harness.jobs.planned import PlannedJob
from harness.machine.code import checkout
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import Purpose, RunOptions
from results.job_store import JobStore
from results.plan import Plan
from results.store import Study
from slurm import script
from slurm.site import SiteProfile

SCRIPT = "script.sh"
_FOLLOW_UP_S = 900.0
"""Time for submitting what is left, or for writing a report."""


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
            script.ScriptJob(
                name=job.name,
                placement=job.placement,
                time_limit_s=job.time_limit_s,
                folder=root,
                log_folder=folder,
                command=self._command("harness.launchers.program", str(folder)),
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
