"""The calls of launchers that make jobs: their common half, over every scheduler."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from harness.jobs.documents import (
    ClusterProfile,
    Document,
    JobMaker,
    cost_lines,
    gpu_hours,
    require_within_budget,
)
from harness.jobs.job_status import JobStatus, held_by_jobs
from harness.jobs.planned import PlannedJob, baseline_of, planned_jobs
from harness.launch.tally import Conditions, study_tally
from harness.launchers.jobs import job_statuses
from harness.launchers.launcher import LauncherCall, MatrixCall
from harness.launchers.plan_text import plan_header
from harness.plan.schedule import PlannedLaunch
from harness.plan.surroundings import Devices
from reports.text import duration
from results.environment import CodeVersion
from results.errors import UsageError, bench_call
from results.files import study_lock
from results.plan import Placement, Plan, placement_of
from results.site import require_whole_gpus
from results.store import Study


class Todo(NamedTuple):
    """A call hands these jobs over."""

    study: Study
    plan: Plan
    jobs: JobMaker
    found: Sequence[JobStatus]
    """The jobs so far."""
    new: Sequence[Document]


class JobCall(LauncherCall):
    """A call whose launches are left to jobs."""

    def __init__(self, call: MatrixCall, launcher: str, profile: ClusterProfile) -> None:
        self._call = call
        self._options = call.options
        self._console = call.console
        self._launcher = launcher
        self._cluster = profile

    gpu_kind: str | None = None
    """The cluster's name of the GPUs that jobs ask for; None: jobs give no name."""

    @abstractmethod
    def document(self, jobs: JobMaker, planned: PlannedJob) -> Document:
        """Make the record of a job (`jobs.run`), and the text that is submitted for it."""

    @abstractmethod
    def hand_over(self, todo: Todo) -> int:
        """Record new jobs and submit them, under the study's lock. Returns the exit code of the call."""

    def document_of_call(
        self, jobs: JobMaker, placement: Placement, limit_s: float, files: Mapping[str, Path]
    ) -> Document:
        """A job (`jobs.of_call`) that makes this call again in its allocation.

        `files` are those that the call names, by flag. Raises UsageError if the launcher has no such jobs.
        """
        raise UsageError(
            f"--launcher {self._launcher} does not start the launches of a call in a job: make the "
            f"same call with --launcher local on one of its nodes"
        )

    def maker(self, study: Study, plan: Plan, code: CodeVersion) -> JobMaker:
        return JobMaker(study, plan, self._launcher, self._call.run_options, code, self._cluster)

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int | None:
        """Make jobs of the launches that are left, without the cells of live jobs. Returns the exit code."""
        found = job_statuses(study, settle=True)
        launches, documents = self.left(study, plan, code, held=held_by_jobs(found))
        for line in [*plan_header(study, plan, launches), *self.summary(documents)]:
            self._console.note(line)
        require_within_budget(documents, self._options.max_gpu_hours)
        if documents and plan.order is None:
            study.add_cell(baseline_of(plan.cells))
        return self.hand_over(Todo(study, plan, self.maker(study, plan, code), found, documents))

    def submit_call(
        self, study: Study, plan: Plan, code: CodeVersion, most_s: float, files: Mapping[str, Path]
    ) -> int:
        """Submit a job that makes this call again, of the size of the plan's largest cell, unless a job of
        the study lives.

        Its launches take `most_s` seconds at most. `files` are those that the call names, by flag. Returns
        the exit code. Raises UsageError, before anything is written, if the launcher has no such jobs or the
        site's time limit is shorter.
        """
        limit_s = self._cluster.time.limit_s(most_s)
        if limit_s < most_s:
            raise UsageError(
                f"the job of this call may take {duration(most_s * 1e9)}, and --time or the profile's time "
                f"gives it {duration(limit_s * 1e9)}: give a shorter --max-time or a longer time"
            )
        self.check(study, plan, code)
        placement = placement_of(max(plan.cells, key=lambda cell: cell.gpus), plan.request.gpus_per_node)
        with study_lock(study.root):
            found = job_statuses(study, settle=True)
            live, jobs = [status.job for status in found if status.is_live], self.maker(study, plan, code)
            for job in live:
                end = bench_call("cancel", study.root)
                self._console.note(f"{job.name} is still live, with its own call; {end} ends it")
            new = [] if live else [self.document_of_call(jobs, placement, limit_s, files)]
            return self.hand_over(Todo(study, plan, jobs, found, new))

    def within(self, study: Study) -> LauncherCall:
        """Return the call that starts launches in the allocation of this process, if `submit_call` submitted
        its job for the study; else return this call."""
        return self

    def conditions(self, code: CodeVersion) -> Conditions:
        return Conditions.elsewhere(code)

    def check_all(self, study: Study, plans: Sequence[Plan], code: CodeVersion) -> None:
        """Refuse more GPU-hours than were allowed for all settings of a call together.

        Raises UsageError, and SchedulerError if a scheduler that has jobs of the study does not answer.
        """
        if self._options.max_gpu_hours is None:
            return
        held = held_by_jobs(job_statuses(study))
        documents: list[Document] = []
        for plan in plans:
            made = self.left(study, plan, code, held=held)[1]
            # Settings may have cells in common; their first jobs run these.
            held |= {cell for document in made for cell in document.job.cells}
            documents += made
        require_within_budget(documents, self._options.max_gpu_hours)

    def device_hours(self, study: Study, plan: Plan, code: CodeVersion) -> float:
        hours = gpu_hours(self.left(study, plan, code)[1]) if self.hosts.has_gpus else None
        return super().device_hours(study, plan, code) if hours is None else hours[0]

    def left(
        self, study: Study, plan: Plan, code: CodeVersion, *, held: Set[str] = frozenset()
    ) -> tuple[list[PlannedLaunch], list[Document]]:
        """Return the launches that are left, and their jobs, without the cells that live jobs have (`held`).

        The hosts of the jobs are not known here, so that only the code of earlier runs is compared
        (`conditions`); the job that runs a cell compares the others.
        """
        options = self._call.run_options
        so_far = study_tally(study, plan, study.results(), self.conditions(code), options)
        so_far.closed |= dict.fromkeys(held, "a job has it")
        launches = so_far.planned(options.isolation)
        planned = planned_jobs(
            plan,
            launches,
            per_cell=bool(self._options.jobs_per_cell),
            earlier=so_far.earlier,
            hardware=Devices(gpu_name=self._cluster.gpu_model, measured=so_far.measured),
        )
        for one in planned:
            require_whole_gpus(self.gpu_kind, one.placement.gpus_per_node)
        jobs = self.maker(study, plan, code)
        return launches, [self.document(jobs, one) for one in planned]

    def summary(self, documents: Sequence[Document]) -> list[str]:
        """Lines that say how much time and money the jobs will take."""
        if not documents:
            return ["no jobs are left to submit"]
        return cost_lines(documents, self._cluster.price, gpus=self.hosts.has_gpus)
