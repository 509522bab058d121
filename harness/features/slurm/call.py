"""A study on Slurm: which jobs are left, what they will take, their scripts, and their submission.

A `Submitter` submits as many jobs as Slurm takes, and says what happens to the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal

from harness.features.slurm.allocation import python
from harness.jobs.closing import end_of_job
from harness.jobs.documents import COST_HEADS, COST_NUMERIC, Document, JobMaker, cost_rows
from harness.jobs.job_status import JobStatus
from harness.jobs.planned import PlannedJob
from harness.launchers.job_call import JobCall, Todo
from harness.launchers.jobs import job_statuses
from harness.launchers.launcher import MatrixCall, WorkerHosts
from harness.launchers.plan_text import plan_header
from harness.machine.code import checkout
from harness.plan.options import read_job_time_s
from harness.plan.study_file import StudyFile
from harness.terminal.console import Console
from reports.text import count
from results.environment import CodeVersion
from results.errors import MachineError, UsageError, bench_call
from results.job import Job, Purpose, Submission
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.plan import Placement, Plan
from results.store import Study, utc_now
from slurm.client import Client
from slurm.cluster import NodeGroup
from slurm.defaults import most_devices, with_defaults
from slurm.job_view import JobPhase
from slurm.runner import NoAnswerError, QueueFullError, RefusedError, SlurmError
from slurm.script import ScriptJob, job_script
from slurm.site import SITE_FILE, SiteProfile
from slurm.site_checks import over_limits

FEEDING = 3
"""Number of jobs in the queue at a time, if a job submits the next ones."""
_ALL_DONE = "every cell has its runs or its reason"


def site_of(options: StudyFile) -> SiteProfile:
    """The profile of the cluster: the file's, with the values of the flags. Raises UsageError."""
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


