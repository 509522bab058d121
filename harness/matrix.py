"""What `bench matrix` does: from options to a plan, from a plan to runs, from runs to a report."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from harness.code import checkout, code_version
from harness.console import Console
from harness.costs import CostFlags, assumptions
from harness.jobs.kubernetes_study import KubernetesStudy, profile_of
from harness.jobs.slurm_study import SlurmStudy, site_of
from harness.jobs.standing import cells_of_live_jobs
from harness.jobs.submit import Call
from harness.launch.campaign import Campaign, Surroundings
from harness.launch.machine import Machine
from harness.launch.manual import write_launches
from harness.launch.preflight import link_obstacle, require_room, require_tensorboard, require_torch
from harness.launch.starter import LocalStarter
from harness.launch.supervise import Interrupted
from harness.launch.tally import Conditions, Tally, tally
from harness.plan.expand import expand
from harness.plan.naming import plain_name, study_name
from harness.plan.options import BY_NAME, read_counts, read_duration_s
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
from results.plan import Plan, Request
from results.run import RunResult
from results.store import Study, utc_now

RUNS = Path("runs")
_FOR_JOBS = (
    *(
        "site",
        "partition",
        "account",
        "qos",
        "cpus_per_gpu",
        "time",
        "jobs_per_cell",
        "feed",
        "max_gpu_hours",
        "report_job",
    ),
    *("apply", "kind"),
)
"""Options that say how jobs are submitted."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class Matrix:
    """One `bench matrix` call."""

    def __init__(
        self, options: StudyFile, *, study_file: Path | None, arguments: tuple[str, ...] = ()
    ) -> None:
        """`arguments` are those of the command line, for a job that makes the same call again."""
        self._options = options
        self._launcher = options.launcher or "local"
        self._machine = Machine.here()
        self._console = Console()
        self._call = Call(arguments=arguments, folder=Path.cwd())
        self._cluster = self._cluster_of(options)
        folder = study_file.parent if study_file else Path()
        self._request = self._requested(options, folder.resolve())
        self._name = options.name or (plain_name(study_file.stem) if study_file else None)
        self._root = Path(options.out) if options.out else RUNS / study_name(self._request, name=self._name)
        self._run_options = _run_options(options)
        self._check()
        self._check_extras()

    def _cluster_of(self, options: StudyFile) -> SlurmStudy | KubernetesStudy | None:
        """What submits jobs; None where there are none."""
        if self._launcher == "slurm":
            return SlurmStudy(options, _run_options(options), site_of(options), self._call, self._console)
        if self._launcher == "kubernetes":
            return KubernetesStudy(options, _run_options(options), profile_of(options), self._console)
        return None

    def _requested(self, options: StudyFile, folder: Path) -> Request:
        cluster = self._cluster
        cuda = bool(self._machine.gpu_names) if cluster is None else cluster.has_gpus
        request = make_request(options, machine_has_cuda=cuda, source_folder=folder)
        if cluster is not None and request.gpus_per_node is None and cluster.gpus_per_node is not None:
            return msgspec.structs.replace(request, gpus_per_node=cluster.gpus_per_node)
        return request

    def _check(self) -> None:
        """Refuse what the launcher cannot do, and tell what it has no use for."""
        unused = [name for name in _FOR_JOBS if getattr(self._options, name) is not None]
        if unused and self._launcher in ("local", "manual"):
            flags = ", ".join(BY_NAME[name].flag for name in unused)
            self._console.warn(f"no effect without jobs (--launcher slurm or kubernetes): {flags}")
        request, local = self._request, self._launcher == "local"
        most, per_node = max(request.gpus), request.gpus_per_node
        if per_node is not None and per_node < most and local:
            raise UsageError(
                f"--gpus-per-node {per_node} puts {most} workers on several hosts, and this is one: add "
                f"--launcher slurm, or manual for the commands of each host, or leave it out"
            )
        if not local and request.has_links:
            raise UsageError(
                f"--link makes nodes with a network of their own on this host: leave --launcher "
                f"{self._launcher} out"
            )
        if self._options.oversubscribe and request.device == "cuda":
            raise UsageError(
                "--oversubscribe is for CPU ranks: a CUDA device takes one rank; leave it out, and sizes "
                "beyond this machine are skipped with a reason"
            )

    def _check_extras(self) -> None:
        """What is kept beside the records: refuse what cannot be, and tell where it will not be."""
        here = self._cluster is None or self._cluster.same_python
        if self._run_options.tensorboard and here:
            require_tensorboard()
        smallest = min(self._request.gpus)
        for rank in self._run_options.trace:
            if rank >= smallest:
                self._console.note(
                    f"--trace {rank}: cells of fewer than {rank + 1} workers have no such rank, and keep no "
                    f"trace of it"
                )

    def show(self) -> None:
        """`--dry-run`: the plan and its commands on stdout; nothing is written."""
        study = Study.for_planning(self._root)
        plan = self._plan(study)
        if self._cluster is not None:
            self._cluster.show(study, plan, code_version())
            return
        campaign = Campaign(study, plan, self._run_options, self._console)
        so_far = campaign.tally(study.results(), Conditions.here(code_version()))
        plan_tables(
            self._console,
            study,
            plan,
            campaign.planned(so_far),
            so_far.step_ns,
            manual=self._launcher == "manual",
        )

    def run(self, *, report: bool) -> int:
        """Run or submit what is left. Returns the exit code: 0 if all is well, 130 after Ctrl-C."""
        if self._launcher == "local":
            require_torch()
        code = code_version()
        # Once before anything is written: a wrong call leaves no folder behind.
        study = Study.for_planning(self._root)
        plan = self._plan(study)
        if self._cluster is not None:
            self._cluster.check(study, plan, code)
        with study_lock(self._root) as lock, _sigterm_is_ctrl_c():
            require_room(self._root)
            study = Study.for_planning(self._root)
            plan = self._kept_plan(study)
            if self._cluster is not None:
                return self._cluster.submit(study, plan, code)
            if self._launcher == "manual":
                write_launches(study, plan, self._run_options, code, self._console)
                return 0
            if not self._worked(study, plan, code, lock):
                return INTERRUPTED
            results = study.collect()
        return self._finish(study, plan, results, report=report)

    def _worked(self, study: Study, plan: Plan, code: CodeVersion, lock: int) -> bool:
        """Run what is left on this machine. Returns False if the user ended it."""
        held = cells_of_live_jobs(study)
        if held:
            self._console.note(f"{count(len(held), 'cell')} are left to jobs that are still live")
            cells = tuple(cell for cell in plan.cells if cell.id not in held)
            plan = msgspec.structs.replace(plan, cells=cells)
        campaign = Campaign(study, plan, self._run_options, self._console)
        self._announce(study, plan, campaign, campaign.tally(study.collect(), Conditions.here(code)))
        try:
            campaign.run(Surroundings(starter=LocalStarter(), checkout=checkout(), code=code, lock=lock))
        except Interrupted:
            study.collect()
            self._console.note("interrupted; the same command goes on from here")
            return False
        return True

    def _announce(self, study: Study, plan: Plan, campaign: Campaign, so_far: Tally) -> None:
        for line in plan_summary(study, plan, campaign.planned(so_far), so_far.step_ns):
            self._console.note(line)

    def _plan(self, study: Study) -> Plan:
        earlier = study.plans()
        if self._name is not None and earlier and earlier[0].study != self._name:
            raise UsageError(
                f"{study.root} holds the study {earlier[0].study!r}, not {self._name!r}; choose another "
                f"folder with --out, or extend that one with --name {earlier[0].study}"
            )
        limited = self._launcher == "local" and not self._run_options.oversubscribe
        return expand(
            self._request,
            study=earlier[0].study if earlier else self._name or study.name,
            created_at=utc_now(),
            earlier=earlier,
            limit=self._machine.limit(self._request.device) if limited else None,
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
        granted = assumptions(study, CostFlags(), self._console)
        figures = analyse(study.name, study.plans(), results, granted)
        if report:
            write_report(study, figures, self._console)
        missing = _unfinished(plan, results, code_version())
        if missing:
            self._console.note(
                f"{count(missing, 'cell')} of {len(plan.cells)} without all runs: bench status {study.root}"
            )
        return 1 if missing else 0


def _run_options(options: StudyFile) -> RunOptions:
    silence = options.hang_after
    return RunOptions(
        isolation=options.isolation or "launch",
        oversubscribe=bool(options.oversubscribe),
        max_time_s=None if options.max_time is None else read_duration_s(options.max_time, "--max-time"),
        rerun_failed=options.rerun == "failed",
        silence_s=SILENCE_S if silence is None else read_duration_s(silence, "--hang-after"),
        prune=options.prune is not False,
        retries=RETRIES if options.retries is None else options.retries,
        trace=() if options.trace is None else read_counts(options.trace, "--trace"),
        tensorboard=bool(options.tensorboard),
    )


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
