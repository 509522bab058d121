"""`bench matrix`: from options to a plan, from a plan to runs, from runs to a report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from harness.launch.check import can_check, check, check_request, count_own_parts
from harness.launch.preflight import (
    amd_only,
    link_obstacle,
    require_nvidia,
    require_room,
    require_tensorboard,
)
from harness.launch.supervise import ending_signals, handled
from harness.launch.tally import Tally, study_tally, uncounted
from harness.launchers.launcher import LauncherCall, MatrixCall
from harness.launchers.registry import launcher, launchers
from harness.machine.code import planned_code
from harness.plan.auto import AUTO, lighter
from harness.plan.expand import expand
from harness.plan.launchers import DEFAULT
from harness.plan.options import read_counts, read_duration_s, read_odds
from harness.plan.points import workloads_of
from harness.plan.request import make_requests, plain_name, study_name
from harness.plan.study_file import OPTIONS, StudyFile
from harness.plan.surroundings import MIB, Devices, Limit, Machine, Measured, Surroundings, devices_here
from harness.reporting.assumptions import CostFlags, read_assumptions
from harness.reporting.reading import Reading, warn_of_lost_plans
from harness.reporting.report import write_report
from harness.terminal.console import Console, QuietConsole
from harness.worker.turns import VARIABLE
from reports.analysis.knee import LEAST_RUNS
from reports.analysis.study import analyse
from reports.text import count
from results.cell import BASELINE_STRATEGY
from results.environment import CodeVersion
from results.errors import MachineError, UsageError, bench_call
from results.features import hook
from results.files import study_lock
from results.grouping import grouped
from results.job import RETRIES, SILENCE_S, RunOptions
from results.plan import Order, Plan, Request, Round, kind_of
from results.run import RunResult
from results.store import Study, utc_now
from workloads.catalog import WORKLOADS, facts

RUNS = Path("runs")
_WORK = ("request", "cells", "series", "skips", "order", "round")
"""Fields of a plan that define its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How a call runs the rounds of `--until`."""

    tallies: Callable[[Sequence[Plan]], Sequence[Tally]]
    """Counts the runs that each of some plans has."""
    hours: Callable[[Sequence[Plan]], float]
    """Estimates the device-hours of the runs that plans lack."""
    run: Callable[[Sequence[Plan]], int | None] | None
    """Runs what is left of plans; returns the exit code if others start their launches. None: a dry run."""
    console: Console


class Matrix:
    """One `bench matrix` call."""

    order: Order | None = None
    """The work of the ranks; None: they measure steps."""
    short_order: Order | None = None
    """The work that finds out whether the batch of a cell fits; None: a few measured steps."""

    def __init__(
        self, options: StudyFile, *, study_file: Path | None, arguments: tuple[str, ...] = ()
    ) -> None:
        """`arguments` are the words of the command line, kept in the plan and by jobs that repeat the
        call."""
        self._options = options
        self._arguments = arguments
        self._launcher = launcher(options.launcher or DEFAULT)
        self._console = Console()
        self._run_options = run_options(options)
        self._call = self._accepted(self._run_options, self._console)
        folder = study_file.parent if study_file else Path()
        self._requests = self._requested(options, folder.resolve())
        self._request = self._requests[0]
        """The first request, for the fields that are equal in the requests of all settings."""
        order = make(self._request) if (make := hook("order")) is not None else None
        if order is not None and self.order is not None:
            raise UsageError(f"bench does not train {self._request.workloads[0]}: bench matrix measures it")
        self.order = self.order or order
        self._name = options.name or (plain_name(study_file.stem) if study_file else None)
        self._root = Path(options.out) if options.out else RUNS / self._folder_name()
        self._began = time.monotonic()
        self._counted = False
        """Whether the parts of the user's models have been counted."""
        self._check()

    def _accepted(self, run_options: RunOptions, console: Console) -> LauncherCall:
        call = MatrixCall(
            options=self._options, run_options=run_options, console=console, arguments=self._arguments
        )
        return self._launcher.accept(call)

    def _folder_name(self) -> str:
        return study_name(*self._requests, name=self._name)

    def _requested(self, options: StudyFile, folder: Path) -> tuple[Request, ...]:
        hosts = self._call.hosts
        requests = make_requests(options, machine_has_cuda=hosts.has_gpus, source_folder=folder)
        known: dict[str, object] = {}
        if requests[0].gpus_per_node is None and hosts.gpus_per_node is not None:
            known["gpus_per_node"] = hosts.gpus_per_node
        if AUTO in {strategy for one in requests for strategy in one.every_strategy}:
            known |= {"gpu_model": hosts.gpu_model, "network_gbit_per_s": hosts.network_gbit_per_s}
        return tuple(msgspec.structs.replace(one, **known) for one in requests)

    def _check(self) -> None:
        """Refuse options that the launcher or this installation lacks, and warn of those without effect."""
        own = self._launcher.options
        readers = grouped((name, each.name) for each in launchers() for name in each.options - own)
        unused = [
            f"{option.flag} (for {' and '.join(readers[option.name])})"
            for option in OPTIONS
            if option.name in readers and getattr(self._options, option.name) is not None
        ]
        if unused:
            self._console.warn(f"no effect with --launcher {self._launcher.name}: {', '.join(unused)}")
        twice = [name for text in self._request.env if (name := text.partition("=")[0]) in os.environ]
        if twice:
            raise UsageError(
                f"--env sets {twice[0]}, which the environment of bench sets too: unset {twice[0]}"
            )
        self._check_links()
        if not self._launcher.several_hosts:
            self._check_this_host()
        if self._request.batches is not None:
            self._check_batch_auto()
        if self._options.until is not None:
            self._check_until()
        if self._run_options.tensorboard and self._call.hosts.same_python:
            require_tensorboard()
        for rank in self._run_options.trace:
            if rank >= min(self._request.gpus):
                self._console.note(
                    f"--trace {rank}: cells of fewer than {rank + 1} workers have no such rank, and keep no "
                    f"trace of it"
                )

    def _check_links(self) -> None:
        """Refuse links and devices that the launcher does not offer."""
        request = self._request
        if self._launcher.several_hosts and request.has_links:
            raise UsageError(
                f"--link makes nodes with separate networks on this host: leave --launcher "
                f"{self._launcher.name} out"
            )
        if self._options.oversubscribe and request.device == "cuda" and request.backend != "gloo":
            raise UsageError(
                f"--oversubscribe with --device cuda needs --backend gloo, not {request.backend}: NCCL takes "
                f"one rank a GPU; leave it out, and sizes beyond this machine are skipped with a reason"
            )

    def _check_this_host(self) -> None:
        """Refuse several hosts and AMD GPUs, and warn where no device is named and these are unused."""
        most = max(self._request.gpus)
        per_node = self._request.gpus_per_node or most
        if per_node < most:
            others = " or ".join(each.name for each in launchers() if each.several_hosts)
            raise UsageError(
                f"--gpus-per-node {per_node} puts {most} workers on several hosts, and --launcher "
                f"{self._launcher.name} has only this one: {others and f'use --launcher {others}, or '}leave "
                f"--gpus-per-node out"
            )
        require_nvidia(self._request.device)
        amd = amd_only() if self._options.device in (None, "auto") else None
        if amd is not None:
            self._console.warn(f"{amd}: this study runs on CPU ranks")

    def _check_batch_auto(self) -> None:
        """Refuse `--batch-size auto` where this call cannot measure, or another one must do equal work."""
        here = f"find it on one host with --launcher {DEFAULT}, and give the number here"
        if VARIABLE in os.environ:
            raise UsageError(f"--batch-size auto may differ between the sides of a paired comparison: {here}")
        if not self._call.runs_plans_as_one:
            launcher = f"--launcher {self._launcher.name} leaves launches to others"
            raise UsageError(f"--batch-size auto measures before it plans, and {launcher}: {here}")
        if hook("find_batches") is None:
            raise UsageError(
                "--batch-size auto needs short runs of a feature that this installation lacks: give a number"
            )

    def _check_until(self) -> None:
        """Refuse `--until` for work without a size to buy, and with fewer repeats than it needs."""
        read_odds(str(self._options.until), "--until")
        if hook("grow") is None:
            raise UsageError("--until needs a feature that this installation lacks: leave it out")
        if self.order is not None or VARIABLE in os.environ:
            raise UsageError("--until grows a matrix that is measured for its size to buy: leave it out here")
        if self._request.repeats < LEAST_RUNS:
            raise UsageError(
                f"--until needs {LEAST_RUNS} runs of each deciding size: leave --repeats "
                f"{self._request.repeats} out"
            )

    def show(self) -> None:
        """`--dry-run`: print the plan and its commands on stdout, and write nothing."""
        study = Study.for_planning(self._root)
        warn_of_lost_plans(study, self._console)
        self._warn_of_other_work(study)
        plans = self._plans(study)
        self._tell_of_plans(study, plans)
        code = planned_code([_as_one(plans)])
        try:
            self._call.check_all(study, self._to_run(plans), code)
        except MachineError as error:
            self._console.warn(f"without --dry-run this call is refused: {error}")
        if self._options.until is not None:
            plans = self._grow(study, plans, code)[0]
        plan = _as_one(plans)
        for sentence in uncounted(study.results(), plan, self._call.conditions(code)):
            self._console.note(sentence)
        for each in self._to_run(plans):
            self._call.show(study, each, code)
        self._check_own_code(plan)

    def _check_own_code(self, plan: Plan) -> None:
        """Build the user's own workloads of a plan and take steps on the CPU, if torch is installed.

        Raises UsageError for a workload that does not train. One that is planned for GPUs may need a GPU:
        it gets a warning instead.
        """
        if not (self._call.hosts.same_python and can_check()):
            return
        folder = Path(self._request.source_folder or Path.cwd())
        smallest: dict[tuple[str, str], int] = {}
        for cell in plan.cells:
            if facts(WORKLOADS.parse(cell.workload)).own_code:
                key = cell.workload, cell.dataset
                smallest[key] = min(cell.micro_batch, smallest.get(key, cell.micro_batch))
        for (workload, dataset), samples in smallest.items():
            found = check(
                check_request(workload, micro_batch=samples, folder=folder, strategies=(), dataset=dataset)
            )
            if found.failure is not None and self._request.device == "cuda":
                self._console.warn(
                    f"{workload} was not checked: on this CPU it fails ({found.failure}), and it is planned "
                    f"for GPUs"
                )
                continue
            if found.failure is not None:
                raise UsageError(f"{workload} does not train: {found.failure}")
            self._console.note(
                f"{workload} trains here: {found.parameters:,} parameters, loss {found.loss:.4g}; "
                f"{bench_call('check', workload)} says more"
            )

    def carry_out(self, *, dry_run: bool, report: bool) -> int:
        """Show the plan or run it. Returns the exit code of the command."""
        if not dry_run:
            return self.run(report=report)
        self.show()
        return 0

    def run(self, *, report: bool) -> int:
        """Run or submit the launches that are left. Returns the exit code: 0 for success, 130 after Ctrl-C.

        1 says that a cell lacks a run, that nothing could be measured, or that `require` is not met.
        """
        # Planned once before anything is written, so that a wrong call leaves no folder behind.
        study = Study.for_planning(self._root)
        plans = self._plans(study)
        self._tell_of_plans(study, plans)
        code = planned_code([_as_one(plans)])
        self._call.check_all(study, self._to_run(plans), code)
        with study_lock(self._root) as lock, signals_are_ctrl_c():
            require_room(self._root)
            study = Study.for_planning(self._root)
            warn_of_lost_plans(study, self._console)
            self._warn_of_other_work(study)
            if (unfound := self._find_batches(study, code, lock)) is not None:
                return unfound
            plans, ended = self._grown(study, code, lock)
            plan = _as_one(plans)
            if ended is not None:
                return ended or self._without_cells(plan)
            results = study.collect()
        return self._finish(study, plan, results, report=report)

    def _grown(self, study: Study, code: CodeVersion, lock: int) -> tuple[list[Plan], int | None]:
        """Run the launches that are left of all plans, with `--until` round by round.

        Returns the plans of the last round, and the exit code if others are to start the launches.
        """

        def run(made: Sequence[Plan]) -> int | None:
            if self._options.until is not None and self._call.runs_plans_as_one:
                # Rounds share the time of the call.
                self._call = self._accepted(self._left(self._run_options), self._console)
            plans = self._to_run(self._kept_plans(study, made))
            codes = [self._call.run(study, each, code, lock) for each in plans]
            return max((exit_code for exit_code in codes if exit_code is not None), default=None)

        plans = self._plans(study)
        if self._options.until is None:
            return plans, run(plans)
        return self._grow(study, plans, code, run)

    def _grow(
        self,
        study: Study,
        plans: Sequence[Plan],
        code: CodeVersion,
        run: Callable[[Sequence[Plan]], int | None] | None = None,
    ) -> tuple[list[Plan], int | None]:
        """The hook `grow`; without `run` it only finds the plans of the next round."""
        grow, conditions = hook("grow"), self._call.conditions(code)
        assert grow is not None

        def tallies(made: Sequence[Plan]) -> list[Tally]:
            results = study.results()
            return [study_tally(study, plan, results, conditions, self._run_options) for plan in made]

        odds = read_odds(str(self._options.until), "--until")
        rounds = Rounds(
            tallies=tallies,
            hours=lambda made: sum(self._call.device_hours(study, plan, code) for plan in made),
            run=run,
            console=self._console,
        )
        grown: tuple[list[Plan], int | None] = grow(study, plans, odds, rounds)
        return grown

    def _find_batches(self, study: Study, code: CodeVersion, lock: int) -> int | None:
        """Find the batches of `--batch-size auto` by short runs, for all later plans of this call.

        The time that they take counts for `max_time`. Returns an exit code if they did not end.
        """
        limit = self._limit(study)
        short = msgspec.structs.replace(
            self._run_options, isolation="fork", trace=(), tensorboard=False, rerun_failed=False
        )

        def execute(probes: Study, plan: Plan) -> int | None:
            return self._accepted(self._left(short), QuietConsole()).run(probes, plan, code, lock)

        found, find_batches = list[Request](), hook("find_batches")
        for request in self._requests:
            if request.batches is not None:
                assert find_batches is not None
                batches = find_batches(
                    study, request, execute, limit=limit, order=self.short_order, console=self._console
                )
                if isinstance(batches, int):
                    return batches
                request = batches
            found.append(request)
        if tuple(found) != self._requests:
            self._requests = tuple(found)
            self._call = self._accepted(self._left(self._run_options), self._console)
        return None

    def _left(self, options: RunOptions) -> RunOptions:
        """The options with the rest of `max_time`."""
        most_s = self._run_options.max_time_s
        rest_s = None if most_s is None else max(0.0, most_s - (time.monotonic() - self._began))
        return msgspec.structs.replace(options, max_time_s=rest_s)

    def _to_run(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        return [_as_one(plans)] if self._call.runs_plans_as_one else plans

    def _plans(self, study: Study) -> list[Plan]:
        """Make the plan of each setting."""
        earlier = study.plans()
        if self._name is not None and earlier and earlier[0].study != self._name:
            raise UsageError(
                f"{study.root} holds the study {earlier[0].study!r}, not {self._name!r}; choose another "
                f"folder with --out, or extend that one with --name {earlier[0].study}"
            )
        self._require_one_kind(study)
        self._count_own_models()
        made: list[Plan] = []
        limit = self._limit(study)
        for request in self._requests:
            if request.batches == () and (fit_batches := hook("fit_batches")):
                request = fit_batches(request, (*earlier, *made), limit)
            plan = expand(
                request,
                study=earlier[0].study if earlier else self._name or study.name,
                created_at=utc_now(),
                earlier=(*earlier, *made),
                limit=limit,
                baseline=self._plans_baselines(earlier),
            )
            made.append(msgspec.structs.replace(plan, command=self._arguments, order=self.order))
        if self._options.until is not None and len({cell.gpus for plan in made for cell in plan.cells}) < 2:
            raise UsageError("--until compares sizes, and this plan has fewer than two: give more --gpus")
        return made

    def _plans_baselines(self, earlier: Sequence[Plan]) -> bool:
        """Whether `expand` adds baselines: by default in a new study, and in one that has some already.

        Training runs and the sides of a paired comparison have no baselines.
        """
        if self.order is not None or VARIABLE in os.environ:
            return False
        if self._options.baseline is not None:
            return self._options.baseline
        points = [pattern for plan in earlier for pattern in plan.request.include]
        return not earlier or any((one.strategy, one.gpus) == (BASELINE_STRATEGY, 1) for one in points)

    def _tell_of_plans(self, study: Study, plans: Sequence[Plan]) -> None:
        """Print which baselines are added, and warn of new cells whose predicted memory exceeds a GPU's."""
        gpus = self._gpus()
        memory = Limit(gpus=gpus).gpu_bytes
        planned = {cell.id for plan in study.plans() for cell in plan.cells} if memory else set()
        over = [
            (cell, size)
            for plan in plans
            for cell in plan.cells
            if memory and (size := plan.predicted_bytes.get(cell.id, 0)) > memory and cell.id not in planned
        ]
        if gpus and memory and over:
            named = [
                f"{one.workload} with {one.strategy} on {one.gpus} ({size / MIB:,.0f})" for one, size in over
            ]
            named[3:] = ["..."] * (len(over) > 3)
            what = f"{count(len(over), 'cell')} may need more than a GPU's {memory / MIB:,.0f} MiB"
            self._console.warn(f"{what}, by prediction: {', '.join(named)}")
            arounds = (Surroundings.of(cell, gpus, self._request.gpus_per_node) for cell, _ in over[:3])
            for words in filter(None, dict.fromkeys(lighter(one.cell, one) for one in arounds)):
                self._console.note(f"  instead: {words}")
        asked = {pattern for one in self._requests for pattern in one.include}
        added = [one for plan in plans for one in plan.request.include if one not in asked]
        if workloads := dict.fromkeys(str(one.workload) for one in added):
            self._console.note(
                f"the plan also measures {BASELINE_STRATEGY} on 1 worker for {', '.join(workloads)}, as the "
                f"baseline of strategies that need more workers; --no-baseline leaves it out"
            )

    def _require_one_kind(self, study: Study) -> None:
        """Raise UsageError if the kind of the study's plans differs from the kind of this call."""
        mine = kind_of(self.order)
        others = [plan.kind for plan in study.plans() if plan.kind != mine]
        if others:
            raise UsageError(
                f"the cells in {study.root} are {others[0].cells}, and a study cannot also have cells "
                f"that are {mine.cells}: give another folder with --name or --out"
            )

    def _count_own_models(self) -> None:
        """Build the user's own models without memory, if torch is installed, and count their parts.

        `auto` and predictions of memory need them. A training run and a side of a paired comparison predict
        no memory.
        """
        predicted = self.order is None and VARIABLE not in os.environ
        weighed = any(AUTO in one.every_strategy or one.batches is not None for one in self._requests)
        if self._counted or not (predicted or weighed) or not (self._call.hosts.same_python and can_check()):
            return
        self._counted = True
        folder = Path(self._request.source_folder or Path.cwd())
        for workload in workloads_of(self._request):
            if facts(WORKLOADS.parse(workload)).own_code:
                count_own_parts(workload, folder)

    def _warn_of_other_work(self, study: Study) -> None:
        """Warn that the study has other workloads than this call, as its name was taken already."""
        kept = {workload for plan in study.plans() for workload in plan.request.workloads}
        if kept and not kept & set(self._request.workloads):
            asked, known = (", ".join(sorted(texts)) for texts in (self._request.workloads, kept))
            self._console.warn(
                f"{study.root} holds the study of {known}, and {asked} will be in the same report; another "
                f"--name makes a separate study"
            )

    def _limit(self, study: Study) -> Limit:
        """Return the limit on devices, for launchers that use only this host, and the limit on GPU memory.

        It has what the study has measured, if `auto` is to weigh that.
        """
        limit = Limit()
        if self._call.hosts.most is not None:
            word, hint = "devices", "give fewer --gpus, or name another --partition"
            limit = Limit(devices=self._call.hosts.most, word=word, hint=hint, where="the partition")
        if not self._launcher.several_hosts and not self._run_options.oversubscribe:
            limit = Machine.here().limit(self._request, (each.offer() for each in launchers()))
        link = link_obstacle() if self._request.has_links else None
        limit = replace(limit, link=link, trains=self.short_order is not None)
        if AUTO in {strategy for one in self._requests for strategy in one.every_strategy}:
            limit = replace(limit, measured=Measured.of_study(study, study.results()))
        return limit if self._options.keep_unfit else replace(limit, gpus=self._gpus())

    def _gpus(self) -> Devices | None:
        """Return the GPUs that cells run on; None on CPU."""
        if self._request.device == "cpu":
            return None
        model = self._call.hosts.gpu_model
        here = not self._launcher.several_hosts and model is None
        return devices_here() if here else Devices(gpu_name=model)

    def _without_cells(self, plan: Plan) -> int:
        """The exit code for skipped points: 1 if no cell is left, or if `require` asks for all points.

        `require` does not ask for points that no machine could run, or that were excluded.
        """
        if not plan.cells:
            self._console.note(
                f"nothing was measured: {count(len(plan.skips), 'point')} skipped, no cell left"
            )
            return 1
        left_out = [skip.reason for skip in plan.skips if skip.rule in ("machine", "link", "memory")]
        if self._options.require is None or not left_out:
            return 0
        self._console.note(
            f"--require all: {count(len(left_out), 'point')} of the matrix cannot run here: {left_out[0]}"
        )
        return 1

    def _kept_plans(self, study: Study, made: Sequence[Plan] | None = None) -> list[Plan]:
        """Add the plans of this call, or the plans `made` for its round, to the study.

        Returns them, or the plans of equal work that the study has already.
        """
        plans: list[Plan] = []
        for plan in self._plans(study) if made is None else made:
            work = [getattr(plan, name) for name in _WORK]
            earlier = reversed(study.plans())
            kept = next((one for one in earlier if [getattr(one, name) for name in _WORK] == work), None)
            if kept is None:
                study.add_plan(plan)
            for cell in kept.cells if kept else ():
                # A lost file of a cell is written again.
                study.add_cell(cell)
            plans.append(kept or plan)
        return plans

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        assumptions = read_assumptions(study, CostFlags(), self._console)
        figures = analyse(study.name, study.told_plans(), results, assumptions, study.review())
        figures = Reading(study=study, figures=figures, console=self._console).with_added()
        if report:
            write_report(study, figures, self._console)
        conditions = self._call.conditions(planned_code([plan]))
        done = study_tally(study, plan, results, conditions, RunOptions()).ok_runs
        missing = sum(done.get(cell.id, 0) < plan.wanted(cell.id) for cell in plan.cells)
        if missing:
            incomplete = f"{count(missing, 'cell')} of {len(plan.cells)} without all runs"
            self._console.note(f"{incomplete}: {bench_call('status', study.root)}")
        return max(int(missing > 0), self._without_cells(plan))


def _as_one(plans: Sequence[Plan]) -> Plan:
    """Join the plans of one call under the request of the first, with the folder of the user's files."""
    cells = {cell.id: cell for plan in plans for cell in plan.cells}
    requests = [plan.request for plan in plans]
    folder = next((one.source_folder for one in requests if one.source_folder is not None), None)
    batches = dict.fromkeys(batch for one in requests for batch in one.batches or ())
    return msgspec.structs.replace(
        plans[0],
        request=msgspec.structs.replace(
            requests[0], source_folder=folder, batches=tuple(batches) if batches else None
        ),
        cells=tuple(cells.values()),
        predicted_bytes={cell: size for plan in plans for cell, size in plan.predicted_bytes.items()},
        unpredicted={workload: why for plan in plans for workload, why in plan.unpredicted.items()},
        series=tuple(series for plan in plans for series in plan.series),
        round=_joined([plan.round for plan in plans if plan.round is not None]),
        skips=tuple(dict.fromkeys(skip for plan in plans for skip in plan.skips)),
    )


def _joined(rounds: Sequence[Round]) -> Round | None:
    runs = {cell_id: wanted for each in rounds for cell_id, wanted in each.runs.items()}
    return msgspec.structs.replace(rounds[0], runs=runs) if rounds else None


def run_options(options: StudyFile) -> RunOptions:
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
        proof=options.proof or "strict",
    )


@contextmanager
def signals_are_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a study as Ctrl-C does: the workers end first, and no record is lost."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # Ctrl-C raises already, unless a shell has started the command in the background.
    with handled([number for number in ending_signals() if number != signal.SIGINT], interrupt):
        yield