def _require_seen(site: SiteProfile, root: Path) -> None:
    """Raises UsageError if ranks in a container would not see the study, or the code, at its path."""
    container = site.container
    if container is None:
        return
    mounts = [mount.split(":")[:2] for mount in container.mounts]
    seen = [Path(target) for source, target in mounts if source == target]
    seen += [Path.home()] if container.mount_home else []
    for what, path in (("the study", root), ("the code of bench", checkout())):
        if not any(path.is_relative_to(place) for place in seen):
            raise UsageError(
                f"{what} is in {path}, and the container sees nothing there: add {path}:{path} or a "
                f"folder above it to container.mounts in the profile, under the same path on both sides"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A profile, completed by what Slurm says of its nodes."""

    site: SiteProfile
    limits: Mapping[str, int] = field(default_factory=dict)
    """The limits of a job of this user."""
    words: str | None = None
    """Slurm's description of the nodes; None if the profile or flags give it."""
    unknown: str | None = None
    """Why the call has to be refused; None if it has not."""
    most: int | None = None
    """The devices of the partition's nodes; None: not known."""


def _known_site(options: StudyFile) -> _Known:
    site, client = site_of(options), Client()
    per_node = options.gpus_per_node or site.gpus_per_node
    if site.gpu_request == "none" or per_node is not None:
        try:
            return _Known(site=site, most=most_devices(site, client.groups(), per_node))
        except SlurmError:
            return _Known(site=site)
        except UsageError as error:
            return _Known(site=site, unknown=str(error))
    try:
        limits = client.limits(site.account, site.qos)
        longest = limits.pop("seconds", None)
        groups = [
            replace(one, time_limit_s=min(filter(None, (one.time_limit_s, longest)), default=None))
            for one in client.groups()
        ]
        site, words = with_defaults(site, groups)
        words = ", ".join(filter(None, (words, _limit_words(limits))))
        most = most_devices(site, groups, site.gpus_per_node)
        return _Known(site=site, limits=limits, words=words, most=most)
    except (SlurmError, UsageError) as error:
        unknown = f"the GPUs of a node are not known: give --gpus-per-node ({error})"
        return _Known(site=site, unknown=unknown)


def _limit_words(limits: Mapping[str, int]) -> str:
    allowed = " and ".join(f"{most} {what}" for what, most in limits.items())
    return f"your account and QOS allow {allowed} a job" if allowed else ""


def _differing(first: Document, other: Document) -> str:
    """The lines of a script that another one lacks, where both have the name of the first."""
    theirs = other.text.replace(other.job.name, first.job.name).replace(other.job.job_id, first.job.job_id)
    known = set(first.text.splitlines())
    lines = (line.removeprefix("#SBATCH ") for line in theirs.splitlines() if line not in known)
    return " ".join(lines) or "none"


class SlurmCall(JobCall):
    """The jobs of one `bench matrix --launcher slurm` call."""

    def __init__(self, call: MatrixCall) -> None:
        known = _known_site(call.options)
        self._site = site = known.site
        self._limits, self._nodes, self._unknown = known.limits, known.words, known.unknown
        super().__init__(call, "slurm", site)
        self.gpu_kind = site.gpu_type
        self._feed: Feed = call.options.feed or "once"
        self.hosts = WorkerHosts(
            has_gpus=site.gpu_request != "none",
            gpus_per_node=site.gpus_per_node,
            gpu_model=site.gpu_model,
            network_gbit_per_s=site.network_gbit_per_s,
            same_python=python(site) == sys.executable,
            most=known.most,
        )

    def check(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        if self._unknown is not None:
            raise MachineError(self._unknown)

    def check_all(self, study: Study, plans: Sequence[Plan], code: CodeVersion) -> None:
        for plan in plans:
            self.check(study, plan, code)
        super().check_all(study, plans, code)

    def document(self, jobs: JobMaker, planned: PlannedJob) -> Document:
        job = jobs.run(planned)
        _require_seen(self._site, jobs.root)
        program = ("harness.launchers.program", str(JobStore(jobs.root).folder(job.job_id)))
        return self._scripted(jobs, job, planned.placement, jobs.root, program)

    def _scripted(
        self, jobs: JobMaker, job: Job, placement: Placement | None, folder: Path, module: Sequence[str]
    ) -> Document:
        """The job with its batch script, which runs a module with its arguments in `folder`."""
        script = ScriptJob(
            name=job.name,
            placement=placement,
            time_limit_s=job.time_limit_s,
            folder=folder,
            log_folder=JobStore(jobs.root).folder(job.job_id),
            command=(self._site.python or sys.executable, "-m", *module),
            python_path=checkout(),
            requeue=job.options.retries > 0,
        )
        return Document(job=job, text=job_script(self._site, script))

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: print the jobs and their very scripts on stdout."""
        launches, documents = self.left(study, plan, code)
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.result(line)
        if documents:
            self._console.table(COST_HEADS, cost_rows(documents), numeric=COST_NUMERIC)
        for document in documents if self._options.scripts else documents[:1]:
            self._console.result(f"\n# {document.job.name}")
            self._console.result(document.text)
        if len(documents) > 1 and not self._options.scripts:
            self._console.result("\nother scripts, by what differs from this one (--scripts prints them)")
            rows = [(one.job.job_id, _differing(documents[0], one)) for one in documents[1:]]
            self._console.table(("job", "lines"), rows, numeric=(False, False))

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int | None:
        """Submit jobs that are left, under the study's lock. Returns the exit code: 1 if one is refused.

        With `--until` and `--feed wait` it waits for the jobs of the round, and returns None.
        """
        exit_code = super().run(study, plan, code, lock)
        if plan.round is None or self._feed != "wait" or exit_code:
            return exit_code
        live = True
        while live:
            # A scheduler that does not answer for a moment is asked again.
            with suppress(NoAnswerError):
                live = bool(live_ids(job_statuses(study, settle=True)))
            time.sleep(POLL_S if live else 0)
        return None

    def hand_over(self, todo: Todo) -> int:
        """Submit the jobs, and a job that follows them if the call asks for one: 1 if one is refused."""
        if not todo.new:
            return self._none_left(todo)
        limit = self._site.submit_limit
        # Room is needed for the job that runs, the one that it submits, and the next one.
        if self._feed == "depend" and limit is not None and limit < min(len(todo.new), FEEDING):
            raise UsageError(
                f"--feed depend needs room for three jobs, and the site takes {limit} (submit_limit): "
                f"--feed wait waits for room here. Nothing was submitted"
            )
        submitter = Submitter(todo.study, Client(), self._site, self._console)
        done = submitter.submit(todo.new, feed=self._feed)
        after = [*live_ids(todo.found), *done.taken]
        followed = self._follow(submitter, todo, after, done)
        if done.left and not (followed and self._feed == "depend"):
            self._console.note(
                f"{count(done.left, 'job')} had no room in the queue: the same command submits them later, "
                f"--feed wait waits for room, --feed depend has a job do it"
            )
        status, report = (bench_call(command, todo.study.root) for command in ("status", "report"))
        self._console.note(f"{status} shows the progress; then {report}" if after else "no job was submitted")
        return 1 if done.refused else 0

    def _none_left(self, todo: Todo) -> int:
        live = live_ids(todo.found)
        why = f"{count(len(live), 'job')} of it are still live" if live else _ALL_DONE
        self._console.note(f"nothing to submit: {why}; {bench_call('status', todo.study.root)}")
        reported = any(status.is_live and status.job.purpose == "report" for status in todo.found)
        if live and not reported:
            submitter = Submitter(todo.study, Client(), self._site, self._console)
            self._follow(submitter, todo, live, Submitted())
        return 0

    def summary(self, documents: Sequence[Document]) -> list[str]:
        if documents and self.hosts.has_gpus and self._site.cpus_per_gpu is None and not self._site.exclusive:
            self._console.warn(
                "Slurm may give all ranks of a node one CPU: give --cpus-per-gpu, or cpus_per_gpu or "
                "exclusive in the profile"
            )
        most = self._limits.get("GPUs", inf), self._limits.get("nodes", inf)
        placed = {one.job.job_id: one.job.placement for one in documents}
        beyond = [job for job, place in placed.items() if place.gpus > most[0] or place.nodes > most[1]]
        if beyond:
            self._console.warn(
                f"{', '.join(beyond)}: {_limit_words(self._limits)}; leave sizes out of --gpus"
            )
        said = [] if self._nodes is None else [f"Slurm says: {self._nodes}; a profile or flags override it"]
        return [*said, *super().summary(documents)]

    def _follow(self, submitter: Submitter, todo: Todo, after: Sequence[int], done: Submitted) -> bool:
        """Submit a job that runs after the others. It submits the remaining jobs, or the next round of a
        study that grows, or it writes the report.

        Returns whether it was taken.
        """
        purpose: Purpose
        if not after:
            return False
        if self._feed == "depend" and (done.left or _grows(todo)):
            purpose, arguments = "feed", self._call.arguments
        elif self._options.report_job and not done.left:
            purpose, arguments = "report", ("report", str(todo.study.root.resolve()))
        else:
            return False
        job = todo.jobs.follow_up(purpose, arguments)
        script = self._scripted(todo.jobs, job, None, self._call.folder, ("harness.cli", *arguments))
        return submitter.follow(script, after, done)


def _grows(todo: Todo) -> bool:
    """Whether another round follows. A round that lacks runs after its jobs needs a person: no job submits
    its cells again without end."""
    if todo.plan.round is None or not todo.new:
        return False
    cells = {cell for document in todo.new for cell in document.job.cells}
    number = todo.new[0].job.plan
    return not any(one.job.plan == number and cells & {*one.job.cells} for one in todo.found)


Feed = Literal["once", "wait", "depend"]
SCRIPT = "script.sh"
POLL_S = 30.0


@dataclass
class Submitted:
    """The jobs of a call by their fate: taken, refused or left."""

    taken: list[int] = field(default_factory=list)
    """The scheduler's numbers."""
    refused: int = 0
    left: int = 0
    """Jobs for which there was no room."""


class Submitter:
    """Submits the jobs of one call, under the study's lock."""

    def __init__(self, study: Study, client: Client, site: SiteProfile, console: Console) -> None:
        self._store = JobStore(study.root)
        self._client = client
        self._site = site
        self._console = console
        # Asked for before a job is submitted, so that its number can be recorded at once.
        self._cluster = client.cluster_name
        # Without a partition Slurm chooses one, and a QOS may override the limits of a partition.
        self._groups: tuple[NodeGroup, ...] = ()
        if site.partition and site.qos is None:
            try:
                self._groups = client.groups()
            except NoAnswerError:
                raise
            except SlurmError:
                # sinfo refuses, or prints another form: the limits are not checked.
                pass

    def submit(self, documents: Sequence[Document], *, feed: Feed) -> Submitted:
        """Submit the jobs in order, until the queue is full.

        Then, with `wait`, wait for room. Raises NoAnswerError if the scheduler does not answer: what was
        submitted is kept, and the same command finds out about the last job.
        """
        done = Submitted()
        waiting = list(documents)
        while waiting:
            # A job that submits the others needs room as well.
            needed = 2 if feed == "depend" and len(waiting) > 1 else 1
            if self._room(patient=feed == "wait") >= needed and self._hand_over(waiting[0], (), done):
                waiting.pop(0)
            elif feed == "wait":
                self._console.note(f"{count(len(waiting), 'job')} wait for room in the queue")
                time.sleep(POLL_S)
            else:
                break
        done.left = len(waiting)
        return done

    def follow(self, document: Document, after: Sequence[int], done: Submitted) -> bool:
        """Submit a job that starts when those in `after` have ended, however they did.

        Returns whether it was taken.
        """
        refused = done.refused
        return self._hand_over(document, after, done) and done.refused == refused

    def _room(self, *, patient: bool) -> float:
        """The jobs that the queue still takes; 0 if the scheduler does not answer and the call can wait."""
        if self._site.submit_limit is None:
            return float("inf")
        try:
            views = self._client.own_jobs()
        except NoAnswerError:
            if patient:
                return 0
            raise
        queued = [view for view in views if view.phase in (JobPhase.WAITING, JobPhase.RUNNING)]
        return self._site.submit_limit - len(queued)

    def _hand_over(self, document: Document, after: Sequence[int], done: Submitted) -> bool:
        """Submit one job. Returns False if the queue is full."""
        job = document.job
        if not (self._store.folder(job.job_id) / "job.json").exists():
            self._store.add(job, document=document.text, name=SCRIPT)
        try:
            if job.purpose == "run":
                # Slurm might take such a job, and would never start it.
                why = over_limits(self._site, job.placement.nodes, job.time_limit_s, self._groups)
                if why is not None:
                    raise RefusedError(why)
            slurm_id = self._client.submit(document.text, after=after)
        except QueueFullError:
            return False
        except RefusedError as error:
            self._console.warn(f"{job.name} was refused: {error}")
            ending = Ending(Outcome.CANCELLED, f"refused: {error}")
            self._store.add_end(end_of_job(job, None, ending))
            done.refused += 1
            return True
        self._store.add_submission(
            Submission(
                job_id=job.job_id, scheduler_id=str(slurm_id), submitted_at=utc_now(), cluster=self._cluster
            )
        )
        done.taken.append(slurm_id)
        self._console.note(f"job {slurm_id}: {job.name}")
        return True


def live_ids(statuses: Sequence[JobStatus]) -> list[int]:
    """The scheduler's numbers of the jobs that may still run cells."""
    own = [status for status in statuses if status.job.launcher == "slurm" and status.job.purpose == "run"]
    submissions = [status.submission for status in own if status.is_live]
    return [int(submission.scheduler_id) for submission in submissions if submission is not None]
