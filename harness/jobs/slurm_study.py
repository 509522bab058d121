"""A study on Slurm: which jobs are left, what they will take, and their submission."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from harness.console import Console
from harness.jobs.baseline import baseline_of
from harness.jobs.documents import Document, SlurmDocuments
from harness.jobs.left import left
from harness.jobs.slurm_starter import python
from harness.jobs.standing import held_by_jobs, recover, standings
from harness.jobs.submit import Call, Feed, Submitted, Submitter, live_ids
from harness.jobs.words import COST_HEADS, COST_NUMERIC, cost_lines, cost_rows, require_within_budget
from harness.plan.options import read_duration_s
from harness.plan.schedule import PlannedLaunch
from harness.plan.study_file import StudyFile
from harness.plan_text import plan_header
from reports.text import count
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import RunOptions
from results.plan import Plan
from results.store import Study
from slurm.client import Client
from slurm.site import SiteProfile
from slurm.site_file import override, read_site

FEEDING = 3
"""Jobs at once where one submits the others."""


def site_of(options: StudyFile) -> SiteProfile:
    """The profile of the cluster: the file's, with what the flags say. Raises UsageError."""
    site = read_site(Path(options.site)) if options.site else SiteProfile()
    limit = None if options.time is None else f"{read_duration_s(options.time, '--time'):g}s"
    values: Mapping[str, object] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "cpus_per_gpu": options.cpus_per_gpu,
        "time.fixed": limit,
        # Without a profile, a CPU study asks for no GPUs.
        "gpu_request": "none" if options.device == "cpu" and not options.site else None,
    }
    return override(site, values)


class SlurmStudy:
    """The jobs of one `bench matrix --launcher slurm` call."""

    def __init__(
        self, options: StudyFile, run_options: RunOptions, site: SiteProfile, call: Call, console: Console
    ) -> None:
        self._options = options
        self._run_options = run_options
        self._site = site
        self._call = call
        self._console = console
        self._feed: Feed = options.feed or "once"

    @property
    def has_gpus(self) -> bool:
        return self._site.gpu_request != "none"

    @property
    def same_python(self) -> bool:
        """Whether the ranks run with the Python of this call."""
        return python(self._site) == sys.executable

    @property
    def gpus_per_node(self) -> int | None:
        return self._site.gpus_per_node

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: the jobs and their very scripts on stdout. Asks the scheduler nothing."""
        launches, documents = self._left(study, plan, code)
        for line in [*plan_header(study, plan, launches), *self._summary(documents)]:
            self._console.result(line)
        if documents:
            self._console.table(COST_HEADS, cost_rows(documents), numeric=COST_NUMERIC)
        for document in documents:
            self._console.result(f"\n# {document.job.name}")
            self._console.result(document.text)

    def check(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """Raise UsageError where a new study would take more than was allowed: before it is written."""
        if not study.plan_paths():
            _, documents = self._left(study, plan, code)
            require_within_budget(documents, self._options.max_gpu_hours)

    def submit(self, study: Study, plan: Plan, code: CodeVersion) -> int:
        """Submit what is left, under the study's lock. Returns the exit code: 1 if a job was refused."""
        client = Client()
        found = recover(study, client, standings(study, client))
        launches, documents = self._left(study, plan, code, held=held_by_jobs(found))
        for line in [*plan_header(study, plan, launches), *self._summary(documents)]:
            self._console.note(line)
        if not documents:
            live = live_ids(found)
            told = (
                f"{count(len(live), 'job')} of it are still live"
                if live
                else "every cell has its runs or its reason"
            )
            self._console.note(f"nothing to submit: {told}; bench status {study.root}")
            reported = any(standing.is_live and standing.job.purpose == "report" for standing in found)
            if live and self._options.report_job and not reported:
                submitter = Submitter(study, client, self._site, self._console)
                self._follow(study, plan, code, submitter, live, Submitted())
            return 0
        require_within_budget(documents, self._options.max_gpu_hours)
        self._require_room_for_feeders(documents)
        study.add_cell(baseline_of(plan.cells))
        submitter = Submitter(study, client, self._site, self._console)
        done = submitter.submit(documents, feed=self._feed)
        followed = self._follow(study, plan, code, submitter, [*live_ids(found), *done.taken], done)
        self._tell(study, done, fed=followed and self._feed == "depend")
        return 1 if done.refused else 0

    def _left(
        self, study: Study, plan: Plan, code: CodeVersion, *, held: Set[str] = frozenset()
    ) -> tuple[list[PlannedLaunch], list[Document]]:
        """The launches that are left, and the jobs for them."""
        per_cell = bool(self._options.jobs_per_cell)
        found = left(study, plan, self._run_options, code, per_cell=per_cell, held=held)
        documents = SlurmDocuments(study, plan, self._site, self._run_options, code)
        return found.launches, [documents.run(job) for job in found.jobs]

    def _summary(self, documents: Sequence[Document]) -> list[str]:
        if not documents:
            return ["no jobs are left to submit"]
        if self.has_gpus and self._site.cpus_per_gpu is None and not self._site.exclusive:
            self._console.warn(
                "Slurm may give all ranks of a node one CPU: say --cpus-per-gpu, or cpus_per_gpu or "
                "exclusive in the profile"
            )
        return cost_lines(documents, self._site.price, gpus=self.has_gpus)

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
        documents = SlurmDocuments(study, plan, self._site, self._run_options, code)
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
        self._console.note(f"bench status {study.root} says where it stands; then bench report {study.root}")
