"""The launcher `kubernetes`: jobs as manifests, written next to the study and, if that is wanted, applied.

Manifests are handed to the cluster that kubectl is set to. The status of jobs is what they have written, as
nobody asks the cluster. Jobs that earlier versions wrote as StatefulSets are read, closed and cancelled too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from harness.features.kubernetes.manifest import MANIFEST, manifest
from harness.features.kubernetes.pods import (
    PodStarter,
    follow,
    is_over,
    pod_number,
)
from harness.features.kubernetes.profile import PROFILE_FILE, KubernetesProfile, object_name
from harness.jobs.closing import FORGOTTEN, close, kept_status, open_launches, own_word
from harness.jobs.documents import COST_HEADS, COST_NUMERIC, Document, JobMaker, cost_rows
from harness.jobs.job_status import Cancelled, JobStatus
from harness.jobs.planned import PlannedJob
from harness.jobs.start import JobStart
from harness.launchers.job_call import JobCall, Todo
from harness.launchers.launcher import JobLauncher, MatrixCall, WorkerHosts
from harness.launchers.plan_text import plan_header
from harness.plan.options import read_job_time_s
from harness.plan.study_file import StudyFile
from results.environment import CodeVersion
from results.errors import BenchError, UsageError, bench_call
from results.files import read
from results.job import Job, Submission
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.plan import Plan
from results.store import Study, utc_now

TIMEOUT_S = 60.0
_COMMAND = ("kubectl", "apply", "-f", "-")


class KubectlError(BenchError):
    """kubectl could not be run, failed, or did not answer."""


def apply(text: str, *, timeout_s: float = TIMEOUT_S) -> tuple[str, ...]:
    """Create the objects of a manifest, or update objects that exist.

    Returns what kubectl says, a line for each object. Raises KubectlError with kubectl's own words. If
    kubectl has not answered in time, some of the objects may be there: apply the same manifest again.
    """
    command = " ".join(_COMMAND)
    try:
        done = subprocess.run(
            _COMMAND, input=text.encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KubectlError(
            f"no answer in {timeout_s:g} s to: {command}; run it on the manifest again by hand"
        ) from error
    except FileNotFoundError as error:
        raise KubectlError(
            "kubectl is not installed here: leave out --apply, and apply the manifest on a machine that has "
            "kubectl"
        ) from error
    except OSError as error:
        raise KubectlError(f"cannot run kubectl: {error.strerror}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split()) or "it said nothing"
        raise KubectlError(f"{command} ended with {done.returncode}: {said}")
    return tuple(done.stdout.decode(errors="replace").splitlines())


def _profile_of(options: StudyFile) -> KubernetesProfile:
    """The profile of the cluster: the file's, with the time limit that a flag says. Raises UsageError."""
    if options.kind == "statefulset":
        raise UsageError(
            "--kind statefulset was removed: leave --kind out, and each job is an Indexed Job; the "
            "study's folder has the logs of its pods after they have ended (bench logs)"
        )
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
        profile = self._profile = _profile_of(call.options)
        super().__init__(call, "kubernetes", profile)
        self.gpu_kind = profile.gpu_resource
        self._offered: set[str] = set()
        """Ids of the jobs that this call has handed over; `run` is called for each of several settings."""
        self.hosts = WorkerHosts(
            has_gpus=profile.gpu_resource != "none",
            gpus_per_node=profile.gpus_per_node,
            gpu_model=profile.gpu_model,
            network_gbit_per_s=profile.network_gbit_per_s,
            # Ranks run with the Python of the image.
            same_python=False,
        )

    def document(self, jobs: JobMaker, planned: PlannedJob) -> Document:
        job = jobs.run(planned)
        folder = f"{self._study_folder(jobs.root)}/jobs/{job.job_id}"
        return Document(job=job, text=manifest(self._profile, job, folder=folder))

    def _study_folder(self, root: Path) -> str:
        """The study's path in pods: its own if that is on the volume, else its folder's name there."""
        volume = Path(self._profile.mount_path)
        return str(root if root.is_relative_to(volume) else volume / root.name)

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: print the jobs and their manifests on stdout."""
        launches, documents = self.left(study, plan, code)
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.result(f"# {line}")
        for row in cost_rows(documents):
            costs = ", ".join(f"{head} {value}" for head, value in zip(COST_HEADS, row, strict=True))
            self._console.result(f"# {costs}")
        for document in documents:
            self._console.result(document.text)

    def hand_over(self, todo: Todo) -> int:
        """Write new jobs, and print the commands that apply them and earlier ones, or run these commands."""
        root, new = todo.study.root, todo.new
        store = JobStore(root)
        if new:
            self._console.table(COST_HEADS, cost_rows(new), numeric=COST_NUMERIC)
        for document in new:
            store.add(document.job, document=document.text, name=MANIFEST)
        # Manifests of earlier calls that were not applied are handed over again.
        waiting = [status.job for status in todo.found if _is_offered(status)]
        for job in (*waiting, *(document.job for document in new)):
            if job.job_id not in self._offered:
                self._offered.add(job.job_id)
                self._offer(store, job)
        seen = self._study_folder(root.resolve())
        if seen != str(root.resolve()):
            self._console.note(
                f"the pods look for the study in {seen}: copy {root} there first, on the volume "
                f"{self._profile.volume_claim}, and copy it back for the report"
            )
        status, report = (bench_call(command, root) for command in ("status", "report"))
        self._console.note(f"{status} shows the progress; then {report}")
        return 0

    def _offer(self, store: JobStore, job: Job) -> None:
        """Print the command that applies a manifest, or run it and record the submission."""
        path = store.folder(job.job_id) / MANIFEST
        if not self._options.apply:
            self._console.result(f"kubectl apply -f {path}")
            return
        for line in apply(read(path).text):
            self._console.note(line)
        name = f"{self._profile.namespace}/{object_name(job.name)}"
        store.add_submission(Submission(job_id=job.job_id, scheduler_id=name, submitted_at=utc_now()))


def _is_offered(status: JobStatus) -> bool:
    """Whether a job may still be applied, by hand or from here."""
    return status.job.launcher == "kubernetes" and status.is_live and status.submission is None


class KubernetesLauncher(JobLauncher):
    """Every pod of a job is a node: the first supervises, and the others take part in its launches."""

    name = "kubernetes"
    site_file = PROFILE_FILE
    options = frozenset({"site", "time", "jobs_per_cell", "max_gpu_hours", "apply", "kind"})

    def accept(self, call: MatrixCall) -> KubernetesCall:
        return KubernetesCall(call)

    def kept(self, study: Study, jobs: Sequence[Job]) -> list[JobStatus]:
        """The jobs by their own records; one that has written that it is over is closed.

        A submission says that the manifest was applied from here; it may also be applied by hand at any time.
        """
        store, found = JobStore(study.root), []
        for job in jobs:
            status = replace(kept_status(store, job), by_hand=True, submitted_state="applied")
            if status.ended is None and is_over(store, job):
                found.append(close(study, status, own_word(study, job, None) or FORGOTTEN))
            else:
                runs = status.ended is None and bool(open_launches(study, job.job_id))
                found.append(replace(status, is_running=runs))
        return found

    def cancel(self, study: Study, live: Sequence[JobStatus]) -> Cancelled:
        """Close the jobs. Their objects on the cluster have to be deleted by hand."""
        for status in live:
            close(study, status, Ending(Outcome.CANCELLED, "cancelled by the user"))
        folders = [JobStore(study.root).folder(status.job.job_id) for status in live]
        return Cancelled(by_hand=tuple(f"kubectl delete -f {folder / MANIFEST}" for folder in folders))

    def run_job(self, study: Study, job: Job) -> int:
        number = pod_number()
        if number:
            return follow(study, job, number)
        store = JobStore(study.root)
        if is_over(store, job):
            # The cluster has started the pod again after the end of its program.
            return 0
        return JobStart(study, job, PodStarter(job, store)).run()
