"""A study on Slurm: which jobs are left, what they will take, and their submission."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.code import checkout
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
from harness.launchers.launcher import MatrixCall, WorkerHosts
from harness.launchers.plan_text import plan_header
from harness.launchers.slurm.documents import SlurmDocuments
from harness.launchers.slurm.site import site_of
from harness.launchers.slurm.starter import python
from harness.launchers.slurm.submit import Feed, Submitted, Submitter, live_ids
from harness.launchers.study_jobs import job_statuses
from harness.launchers.registry import job_statuses
from harness.launchers.slurm.allocation import python
from harness.launchers.slurm.submit import Feed, Submitted, Submitter, live_ids
from harness.plan.options import read_job_time_s
from harness.plan.study_file import StudyFile
from harness.plan_text import plan_header
from reports.text import count
from results.environment import CodeVersion
from results.errors import UsageError, bench_call
from results.job import Purpose, RunOptions
from results.job_store import JobStore
from results.plan import Placement, Plan
from results.site import seconds
from results.store import Study
from slurm import script
from slurm.client import Client
from slurm.runner import QueueFullError, RefusedError
from slurm.script import ScriptJob, job_script
from slurm.site import SITE_FILE, SiteProfile
from slurm.site_checks import ClusterCheck, cluster_checks


def site_of(options: StudyFile) -> SiteProfile:
    """The profile of the cluster: the file's, with what the flags say. Raises UsageError."""
    site = SITE_FILE.read(Path(options.site)) if options.site else SiteProfile()
    limit = None if options.time is None else f"{read_job_time_s(options.time, '--time'):.15g}s"
    values: Mapping[str, object] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "cpus_per_gpu": options.cpus_per_gpu,
        "time.fixed": limit,
        # Without a profile, a CPU study asks for no GPUs.
        "gpu_request": "none" if options.device == "cpu" and not options.site else None,
    }
    return SITE_FILE.overridden(site, values, "options of the site")


def site_checks(site: SiteProfile, client: Client) -> list[ClusterCheck]:
    """What the cluster's description tells of a profile, and what the scheduler says of a job by it."""
    return [*cluster_checks(site, client.cluster()), _scheduler_says(site, client)]


def _scheduler_says(site: SiteProfile, client: Client) -> ClusterCheck:
    """What the scheduler says of a job of one node that asks for all that the profile may ask for."""
    limit = site.time.maximum if site.time.fixed is None else site.time.fixed
    job = ScriptJob(
        name="bench-doctor",
        placement=Placement(nodes=1, gpus_per_node=site.gpus_per_node or 1),
        time_limit_s=seconds(limit),
        # Nothing is run, nothing is written.
        folder=Path("/"),
        log_folder=Path("/"),
        command=("true",),
    )
    about = "the scheduler"
    try:
        client.check(job_script(site, job))
    except QueueFullError as error:
        return ClusterCheck(level="doubtful", about=about, words=f"{error}; ask again when jobs have ended")
    except RefusedError as error:
        return ClusterCheck(level="wrong", about=about, words=str(error))
    return ClusterCheck(level="fine", about=about, words=f"would take a job of one node for {limit}")


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


FEEDING = 3
"""Jobs at once where one submits the others."""


