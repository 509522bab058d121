"""The calls of launchers that make jobs: their common half, over every scheduler."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from harness.jobs.documents import Document, JobMaker, cost_lines, gpu_hours, require_within_budget
from harness.jobs.job_status import held_by_jobs
from harness.jobs.planned import PlannedJob, planned_jobs
from harness.launch.tally import Conditions, study_tally
from harness.launchers.jobs import job_statuses
from harness.launchers.launcher import LauncherCall, MatrixCall
from harness.plan.schedule import PlannedLaunch
from harness.plan.surroundings import Devices
from reports.text import duration
from results.environment import CodeVersion
from results.errors import UsageError
from results.plan import Plan
from results.site import SitePrice, TimeLimits, require_whole_gpus
from results.store import Study


class JobCall(LauncherCall):
    """A call whose launches are left to jobs."""

    def __init__(
        self, call: MatrixCall, launcher: str, price: SitePrice | None, gpu_model: str | None
    ) -> None:
        """`gpu_model` is the catalogue's name of the cluster's GPUs; None: not known, or none."""
        self._call = call
        self._options = call.options
        self._console = call.console
        self._launcher = launcher
        self._price = price
        self._hardware = Devices(gpu_name=gpu_model)

    gpu_kind: str | None = None
    """The cluster's name of the GPUs that jobs ask for; None: jobs give no name."""

    @abstractmethod
    def document(self, jobs: JobMaker, planned: PlannedJob) -> Document:
        """Make the record of a job, and the text that is submitted for it."""

    def maker(self, study: Study, plan: Plan, code: CodeVersion) -> JobMaker:
        return JobMaker(study, plan, self._launcher, self._call.run_options, code)

    def submit_call(
        self, study: Study, plan: Plan, code: CodeVersion, most_s: float, files: Mapping[str, Path]
    ) -> int:
        """Submit a job that makes this call again in its allocation, of the size of the plan's largest cell.

        Its launches take `most_s` seconds at most. `files` are those that the call names, by flag. Returns
        the exit code. Raises UsageError, before anything is written, if the launcher has no such jobs or the
        site's time limit is shorter.
        """
        raise UsageError(
            f"--launcher {self._launcher} does not start the launches of a call in a job: make the "
            f"same call with --launcher local on one of its nodes"
        )

    def limit_of_call_s(self, limits: TimeLimits, most_s: float) -> float:
        """The time limit of a job of `submit_call`. Raises UsageError if it is shorter than `most_s`."""
        limit_s = limits.limit_s(most_s)
        if limit_s < most_s:
            raise UsageError(
                f"the job of this call may take {duration(most_s * 1e9)}, and --time or the profile's time "
                f"gives it {duration(limit_s * 1e9)}: give a shorter --max-time or a longer time"
            )
        return limit_s

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
            hardware=replace(self._hardware, measured=so_far.measured),
        )
        for one in planned:
            require_whole_gpus(self.gpu_kind, one.placement.gpus_per_node)
        jobs = self.maker(study, plan, code)
        return launches, [self.document(jobs, one) for one in planned]

    def summary(self, documents: Sequence[Document]) -> list[str]:
        """Lines that say how much time and money the jobs will take."""
        if not documents:
            return ["no jobs are left to submit"]
        return cost_lines(documents, self._price, gpus=self.hosts.has_gpus)
