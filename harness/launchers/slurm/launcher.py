"""The launcher `slurm`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.jobs.job_status import Cancelled, JobStatus
from harness.jobs.start import JobStart
from harness.launchers.launcher import JobLauncher, MatrixCall
from harness.launchers.slurm import job_status
from harness.launchers.slurm.allocation import SlurmEnvironment
from harness.launchers.slurm.call import SlurmCall
from harness.launchers.slurm.job_status import SlurmJobStatus
from results.job import Job
from results.job_store import JobStore
from results.plan import Placement
from results.site import seconds
from results.store import Study
from slurm.client import Client
from slurm.runner import QueueFullError, RefusedError
from slurm.script import ScriptJob, job_script
from slurm.site import SITE_FILE
from slurm.site_checks import ClusterCheck, Level, cluster_checks


class SlurmLauncher(JobLauncher):
    """Slurm gives a job an allocation, and srun starts an agent on each of its nodes."""

    name = "slurm"
    trains = True
    site_file = SITE_FILE
    options = frozenset(
        {
            *("site", "partition", "account", "qos", "cpus_per_gpu", "time"),
            *("jobs_per_cell", "feed", "max_gpu_hours", "report_job"),
        }
    )

    def accept(self, call: MatrixCall) -> SlurmCall:
        return SlurmCall(call)

    def offer(self) -> str | None:
        is_here = shutil.which("sbatch") is not None
        return "a Slurm cluster is here: --launcher slurm submits it" if is_here else None

    def check_site(self, path: Path) -> Sequence[ClusterCheck]:
        """Check a profile against the cluster's description, and ask the scheduler about a job by it.

        The job has one node and asks for all that the profile may ask for. It is not run.
        """
        site, client = SITE_FILE.read(path), Client()
        checks = cluster_checks(site, client.cluster())
        limit = site.time.maximum if site.time.fixed is None else site.time.fixed
        job = ScriptJob(
            name="bench-doctor",
            placement=Placement(nodes=1, gpus_per_node=site.gpus_per_node or 1),
            time_limit_s=seconds(limit),
            folder=Path("/"),
            log_folder=Path("/"),
            command=("true",),
        )
        level: Level = "fine"
        words = f"would take a job of one node for {limit}"
        try:
            client.check(job_script(site, job))
        except QueueFullError as error:
            level, words = "doubtful", f"{error}; ask again when jobs have ended"
        except RefusedError as error:
            level, words = "wrong", str(error)
        return [*checks, ClusterCheck(level, "the scheduler", words)]

    def kept(self, study: Study, jobs: Sequence[Job]) -> list[SlurmJobStatus]:
        return job_status.kept(study, jobs)

    def asked(self, study: Study, jobs: Sequence[Job], *, settle: bool = False) -> list[SlurmJobStatus]:
        client = Client()
        found = job_status.asked(study, job_status.kept(study, jobs), client)
        return job_status.settled(study, found, client) if settle else found

    def cancel(self, study: Study, live: Sequence[JobStatus]) -> Cancelled:
        own = [status for status in live if isinstance(status, SlurmJobStatus)]
        return job_status.cancel(study, own, Client())

    def run_job(self, study: Study, job: Job) -> int:
        return JobStart(study, job, SlurmEnvironment(job, JobStore(study.root))).run()
