"""The launcher `kubernetes`. The status of its jobs is what they have written, as nobody asks the cluster.

Jobs that earlier versions wrote as StatefulSets are read, closed and cancelled in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.jobs.closing import open_launches
from harness.jobs.job_status import FORGOTTEN, Cancelled, JobStatus, close, own_word
from harness.jobs.start import JobStart
from harness.launchers.kubernetes.call import KubernetesCall
from harness.launchers.kubernetes.manifest import MANIFEST
from harness.launchers.kubernetes.pods import PodEnvironment, follow, is_over, meeting_of, pod_number
from harness.launchers.kubernetes.profile import PROFILE_FILE
from harness.launchers.launcher import JobLauncher, MatrixCall
from results.job import Job
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.store import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJobStatus(JobStatus):
    """One job; `submission` says that its manifest was applied from here."""

    has_open_launch: bool = False
    """Whether a launch of it has begun and has not ended, as far as is written down."""

    @property
    def is_live(self) -> bool:
        # Its manifest may be applied by hand at any time.
        return self.ended is None

    @property
    def is_running(self) -> bool:
        return self.is_live and self.has_open_launch

    @property
    def submitted_state(self) -> str:
        return "applied"


class KubernetesLauncher(JobLauncher):
    """Every pod of a job is a node: the first supervises, and the others take part in its launches."""

    name = "kubernetes"
    site_file = PROFILE_FILE
    options = frozenset({"site", "time", "jobs_per_cell", "max_gpu_hours", "apply", "kind"})

    def accept(self, call: MatrixCall) -> KubernetesCall:
        return KubernetesCall(call)

    def kept(self, study: Study, jobs: Sequence[Job]) -> list[KubernetesJobStatus]:
        """The jobs by their own records; one that has written that it is over is closed."""
        store, found = JobStore(study.root), []
        for job in jobs:
            ended = store.ended(job.job_id)
            status = KubernetesJobStatus(job=job, submission=store.submission(job.job_id), ended=ended)
            if ended is None and is_over(store, job.job_id):
                found.append(close(study, status, own_word(study, job, None) or FORGOTTEN))
            else:
                has_open = ended is None and bool(open_launches(study, job.job_id))
                found.append(replace(status, has_open_launch=has_open))
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
            return follow(study, job, number, meeting_of(job))
        store = JobStore(study.root)
        if is_over(store, job.job_id):
            # The cluster has started the pod again after the end of its program.
            return 0
        return JobStart(study, job, PodEnvironment(job, store)).run()
