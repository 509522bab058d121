"""The jobs of a call for Kubernetes, and their manifests."""

from __future__ import annotations

from pathlib import Path

from harness.jobs.documents import Document, JobMaker
from harness.jobs.planned import PlannedJob
from harness.launchers.kubernetes.manifest import Form, manifest
from harness.launchers.kubernetes.profile import KubernetesProfile
from results.environment import CodeVersion
from results.job import RunOptions
from results.plan import Plan
from results.store import Study

MANIFEST = "manifest.yaml"


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
