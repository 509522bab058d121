"""What `bench matrix` does: from options to a plan, from a plan to runs, from runs to a report."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.code import checkout, code_version
from harness.console import Console
from harness.launch.campaign import Campaign, Surroundings
from harness.launch.machine import Machine
from harness.launch.manual import write_launches
from harness.launch.preflight import link_obstacle, require_room, require_torch
from harness.launch.starter import LocalStarter
from harness.launch.supervise import Interrupted
from harness.launch.tally import Conditions, tally
from harness.plan.expand import expand
from harness.plan.naming import plain_name, study_name
from harness.plan.options import read_duration_s
from harness.plan.request import make_request
from harness.plan.study_file import StudyFile
from harness.plan_text import plan_summary, plan_tables
from harness.report import write_report
from reports.analysis.study import analyse
from reports.text import count
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import RETRIES, SILENCE_S, RunOptions
from results.lock import study_lock
from results.plan import Plan
from results.run import RunResult
from results.store import Study, utc_now

RUNS = Path("runs")
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class Matrix:
    """One `bench matrix` call."""

    def __init__(self, options: StudyFile, *, study_file: Path | None) -> None:
        self._options = options
        self._machine = Machine.here()
        self._console = Console()
        folder = study_file.parent if study_file else Path()
        self._request = make_request(
            options, machine_has_cuda=bool(self._machine.gpu_names), source_folder=folder.resolve()
        )
        self._name = options.name or (plain_name(study_file.stem) if study_file else None)
        self._root = Path(options.out) if options.out else RUNS / study_name(self._request, name=self._name)
        self._run_options = RunOptions(
            isolation=options.isolation or "launch",
            oversubscribe=bool(options.oversubscribe),
            max_time_s=None if options.max_time is None else read_duration_s(options.max_time, "--max-time"),
            rerun_failed=options.rerun == "failed",
            silence_s=SILENCE_S
            if options.hang_after is None
            else read_duration_s(options.hang_after, "--hang-after"),
            prune=options.prune is not False,
            retries=RETRIES if options.retries is None else options.retries,
        )
        self._manual = options.launcher == "manual"
        per_node = self._request.gpus_per_node
        if per_node is not None and per_node < max(self._request.gpus) and not self._manual:
            raise UsageError(
                f"--gpus-per-node {per_node} puts {max(self._request.gpus)} workers on several hosts, and "
                f"this is one: add --launcher manual for the commands of each host, or leave it out"
            )
        if self._manual and self._request.has_links:
            raise UsageError(
                "--link makes nodes with a network of their own on this host: leave --launcher manual out"
            )
        if options.oversubscribe and self._request.device == "cuda":
            raise UsageError(
                "--oversubscribe is for CPU ranks: a CUDA device takes one rank; leave it out, and sizes "
                "beyond this machine are skipped with a reason"
            )

    def show(self) -> None:
        """`--dry-run`: the plan and its commands on stdout; nothing is written."""
        study = Study.for_planning(self._root)
        plan = self._plan(study)
        campaign = Campaign(study, plan, self._run_options, self._console)
        so_far = campaign.tally(study.results(), Conditions.here(code_version()))
        plan_tables(self._console, study, plan, campaign.planned(so_far), so_far.step_ns, manual=self._manual)

    def run(self, *, report: bool) -> int:
        """Run what is left. Returns the exit code: 0 if all cells have their runs, 130 after Ctrl-C."""
        if not self._manual:
            require_torch()
        folder = checkout()
        code = code_version()
        # Once before anything is written: a wrong call leaves no folder behind.
        self._plan(Study.for_planning(self._root))
        with study_lock(self._root) as lock, _sigterm_is_ctrl_c():
            require_room(self._root)
            study = Study.for_planning(self._root)
            plan = self._kept_plan(study)
            if self._manual:
                write_launches(study, plan, self._run_options, code, self._console)
                return 0
            campaign = Campaign(study, plan, self._run_options, self._console)
            self._announce(study, plan, campaign, code)
            try:
                campaign.run(Surroundings(starter=LocalStarter(), checkout=folder, code=code, lock=lock))
            except Interrupted:
                study.collect()
                self._console.note("interrupted; the same command goes on from here")
                return INTERRUPTED
            results = study.collect()
        return self._finish(study, plan, results, report=report)

    def _announce(self, study: Study, plan: Plan, campaign: Campaign, code: CodeVersion) -> None:
        so_far = campaign.tally(study.collect(), Conditions.here(code))
        for line in plan_summary(study, plan, campaign.planned(so_far), so_far.step_ns):
            self._console.note(line)

    def _plan(self, study: Study) -> Plan:
        earlier = study.plans()
        if self._name is not None and earlier and earlier[0].study != self._name:
            raise UsageError(
                f"{study.root} holds the study {earlier[0].study!r}, not {self._name!r}; choose another "
                f"folder with --out, or extend that one with --name {earlier[0].study}"
            )
        local = not (self._run_options.oversubscribe or self._manual)
        return expand(
            self._request,
            study=earlier[0].study if earlier else self._name or study.name,
            created_at=utc_now(),
            earlier=earlier,
            limit=self._machine.limit(self._request.device) if local else None,
            link_obstacle=link_obstacle() if self._request.has_links else None,
        )

    def _kept_plan(self, study: Study) -> Plan:
        """The plan of this call: the one that is kept already, if nothing new was asked for."""
        plan = self._plan(study)
        for kept in reversed(study.plans()):
            if (kept.request, kept.cells, kept.series, kept.skips) == (
                plan.request,
                plan.cells,
                plan.series,
                plan.skips,
            ):
                for cell in kept.cells:
                    # A cell's file that was lost is written again.
                    study.add_cell(cell)
                return kept
        study.add_plan(plan)
        return plan

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        figures = analyse(study.name, study.plans(), results)
        if report:
            write_report(study, figures, self._console)
        missing = _unfinished(plan, results, code_version())
        if missing:
            self._console.note(
                f"{count(missing, 'cell')} of {len(plan.cells)} without all runs: bench status {study.root}"
            )
        return 1 if missing else 0


def _unfinished(plan: Plan, results: list[RunResult], code: CodeVersion) -> int:
    done = tally(results, plan, Conditions.here(code), rerun_failed=True).ok_runs
    return sum(done.get(cell.id, 0) < plan.request.repeats for cell in plan.cells)


@contextmanager
def _sigterm_is_ctrl_c() -> Iterator[None]:
    """A scheduler's or a shell's SIGTERM ends a study as Ctrl-C does: workers first, nothing lost."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
