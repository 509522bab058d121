"""What is known of jobs on Kubernetes: what they have written themselves, as nobody asks the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.jobs.closing import open_launches
from harness.jobs.job_status import FORGOTTEN, Cancelled, JobStatus, close, own_word
from harness.launchers.kubernetes.manifest import MANIFEST
from harness.launchers.kubernetes.pods import is_over
from results.job import Job
from results.job_store import JobStore
from results.outcome import Outcome, Stopped
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
        # Nobody asks the cluster.
        return self.is_live and self.has_open_launch

    @property
    def submitted_state(self) -> str:
        return "applied"


def kept(study: Study, jobs: Sequence[Job]) -> list[KubernetesJobStatus]:
    """The jobs by their own words; one that says that it is over is closed."""
    return [_kept(study, JobStore(study.root), job) for job in jobs]


def _kept(study: Study, store: JobStore, job: Job) -> KubernetesJobStatus:
    ended = store.ended(job.job_id)
    status = KubernetesJobStatus(job=job, submission=store.submission(job.job_id), ended=ended)
    if ended is None and is_over(store, job.job_id):
        return close(study, status, own_word(study, job, None) or FORGOTTEN)
    return replace(status, has_open_launch=ended is None and bool(open_launches(study, job.job_id)))


def cancel(study: Study, live: Sequence[JobStatus]) -> Cancelled:
    """Close the jobs. What runs of them has to be deleted by hand."""
    for status in live:
        close(study, status, Stopped(outcome=Outcome.CANCELLED, reason="cancelled by the user"))
    folders = [JobStore(study.root).folder(status.job.job_id) for status in live]
    return Cancelled(by_hand=tuple(f"kubectl delete -f {folder / MANIFEST}" for folder in folders))
