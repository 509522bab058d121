"""What the calls of all launchers that make jobs have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence, Set

from harness.jobs.documents import Document, cost_lines, require_within_budget
from harness.jobs.job_status import held_by_jobs
from harness.jobs.planned import PlannedJob, left, planned_jobs
from harness.launchers.launcher import LauncherCall, MatrixCall
from harness.launchers.registry import job_statuses
from harness.plan.estimate import Hardware
from harness.plan.schedule import PlannedLaunch
from results.environment import CodeVersion
from results.plan import Plan
from results.site import SitePrice
from results.store import Study


class JobCall(LauncherCall):
    """A call whose launches are left to jobs."""

    def __init__(self, call: MatrixCall, price: SitePrice | None, gpu_model: str | None) -> None:
        """`gpu_model` is the catalogue's name of the cluster's GPUs; None: not known, or none."""
        self._options = call.options
        self._run_options = call.run_options
        self._console = call.console
        self._price = price
        self._hardware = Hardware(gpu_name=gpu_model)

    @abstractmethod
    def maker(self, study: Study, plan: Plan, code: CodeVersion) -> Callable[[PlannedJob], Document]:
        """What makes the records of jobs, in their order, and the texts that are submitted for them."""

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

    def left(
        self, study: Study, plan: Plan, code: CodeVersion, *, held: Set[str] = frozenset()
    ) -> tuple[list[PlannedLaunch], list[Document]]:
        """The launches that are left, but for the cells in `held`, and the jobs for them."""
        found = left(study, plan, self._run_options, code, held=held)
        jobs = planned_jobs(
            plan,
            found.launches,
            per_cell=bool(self._options.jobs_per_cell),
            earlier=found.earlier,
            hardware=self._hardware,
        )
        make = self.maker(study, plan, code)
        return found.launches, [make(job) for job in jobs]

    def summary(self, documents: Sequence[Document]) -> list[str]:
        """What the jobs will take."""
        if not documents:
            return ["no jobs are left to submit"]
        return cost_lines(documents, self._price, gpus=self.hosts.has_gpus)
