"""A study on Kubernetes: its jobs as manifests, written beside it and, if that is wanted, applied."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import msgspec

from harness.console import Console
from harness.jobs.baseline import baseline_of
from harness.jobs.documents import MANIFEST, Document, KubernetesDocuments
from harness.jobs.left import left
from harness.jobs.standing import held_by_jobs, standings
from harness.jobs.words import COST_HEADS, COST_NUMERIC, cost_lines, cost_rows, require_within_budget
from harness.launch.kubernetes.apply import apply
from harness.launch.kubernetes.manifest import Form
from harness.launch.kubernetes.names import object_name
from harness.launch.kubernetes.profile import KubernetesProfile, read_profile
from harness.plan.options import read_duration_s
from harness.plan.schedule import PlannedLaunch
from harness.plan.study_file import StudyFile
from harness.plan_text import plan_header
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import RunOptions, Submission
from results.job_store import JobStore
from results.plan import Plan
from results.store import Study, utc_now
from slurm.client import Client


def profile_of(options: StudyFile) -> KubernetesProfile:
    """The profile of the cluster: the file's, with the time limit that a flag says. Raises UsageError."""
    if options.site is None:
        raise UsageError(
            "--launcher kubernetes needs --site: a profile with the image and the volume of the results; "
            "docs/sites/kubernetes.yaml is an example"
        )
    profile = read_profile(Path(options.site))
    if options.time is None:
        return profile
    fixed = f"{read_duration_s(options.time, '--time'):g}s"
    return msgspec.structs.replace(profile, time=msgspec.structs.replace(profile.time, fixed=fixed))


class KubernetesStudy:
    """The jobs of one `bench matrix --launcher kubernetes` call."""

    def __init__(
        self, options: StudyFile, run_options: RunOptions, profile: KubernetesProfile, console: Console
    ) -> None:
        self._options = options
        self._run_options = run_options
        self._profile = profile
        self._console = console
        self._form: Form = options.kind or "job"

    @property
    def has_gpus(self) -> bool:
        return self._profile.gpu_resource != "none"

    @property
    def same_python(self) -> bool:
        """Whether the ranks run with the Python of this call: they run with the image's."""
        return False

    @property
    def gpus_per_node(self) -> int | None:
        return self._profile.gpus_per_node

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: the jobs and their manifests on stdout."""
        launches, documents = self._left(study, plan, code)
        for line in [*plan_header(study, plan, launches), *self._summary(documents)]:
            self._console.result(f"# {line}")
        for row in cost_rows(documents):
            told = ", ".join(f"{head} {value}" for head, value in zip(COST_HEADS, row, strict=True))
            self._console.result(f"# {told}")
        for document in documents:
            self._console.result(document.text)

    def check(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """Raise UsageError where a new study would take more than was allowed: before it is written."""
        if not study.plan_paths():
            require_within_budget(self._left(study, plan, code)[1], self._options.max_gpu_hours)

    def submit(self, study: Study, plan: Plan, code: CodeVersion) -> int:
        """Write what is left, and apply it if asked to, under the study's lock. Returns the exit code."""
        found = standings(study, Client())
        launches, documents = self._left(study, plan, code, held=held_by_jobs(found))
        for line in [*plan_header(study, plan, launches), *self._summary(documents)]:
            self._console.note(line)
        require_within_budget(documents, self._options.max_gpu_hours)
        if documents:
            study.add_cell(baseline_of(plan.cells))
            self._console.table(COST_HEADS, cost_rows(documents), numeric=COST_NUMERIC)
        store = JobStore(study.root)
        for document in documents:
            store.add(document.job, document=document.text, name=MANIFEST)
        waiting = [standing.job.job_id for standing in found if standing.is_waiting]
        self._hand_over(store, [*waiting, *(document.job.job_id for document in documents)])
        self._advise(study, plan, code)
        return 0

    def _left(
        self, study: Study, plan: Plan, code: CodeVersion, *, held: Set[str] = frozenset()
    ) -> tuple[list[PlannedLaunch], list[Document]]:
        """The launches that are left, and the jobs for them."""
        per_cell = bool(self._options.jobs_per_cell)
        found = left(study, plan, self._run_options, code, per_cell=per_cell, held=held)
        made = KubernetesDocuments(study, plan, self._profile, self._run_options, code)
        return found.launches, [made.run(job, self._form) for job in found.jobs]

    def _summary(self, documents: list[Document]) -> list[str]:
        if not documents:
            return ["no jobs are left to submit"]
        return cost_lines(documents, self._profile.price, gpus=self.has_gpus)

    def _hand_over(self, store: JobStore, job_ids: list[str]) -> None:
        """Apply the manifests, or say how; those of earlier calls that were not applied are among them."""
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
        made = KubernetesDocuments(study, plan, self._profile, self._run_options, code)
        if made.study_folder != str(study.root.resolve()):
            self._console.note(
                f"the pods look for the study in {made.study_folder}: copy {study.root} there first, on the "
                f"volume {self._profile.volume_claim}, and copy it back for the report"
            )
        self._console.note(f"bench status {study.root} says where it stands; then bench report {study.root}")
