"""A study on Kubernetes: its jobs as manifests, written beside it and, if that is wanted, applied."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.jobs.documents import (
    COST_HEADS,
    COST_NUMERIC,
    Document,
    JobMaker,
    cost_rows,
    require_within_budget,
)
from harness.jobs.job_status import held_by_jobs
from harness.jobs.planned import PlannedJob, baseline_of
from harness.launchers.job_call import JobCall
from harness.launchers.kubernetes.job_status import KubernetesJobStatus
from harness.launchers.kubernetes.manifest import MANIFEST, Form, manifest
from harness.launchers.kubernetes.profile import PROFILE_FILE, KubernetesProfile, object_name
from harness.launchers.launcher import MatrixCall, WorkerHosts
from harness.launchers.plan_text import plan_header
from harness.launchers.study_jobs import job_statuses
from harness.launchers.registry import job_statuses
from harness.plan.options import read_job_time_s
from harness.plan.study_file import StudyFile
from results.environment import CodeVersion
from results.errors import BenchError, UsageError, bench_call
from results.job import RunOptions, Submission
from results.job_store import JobStore
from results.plan import Plan
from results.store import Study, utc_now

TIMEOUT_S = 60.0
_COMMAND = ("kubectl", "apply", "-f", "-")


class KubectlError(BenchError):
    """kubectl could not be run, failed, or did not answer."""


def apply(manifest: str, *, timeout_s: float = TIMEOUT_S) -> tuple[str, ...]:
    """Make the objects of a manifest, or bring those that exist to what it says.

    Returns what kubectl says, a line an object. Raises KubectlError with kubectl's own words; when it has not
    answered in time, some of the objects may be there, and applying the same manifest again does no harm.
    """
    command = " ".join(_COMMAND)
    try:
        done = subprocess.run(
            _COMMAND, input=manifest.encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KubectlError(
            f"no answer in {timeout_s:g} s to: {command}; run it on the manifest again by hand"
        ) from error
    except FileNotFoundError as error:
        raise KubectlError(
            "there is no kubectl here: leave out --apply, and apply the manifest on a machine with one"
        ) from error
    except OSError as error:
        raise KubectlError(f"cannot run kubectl: {error.strerror}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split()) or "it said nothing"
        raise KubectlError(f"{command} ended with {done.returncode}: {said}")
    return tuple(done.stdout.decode(errors="replace").splitlines())


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


def profile_of(options: StudyFile) -> KubernetesProfile:
    """The profile of the cluster: the file's, with the time limit that a flag says. Raises UsageError."""
    if options.site is None:
        raise UsageError(
            "--launcher kubernetes needs --site: a profile with the image and the volume of the results; "
            "docs/sites/kubernetes.yaml is an example"
        )
    profile = PROFILE_FILE.read(Path(options.site))
    if options.time is None:
        return profile
    fixed = f"{read_job_time_s(options.time, '--time'):.15g}s"
    return msgspec.structs.replace(profile, time=msgspec.structs.replace(profile.time, fixed=fixed))


class KubernetesCall(JobCall):
    """The jobs of one `bench matrix --launcher kubernetes` call."""

    def __init__(self, call: MatrixCall) -> None:
        self._profile = profile_of(call.options)
        super().__init__(call, self._profile.price, self._profile.gpu_model)
        self._form: Form = call.options.kind or "job"
        self._offered: set[str] = set()
        """Ids of the jobs that this call has handed over; of several settings each comes to `run`."""
        self.hosts = WorkerHosts(
            has_gpus=self._profile.gpu_resource != "none",
            gpus_per_node=self._profile.gpus_per_node,
            gpu_model=self._profile.gpu_model,
            network_gbit_per_s=self._profile.network_gbit_per_s,
            # They run with the image's.
            same_python=False,
        )

    def maker(self, study: Study, plan: Plan, code: CodeVersion) -> Callable[[PlannedJob], Document]:
        made = self._documents(study, plan, code)
        return lambda planned: made.run(planned, self._form)

    def _documents(self, study: Study, plan: Plan, code: CodeVersion) -> KubernetesDocuments:
        return KubernetesDocuments(study, plan, self._profile, self._run_options, code)

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: the jobs and their manifests on stdout."""
        launches, documents = self.left(study, plan, code)
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.result(f"# {line}")
        for row in cost_rows(documents):
            told = ", ".join(f"{head} {value}" for head, value in zip(COST_HEADS, row, strict=True))
            self._console.result(f"# {told}")
        for document in documents:
            self._console.result(document.text)

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int:
        """Write what is left, and apply it if asked to, under the study's lock. Returns the exit code."""
        found = job_statuses(study, settle=True)
        launches, documents = self.left(study, plan, code, held=held_by_jobs(found))
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.note(line)
        require_within_budget(documents, self._options.max_gpu_hours)
        if documents:
            study.add_cell(baseline_of(plan.cells))
            self._console.table(COST_HEADS, cost_rows(documents), numeric=COST_NUMERIC)
        store = JobStore(study.root)
        for document in documents:
            store.add(document.job, document=document.text, name=MANIFEST)
        waiting = [
            status.job.job_id
            for status in found
            if isinstance(status, KubernetesJobStatus) and status.is_live and status.submission is None
            if status.job.job_id not in self._offered
        ]
        self._hand_over(store, [*waiting, *(document.job.job_id for document in documents)])
        self._advise(study, plan, code)
        return 0

    def _hand_over(self, store: JobStore, job_ids: list[str]) -> None:
        """Apply the manifests, or say how; those of earlier calls that were not applied are among them."""
        self._offered.update(job_ids)
        for job_id in job_ids:
            path = store.folder(job_id) / MANIFEST
            if not self._options.apply:
                self._console.result(f"kubectl apply -f {path}")
                continue
            for line in apply(path.read_text(encoding="utf-8")):
                self._console.note(line)
            name = f"{self._profile.namespace}/{object_name(store.job(job_id).name)}"
            store.add_submission(Submission(job_id=job_id, scheduler_id=name, submitted_at=utc_now()))

    def _advise(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        made = self._documents(study, plan, code)
        if made.study_folder != str(study.root.resolve()):
            self._console.note(
                f"the pods look for the study in {made.study_folder}: copy {study.root} there first, on the "
                f"volume {self._profile.volume_claim}, and copy it back for the report"
            )
        status, report = (bench_call(command, study.root) for command in ("status", "report"))
        self._console.note(f"{status} says where it stands; then {report}")
