"""The launcher `kubernetes`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.jobs.job_status import Cancelled, JobStatus
from harness.jobs.start import JobStart
from harness.launchers.kubernetes import job_status
from harness.launchers.kubernetes.call import KubernetesCall
from harness.launchers.kubernetes.job_status import KubernetesJobStatus
from harness.launchers.kubernetes.pods import PodEnvironment, follow, is_over, meeting_of, pod_number
from harness.launchers.kubernetes.profile import PROFILE_FILE
from harness.launchers.launcher import JobLauncher, MatrixCall
from results.job import Job
from results.job_store import JobStore
from results.store import Study


class KubernetesLauncher(JobLauncher):
    """Every pod of a job is a node: the first supervises, and the others take part in its launches."""

    name = "kubernetes"
    site_file = PROFILE_FILE
    options = frozenset({"site", "time", "jobs_per_cell", "max_gpu_hours", "apply", "kind"})

    def accept(self, call: MatrixCall) -> KubernetesCall:
        return KubernetesCall(call)

    def kept(self, study: Study, jobs: Sequence[Job]) -> list[KubernetesJobStatus]:
        return job_status.kept(study, jobs)

    def cancel(self, study: Study, live: Sequence[JobStatus]) -> Cancelled:
        return job_status.cancel(study, live)

    def run_job(self, study: Study, job: Job) -> int:
        number = pod_number()
        if number:
            return follow(study, job, number, meeting_of(job))
        store = JobStore(study.root)
        if is_over(store, job.job_id):
            # The pod of a StatefulSet is started again, whatever its end was.
            return 0
        return JobStart(study, job, PodEnvironment(job, store)).run()
