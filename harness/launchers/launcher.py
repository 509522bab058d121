"""The base classes of launchers: the facts and behaviour that `bench matrix` and commands about jobs need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from harness.jobs.job_status import Cancelled, JobStatus
from harness.launch.tally import Conditions, study_tally
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Machine
from harness.terminal.console import Console
from results.environment import CodeVersion
from results.job import Job, RunOptions
from results.plan import Plan
from results.site import SiteCheck
from results.store import Study
from results.strict_yaml import FileKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCall:
    """One `bench matrix` call, as its launcher gets it."""

    options: StudyFile
    run_options: RunOptions
    console: Console
    arguments: tuple[str, ...] = ()
    """The arguments of the command line, for a job that makes the same call again."""
    folder: Path = field(default_factory=Path.cwd)
    """The folder in which the call was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHosts:
    """Facts of the hosts that workers will run on, as far as they are known before."""

    has_gpus: bool
    gpus_per_node: int | None = None
    """GPUs of a host; None: not known."""
    gpu_model: str | None = None
    """Their name in the catalogue; None: not known, or this machine's."""
    network_gbit_per_s: float | None = None
    """The rate of a host's adapters together; None: not known."""
    most: int | None = None
    """The devices of all hosts together; None: not known."""
    same_python: bool = True
    """Whether ranks run with the Python of this call, so that it sees the packages that they will import."""


class LauncherCall(ABC):
    """One call, accepted by a launcher: it checks, shows and runs plans."""

    hosts: WorkerHosts
    runs_plans_as_one: ClassVar[bool] = False
    """Whether the plans of several settings are run as one, which no file holds; else one after another."""

    @abstractmethod
    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """`--dry-run`: print the plan and what would be started on stdout. Writes nothing."""

    def check(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        """Refuse what cannot be done, before anything is written. `--dry-run` calls it too.

        Raises UsageError for a wrong call, and MachineError for what this machine lacks.
        """
        return

    def check_all(self, study: Study, plans: Sequence[Plan], code: CodeVersion) -> None:
        """`check` for the plans of all settings of a call. Raises as `check` does."""
        for plan in plans:
            self.check(study, plan, code)

    def conditions(self, code: CodeVersion) -> Conditions:
        """The conditions that earlier runs must share with new ones; of another Python only the code."""
        return Conditions.here(code) if self.hosts.same_python else Conditions.elsewhere(code)

    def device_hours(self, study: Study, plan: Plan, code: CodeVersion) -> float:
        """The estimated hours of all devices in the runs that are left of a plan."""
        so_far = study_tally(study, plan, study.results(), self.conditions(code), RunOptions())
        return so_far.estimate(so_far.planned("launch"), Machine.here()).device_hours

    @abstractmethod
    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int | None:
        """Start the launches that are left, under the study's lock (a descriptor that workers may inherit).

        Returns the exit code of the call; None if all was run, and the results are to be reported.
        """


class Launcher(ABC):
    """One way to start launches. Without state: everything of a call is in its `LauncherCall`."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    """Options of `bench matrix` that not every launcher reads, and that this one does, such as `site`."""
    site_file: ClassVar[FileKind[Any] | None] = None
    """The kind of file that `--site` names, a profile of a cluster; None if it reads no profile."""
    several_hosts: ClassVar[bool] = True
    """Whether nodes of a launch are hosts. If not, sizes are limited to this machine, which may have links
    between virtual nodes."""

    trains: ClassVar[bool] = False
    """Whether its launches may train cells, each continuing where the one before it has ended."""

    @abstractmethod
    def accept(self, call: MatrixCall) -> LauncherCall:
        """Take a call. Raises UsageError for options that it cannot follow."""

    def offer(self) -> str | None:
        """Advice to run sizes that exceed this machine by this launcher; None if it has no such advice."""
        return None

    def found_site(self) -> str | None:
        """The text of a profile of the cluster that is here; None if this launcher cannot describe one.

        Raises SchedulerError if the cluster does not answer, and UsageError where its nodes decide nothing.
        """
        return None

    def excluding(self, nodes: Sequence[str]) -> Sequence[str]:
        """Lines that say how jobs are kept off these nodes; none if this launcher does not choose nodes."""
        return ()

    def check_site(self, path: Path) -> Sequence[SiteCheck] | None:
        """Check the profile of a cluster in a file; None if this launcher reads no profiles.

        Raises UsageError for a file that is not a profile, and SchedulerError if the cluster does not answer.
        """
        return None


class JobLauncher(Launcher):
    """A launcher that makes jobs: a scheduler decides when they run, and `bench` asks about them later."""

    @abstractmethod
    def kept(self, study: Study, jobs: Sequence[Job]) -> Sequence[JobStatus]:
        """The jobs by their records; no scheduler is asked."""

    def asked(self, study: Study, jobs: Sequence[Job], *, settle: bool = False) -> Sequence[JobStatus]:
        """The jobs by the scheduler's answer; the end of a job that has ended is recorded.

        With `settle`, under the study's lock, also find out whether jobs without a recorded submission were
        submitted. Raises SchedulerError if the scheduler does not answer.
        """
        return self.kept(study, jobs)

    @abstractmethod
    def cancel(self, study: Study, live: Sequence[JobStatus]) -> Cancelled:
        """End jobs that are live, under the study's lock."""

    @abstractmethod
    def run_job(self, study: Study, job: Job) -> int:
        """Do a job's work where the scheduler has started it. Returns the exit code of its program."""
