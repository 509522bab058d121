"""The calls of launchers that make jobs: their common half, over every scheduler."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
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
from results.environment import CodeVersion
from results.plan import Plan
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
