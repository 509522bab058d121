"""The launcher `slurm`, and the status of its jobs.

Slurm is asked once for all jobs of a study, and jobs are found by name where need be.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from harness.features.slurm.allocation import SlurmStarter
from harness.features.slurm.call import SlurmCall
from harness.features.slurm.profile import found_profile
from harness.jobs.closing import FORGOTTEN, close, kept_status, own_word
from harness.jobs.job_status import Cancelled, JobStatus
from harness.jobs.start import JobStart
from harness.launchers.launcher import JobLauncher, MatrixCall
from results.job import Job, Submission
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.plan import Placement
from results.site import SiteCheck, seconds
from results.store import Study, utc_now
from slurm.client import Client
from slurm.job_view import JobPhase, JobView
from slurm.runner import QueueFullError, RefusedError, SlurmError
from slurm.script import ScriptJob, job_script, log_path
from slurm.site import SITE_FILE
from slurm.site_checks import cluster_checks

_ANSWERS_S = 3.0
"""Seconds in which a controller answers that a plan offers to use."""


def seen(status: JobStatus, view: JobView) -> JobStatus:
    """The status of a job with Slurm's answer about it."""
    held = "held: it will not start by itself; " if view.is_held else ""
    return replace(
        status,
        is_running=view.phase is JobPhase.RUNNING,
        is_queued=view.source == "squeue",
        submitted_state=str(view.phase),
        scheduler_words=held + view.words,
    )


def asked(study: Study, found: Sequence[JobStatus], client: Client) -> list[JobStatus]:
    """Ask Slurm about the jobs that have not ended. Raises SlurmError if another cluster has them."""
    waiting = {
        int(status.submission.scheduler_id): status
        for status in found
        if status.ended is None and status.submission is not None
    }
    if not waiting:
        return list(found)
    # Another cluster has jobs of the same numbers.
    names = {status.submission.cluster for status in waiting.values() if status.submission is not None}
    elsewhere = sorted(name for name in names if name not in (None, client.cluster_name))
    if elsewhere:
        raise SlurmError(
            f"jobs of the study are on the cluster {', '.join(map(str, elsewhere))}, and this is "
            f"{client.cluster_name}: run the same command there"
        )
    views = client.query(list(waiting))
    news = {
        status.job.job_id: _with_view(study, status, views.get(slurm_id))
        for slurm_id, status in waiting.items()
    }
    return [news.get(status.job.job_id, status) for status in found]


def settled(study: Study, found: Sequence[JobStatus], client: Client) -> list[JobStatus]:
    """Find out about jobs of which it is not known whether they were submitted, by their names.

    Under the study's lock: another process may be about to submit. A job that the queue lacks was not taken,
    and is closed.
    """
    lost = [status for status in found if status.submission is None and status.ended is None]
    if not lost:
        return list(found)
    by_name = {view.name: view for view in client.own_jobs()}
    news = {status.job.job_id: _found(study, status, by_name, client.cluster_name) for status in lost}
    return [news.get(status.job.job_id, status) for status in found]


def cancel(study: Study, live: Sequence[JobStatus], client: Client) -> Cancelled:
    """Have Slurm end jobs. Jobs that its queue lacks are closed, whatever accounting says."""
    numbers = [int(status.submission.scheduler_id) for status in live if status.submission is not None]
    client.cancel(numbers)
    for status in live:
        if not status.is_queued:
            close(study, status, Ending(Outcome.CANCELLED, "cancelled by the user"))
    return Cancelled(told=tuple(map(str, numbers)))


def _found(study: Study, lost: JobStatus, by_name: dict[str, JobView], cluster: str) -> JobStatus:
    view, job_id, store = by_name.get(lost.job.name), lost.job.job_id, JobStore(study.root)
    if view is not None:
        submission = Submission(
            job_id=job_id, scheduler_id=str(view.job_id), submitted_at=utc_now(), cluster=cluster
        )
        store.add_submission(submission)
        return _with_view(study, replace(lost, submission=submission), view)
    if store.starts(job_id) or any(launch.job_id == job_id for launch in study.launches()):
        # The scheduler took the job, ran it, and has forgotten it.
        return _with_view(study, lost, None)
    return close(study, lost, Ending(Outcome.CANCELLED, "the scheduler never took it"))


