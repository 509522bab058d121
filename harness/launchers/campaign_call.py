"""The calls of launchers that start launches themselves, one after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.jobs.closing import close_lost_launches
from harness.jobs.job_status import held_by_jobs
from harness.launch.campaign import Campaign, CampaignContext
from harness.launch.starter import Starter
from harness.launch.supervise import Interrupted
from harness.launch.tally import Conditions, study_tally
from harness.launchers.jobs import job_statuses
from harness.launchers.launcher import LauncherCall, MatrixCall, WorkerHosts
from harness.launchers.plan_text import plan_summary, plan_tables
from harness.machine.code import checkout
from harness.plan.surroundings import Machine
from reports.text import count
from results.environment import CodeVersion
from results.launch import Launch
from results.plan import Plan
from results.store import Study

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it: 128 + SIGINT."""


class CampaignCall(LauncherCall):
    """A call that runs the launches that are left of the plan, and returns when the last one has ended."""

    runs_plans_as_one = True

    def __init__(self, call: MatrixCall) -> None:
        self._call = call
        self.hosts = WorkerHosts(has_gpus=bool(Machine.here().gpu_names))
        self.machine: Machine | None = None
        """The devices of each host of the ranks, if this process is not on one of them."""

    @abstractmethod
    def starter(self) -> Starter:
        """The starter of each launch."""

    @abstractmethod
    def line(self, launch: Launch, path: Path) -> str:
        """How a launch whose file is `path` is started, as it would be typed."""

    def show(self, study: Study, plan: Plan, code: CodeVersion) -> None:
        hosts = self.machine or Machine.here()
        show_plan(self._call, study, plan, self.conditions(code), line=self.line, hosts=hosts)

    def run(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> int | None:
        """Run the launches that are left. Returns INTERRUPTED if the user ended the call, else None."""
        console = self._call.console
        close_lost_launches(study)
        # No cell is run twice: SchedulerError if a scheduler that may have live jobs does not answer.
        held = held_by_jobs(job_statuses(study, settle=True))
        if held:
            console.note(f"{count(len(held), 'cell')} are left to jobs that are still live")
            cells = tuple(cell for cell in plan.cells if cell.id not in held)
            plan = msgspec.structs.replace(plan, cells=cells)
        options = self._call.run_options
        so_far = study_tally(study, plan, study.collect(), self.conditions(code), options)
        launches = so_far.planned(options.isolation)
        costs = so_far.estimate(launches, self.machine or Machine.here())
        for line in plan_summary(study, plan, launches, costs):
            console.note(line)
        context = CampaignContext(
            starter=self.starter(),
            checkout=checkout(),
            code=code,
            lock=lock,
            tally=so_far,
            machine=self.machine,
        )
        try:
            Campaign(study, plan, options, console).run(context)
        except Interrupted:
            study.collect()
            console.note("interrupted; the same command continues from here")
            return INTERRUPTED
        return None


def show_plan(
    call: MatrixCall,
    study: Study,
    plan: Plan,
    conditions: Conditions,
    *,
    line: Callable[[Launch, Path], str],
    hosts: Machine,
) -> None:
    """Print the plan, what it takes on such `hosts`, and the `line` of each launch. Writes nothing."""
    so_far = study_tally(study, plan, study.results(), conditions, call.run_options)
    launches = so_far.planned(call.run_options.isolation)
    plan_tables(call.console, study, plan, launches, so_far.estimate(launches, hosts), line=line)