class SlurmCall(JobCall):
    """The jobs of one `bench matrix --launcher slurm` call."""

    def __init__(self, call: MatrixCall) -> None:
        self._site = site_of(call.options)
        super().__init__(call, self._site.price, self._site.gpu_model)
        self._call = call
        self._feed: Feed = call.options.feed or "once"
        self.hosts = WorkerHosts(
            has_gpus=self._site.gpu_request != "none",
            gpus_per_node=self._site.gpus_per_node,
            gpu_model=self._site.gpu_model,
            network_gbit_per_s=self._site.network_gbit_per_s,
            same_python=python(self._site) == sys.executable,
        )

    def maker(self, study: Study, plan: Plan, code: CodeVersion) -> Callable[[PlannedJob], Document]:
        return self._documents(study, plan, code).run

    def _documents(self, study: Study, plan: Plan, code: CodeVersion) -> SlurmDocuments:
        return SlurmDocuments(study, plan, self._site, self._run_options, code)

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: the jobs and their very scripts on stdout. Asks the scheduler nothing."""
        launches, documents = self.left(study, plan, code)
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.result(line)
        if documents:
            self._console.table(COST_HEADS, cost_rows(documents), numeric=COST_NUMERIC)
        for document in documents:
            self._console.result(f"\n# {document.job.name}")
            self._console.result(document.text)

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int:
        """Submit what is left, under the study's lock. Returns the exit code: 1 if a job was refused."""
        client = Client()
        found = job_statuses(study, settle=True)
        launches, documents = self.left(study, plan, code, held=held_by_jobs(found))
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.note(line)
        if not documents:
            live = live_ids(found)
            told = (
                f"{count(len(live), 'job')} of it are still live"
                if live
                else "every cell has its runs or its reason"
            )
            self._console.note(f"nothing to submit: {told}; {bench_call('status', study.root)}")
            reported = any(status.is_live and status.job.purpose == "report" for status in found)
            if live and self._options.report_job and not reported:
                submitter = Submitter(study, client, self._site, self._console)
                self._follow(study, plan, code, submitter, live, Submitted())
            return 0
        require_within_budget(documents, self._options.max_gpu_hours)
        self._require_room_for_feeders(documents)
        if plan.training is None:
            study.add_cell(baseline_of(plan.cells))
        submitter = Submitter(study, client, self._site, self._console)
        done = submitter.submit(documents, feed=self._feed)
        followed = self._follow(study, plan, code, submitter, [*live_ids(found), *done.taken], done)
        self._tell(study, done, fed=followed and self._feed == "depend")
        return 1 if done.refused else 0

    def summary(self, documents: Sequence[Document]) -> list[str]:
        if documents and self.hosts.has_gpus and self._site.cpus_per_gpu is None and not self._site.exclusive:
            self._console.warn(
                "Slurm may give all ranks of a node one CPU: say --cpus-per-gpu, or cpus_per_gpu or "
                "exclusive in the profile"
            )
        return super().summary(documents)

    def _require_room_for_feeders(self, documents: Sequence[Document]) -> None:
        """One that runs, the job that it submits, and the next one that waits for that."""
        limit = self._site.submit_limit
        if self._feed == "depend" and limit is not None and limit < min(len(documents), FEEDING):
            raise UsageError(
                f"--feed depend needs room for three jobs, and the site takes {limit} (submit_limit): "
                f"--feed wait waits for room here. Nothing was submitted"
            )

    def _follow(
        self,
        study: Study,
        plan: Plan,
        code: CodeVersion,
        submitter: Submitter,
        after: Sequence[int],
        done: Submitted,
    ) -> bool:
        """Submit the job that comes after the others: one that submits the rest, or one that reports.

        Returns whether it was taken.
        """
        if not after:
            return False
        documents = self._documents(study, plan, code)
        if done.left and self._feed == "depend":
            feeder = documents.follow_up("feed", self._call.arguments, self._call.folder)
            return submitter.follow(feeder, after, done)
        elif self._options.report_job and not done.left:
            report = documents.follow_up("report", ("report", str(study.root.resolve())), self._call.folder)
            return submitter.follow(report, after, done)
        return False

    def _tell(self, study: Study, done: Submitted, *, fed: bool) -> None:
        if done.left and not fed:
            self._console.note(
                f"{count(done.left, 'job')} had no room in the queue: the same command submits them later, "
                f"--feed wait waits for room, --feed depend has a job do it"
            )
        status, report = (bench_call(command, study.root) for command in ("status", "report"))
        self._console.note(f"{status} says where it stands; then {report}")