def _with_view(study: Study, status: JobStatus, view: JobView | None) -> JobStatus:
    if view is None:
        return close(study, status, own_word(study, status.job, None) or FORGOTTEN)
    if view.name != status.job.name:
        raise SlurmError(
            f"the scheduler now calls job {view.job_id} {view.name!r}, but bench submitted it as "
            f"{status.job.name!r}: either job numbers have restarted, or this is another cluster; run the "
            f"same command on the cluster of the job, or close the study's jobs: bench cancel --forget"
        )
    status = seen(status, view)
    if not view.phase.ended:
        return status
    if stopped := own_word(study, status.job, view.restarts):
        return close(study, status, stopped, scheduler=view.words)
    return _without_word(study, status, view)


def _without_word(study: Study, status: JobStatus, view: JobView) -> JobStatus:
    """Close a job that has not recorded its end, as Slurm says that it ended."""
    if view.outcome is Outcome.CRASHED and view.signal is not None:
        killed = f"the job's program was killed: the scheduler says {view.words}"
        # The job's ranks are gone, and no cell is to blame: the cells are run again.
        runs = Ending(Outcome.MISSING_RANKS, killed)
        return close(study, status, Ending(Outcome.CRASHED, killed), runs=runs, scheduler=view.words)
    outcome = view.outcome or Outcome.UNKNOWN
    if outcome is Outcome.OK and status.job.cells:
        # A job that has run its cells says so.
        outcome = Outcome.UNKNOWN
    log = log_path(JobStore(study.root).folder(status.job.job_id), view.job_id)
    stopped = Ending(outcome, f"the scheduler says {view.words}; see {log}")
    return close(study, status, stopped, scheduler=view.words)


class SlurmLauncher(JobLauncher):
    """Slurm gives a job an allocation, and srun starts an agent on each of its nodes."""

    name = "slurm"
    trains = True
    site_file = SITE_FILE
    options = frozenset(
        {
            *("site", "partition", "account", "qos", "cpus_per_gpu", "time"),
            *("jobs_per_cell", "feed", "max_gpu_hours", "report_job", "scripts"),
        }
    )

    def accept(self, call: MatrixCall) -> SlurmCall:
        return SlurmCall(call)

    def offer(self) -> str | None:
        if shutil.which("sbatch") is None:
            return None
        with suppress(SlurmError):
            name = Client(timeout_s=_ANSWERS_S).cluster_name
            return f"the Slurm cluster {name} is here: --launcher slurm submits it"
        return None

    def found_site(self) -> str:
        return found_profile(Client())

    def excluding(self, nodes: Sequence[str]) -> Sequence[str]:
        listed = ",".join(nodes)
        return [f"#SBATCH --exclude={listed}", f'directives: {{exclude: "{listed}"}}    # in the profile']

    def check_site(self, path: Path) -> Sequence[SiteCheck]:
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
        answer = SiteCheck("fine", "the scheduler", f"would take a job of one node for {limit}")
        try:
            client.check(job_script(site, job))
        except QueueFullError as error:
            answer = replace(answer, level="doubtful", words=f"{error}; ask again when jobs have ended")
        except RefusedError as error:
            answer = replace(answer, level="wrong", words=str(error))
        return [*checks, answer]

    def kept(self, study: Study, jobs: Sequence[Job]) -> list[JobStatus]:
        store = JobStore(study.root)
        return [kept_status(store, job) for job in jobs]

    def asked(self, study: Study, jobs: Sequence[Job], *, settle: bool = False) -> list[JobStatus]:
        client = Client()
        found = asked(study, self.kept(study, jobs), client)
        return settled(study, found, client) if settle else found

    def cancel(self, study: Study, live: Sequence[JobStatus]) -> Cancelled:
        return cancel(study, live, Client())

    def run_job(self, study: Study, job: Job) -> int:
        return JobStart(study, job, SlurmStarter(job, JobStore(study.root))).run()
