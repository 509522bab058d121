"""`bench tune`: race the settings of a space in short runs, measure the best as a study, and answer.

The trials are runs of the nested study `trials`: each rung of the race is a plan of it, so that the same
command continues after an interruption and no trial runs twice. The final is an ordinary study in the folder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from harness.launch.pace import Deadline
from harness.launch.tally import Conditions, tally
from harness.launchers.campaign_call import CampaignCall
from harness.launchers.job_call import JobCall
from harness.launchers.launcher import JobLauncher, LauncherCall, MatrixCall
from harness.machine.code import planned_code
from harness.machine.device import cpu_model, visible_gpus
from harness.matrix import Matrix, signals_are_ctrl_c
from harness.plan.estimate import StepTime, estimate, run_seconds
from harness.plan.naming import plain_name
from harness.plan.options import read_duration_s, read_gpus, read_names
from harness.plan.schedule import schedule
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Devices, Hardware, devices_here
from harness.tune.answer import answer_of
from harness.tune.race import Rung, Trial, next_rung, standings
from harness.tune.space import SPACE_FILE, Candidate, Space, make_space, nothing_fits
from reports.text import count, duration
from results import files, schemas
from results.cell import StepPolicy
from results.errors import MachineError, UsageError, bench_call
from results.files import study_lock
from results.outcome import Outcome
from results.parts import Unknown
from results.plan import Plan, Request
from results.rebuild import rebuilt_plan
from results.run import RunResult
from results.store import Study, utc_now
from results.training_log import seconds_between
from results.tuning import TRIALS, TUNING_FILE, TunedSetting, TunedTrial, Tuning, TuningAnswer

FINALISTS = 3
"""Settings that the final measures in addition to the default."""
FINAL_SHARE = 0.4
"""Share of `--max-time` that is kept for the final."""
_FINAL_BUDGETS_S = (20.0, 10.0, 5.0, 2.0, 1.0)
_JOB_S = 300.0
"""Seconds that the job of a tune asks for in addition to `--max-time`: its start and the report."""


class Tune(Matrix):
    """One `bench tune` call."""

    def __init__(
        self, options: StudyFile, *, space_file: Path | None = None, arguments: tuple[str, ...] = ()
    ) -> None:
        """Raises UsageError for options that name no single workload and size."""
        if options.workload is None or len(read_names(options.workload)) != 1:
            raise UsageError("bench tune takes one workload: give --workload, such as --workload gpt-nano")
        if options.gpus is not None and len(read_gpus(options.gpus, "--gpus")) != 1:
            raise UsageError(f"bench tune takes one size: give --gpus 8, not --gpus {options.gpus}")
        self._asked, self._space_path = options, space_file
        self._file = SPACE_FILE.read(space_file) if space_file else StudyFile()
        most = options.max_time
        self._most_s = None if most is None else read_duration_s(most, "--max-time")
        self._deadline = Deadline(self._most_s, "--max-time was over")
        batch = None if options.batch_size == "auto" else options.batch_size
        plain = msgspec.structs.replace(
            options, batch_size=batch, max_time=None, max_gpu_hours=None, baseline=False
        )
        super().__init__(plain, study_file=None, arguments=arguments)
        if not isinstance(self._call, CampaignCall | JobCall):
            raise UsageError(
                f"bench tune starts its launches itself: --launcher {self._launcher.name} cannot"
            )
        self._call = self._limited(None)
        [self._ranks] = self._request.gpus
        self._trials = Study(self._root / TRIALS)
        self._tuning = Tuning(command=bench_call(*arguments), default="")
        self._is_whole = False
        """Whether all runs of the last rung have ended: one that was interrupted is not done again."""

    def _folder_name(self) -> str:
        if self._name is not None:
            return super()._folder_name()
        space = "" if self._space_path is None else f"-{plain_name(self._space_path.stem)}"
        return f"tune-{super()._folder_name()}{space}"

    @property
    def _devices(self) -> Devices:
        return self._gpus() or devices_here()

    def _one_request(self, point: StudyFile) -> Request:
        return self._requested(point, Path.cwd())[0]

    @cached_property
    def _space(self) -> Space:
        self._count_own_models()
        limit = self._limit(Study(self._root))
        return make_space(self._asked, self._file, self._one_request, limit, self._devices)

    def _limited(self, most_s: float | None) -> LauncherCall:
        """A call of the launcher that ends its launches after `most_s` seconds.

        On CPU each run is a separate process, so that the kernel ends no other run with it for its memory.
        """
        isolation = "fork" if self._request.device == "cpu" else "launch"
        options = msgspec.structs.replace(self._run_options, isolation=isolation, max_time_s=most_s)
        call = MatrixCall(
            options=self._options, run_options=options, console=self._console, arguments=self._arguments
        )
        job = isinstance(self._launcher, JobLauncher) and self._launcher.within(call, Study(self._root))
        return job or self._launcher.accept(call)

    # Before the search

    def show(self) -> None:
        """`--dry-run`: print the size of the space and the most that the search may take."""
        space, say = self._space, self._console.result
        settings = len(space.candidates)
        doubtful = sum(not one.fits_by_prediction for one in space.candidates)
        say(f"tune in {self._root}: {count(settings, 'setting')} that may fit")
        refused = count(sum(space.refused.values()), "point")
        large = count(space.too_large, "setting")
        say(f"{refused} refused; {large} certainly too large, {doubtful:,} more predicted not to fit")
        for reason, number in space.refused.items():
            say(f"  refused {number} x, such as: {reason}")
        worst_s = self._worst_device_s()
        took = duration(worst_s / self._ranks * 1e9)
        say(f"at worst {worst_s / 3600:.2f} device-hours with the final, {took} on {self._ranks}")
        say(f"default: {space.default.words}")
        if space.free:
            say("the global batch is searched, and training changes with it: --global-batch-size keeps it")

    def _worst_device_s(self) -> float:
        """The device-seconds of a search in which no trial separates settings, within the call's limits."""
        space, trials = self._space, list[Trial]()
        while rung := self._next_rung(trials):
            each = {one: self._trial_s(space.by_id[one], rung.budget_s) for one in rung.settings}
            trials += [
                Trial(
                    setting=one, rung=rung.number, block=block, rate=1.0, outcome=Outcome.OK, device_s=spent
                )
                for one, spent in each.items()
                for block in range(rung.blocks)
            ]
        worst = sum(trial.device_s for trial in trials) + self._ranks * self._final_s
        limits = (self._most_s and self._ranks * self._most_s, 3600 * (self._asked.max_gpu_hours or 0))
        return min([worst, *(limit for limit in limits if limit)])

    def _trial_s(self, candidate: Candidate, budget_s: float) -> float:
        """Estimate the device-seconds of a trial that proves its setting."""
        cell = msgspec.structs.replace(candidate.cell, steps=self._policy(budget_s))
        rate = candidate.setting.predicted_rate
        seconds = cell.global_batch / rate if rate else Unknown("it is not predicted")
        step = StepTime(basis="assumed", seconds=seconds)
        return self._ranks * run_seconds(cell, step, proves=True, known_s={})

    def _policy(self, budget_s: float) -> StepPolicy:
        """The steps of a trial. On a GPU, which the trials before have warmed up, it has no warm-up."""
        warm_up = 0 if self._request.device == "cuda" else 5
        return StepPolicy(
            block_steps=2, min_blocks=2, warmup_max_steps=warm_up, target=0, budget_s=budget_s, quads=0
        )

    @cached_property
    def _final_steps(self) -> StepPolicy:
        """The steps of the final: those that were asked for, or the most that its share of the time has room
        for. Then its exchange is not switched off, which no answer needs."""
        asked = self._request.steps
        if self._asked.budget is not None or self._most_s is None:
            return asked
        kept = 0 if self._asked.quads is None else asked.quads
        shorter = [msgspec.structs.replace(asked, budget_s=one, quads=kept) for one in _FINAL_BUDGETS_S]
        share_s = FINAL_SHARE * self._most_s
        return next((one for one in (asked, *shorter) if self._final_estimate(one) <= share_s), shorter[-1])

    @cached_property
    def _final_s(self) -> float:
        """Seconds that are kept for the final."""
        estimated = self._final_estimate(self._final_steps)
        return estimated if self._most_s is None else min(estimated, FINAL_SHARE * self._most_s)

    def _final_estimate(self, steps: StepPolicy) -> float:
        some = self._space.candidates[: 1 + FINALISTS]
        cells = [msgspec.structs.replace(one.cell, steps=steps) for one in some]
        per_node, repeats = self._request.gpus_per_node, self._request.repeats
        hardware = Hardware(cores=self._devices.cores, gpu_name=self._devices.gpu_name)
        launches = schedule(cells, repeats=repeats, gpus_per_node=per_node)
        return estimate(launches, earlier={}, hardware=hardware).seconds

    # The search

    def run(self, *, report: bool) -> int:
        """Search, measure the final, and answer. Returns the exit code, as of `bench matrix`.

        Raises UsageError where nothing fits or the folder holds another tune, and MachineError where no trial
        could be measured.
        """
        study = Study.for_planning(self._root)
        kept = study.tuning()
        if kept is None and study.plans():
            raise UsageError(f"{self._root} holds a study that no tune has made: give another --name")
        ids = set(self._space.by_id)
        if kept is not None and kept.settings and {one.id for one in kept.settings} != ids:
            raise UsageError(
                f"{self._root} holds a tune of another space ({kept.command}): repeat that command, or give "
                f"another --name"
            )
        if isinstance(self._call, JobCall):
            return self._submit(self._call, study, kept)
        if kept is not None and kept.final:
            # The search is over: the answer follows from the final alone.
            self._tuning = kept
        else:
            self._search()
        steps = next((plan.request.steps for plan in study.plans()), self._final_steps)
        timed = {"budget": steps.budget_s, "quads": steps.quads}
        options = [self._space.by_id[one].options for one in self._tuning.final]
        self._requests = tuple(self._one_request(msgspec.structs.replace(one, **timed)) for one in options)
        self._request = self._requests[0]
        self._call = self._limited(self._deadline.left_s)
        return super().run(report=report)

    def _submit(self, call: JobCall, study: Study, kept: Tuning | None) -> int:
        """Submit one job that makes this call in its allocation. Returns the exit code."""
        if kept is not None and kept.answer is not None:
            self._tell(kept.answer)
            return 0
        if self._most_s is None:
            raise UsageError("how long a tune takes is not known before: give a limit, such as --max-time 1h")
        plan = rebuilt_plan(study.name, [self._space.default.cell], ())
        request = msgspec.structs.replace(plan.request, gpus_per_node=self._request.gpus_per_node)
        plan = msgspec.structs.replace(plan, request=request)
        with study_lock(self._root):
            if kept is None:
                self._write()
            return call.submit_call(study, plan, planned_code([plan]), self._most_s + _JOB_S)

    def _search(self) -> None:
        """Run rungs until the race or the time is over; then choose who goes to the final."""
        space = self._space
        if not (self._root / TUNING_FILE).exists():
            # By this file the next call knows the folder, whatever happens to this one.
            self._root.mkdir(parents=True, exist_ok=True)
            self._write()
        with study_lock(self._trials.root) as lock, signals_are_ctrl_c():
            self._update()
            ended = self._race(lock) if len(space.candidates) > 1 else "the space has one setting"
        self._require_rates()
        failed = {one.id for one in self._tuning.settings if one.state == "failed"}
        best = [one.id for one in self._tuning.settings if one.rate is not None and one.id not in failed]
        if not best:
            # The time was over before a trial had ended: the predicted ones are left.
            fitting = [one.setting for one in space.candidates if one.setting.id not in failed]
            best = [one.id for one in sorted(fitting, key=lambda one: -(one.predicted_rate or 0.0))]
        first = space.default.setting.id
        final = dict.fromkeys((*best[:FINALISTS], *([] if first in failed else [first])))
        self._update(ended=ended, final=tuple(final))

    def _race(self, lock: int) -> str:
        """Run the rungs that are left. Returns why the search ended, a clause."""
        for plan in self._trials.plans()[-1:]:
            # A call that was interrupted may have left it.
            self._run_rung(plan, lock)
        while True:
            left_s = self._device_s_left(self._race_trials)
            if left_s is not None and left_s <= 0:
                return "the rest of --max-time or --max-gpu-hours was for the final"
            rung = self._next_rung(self._race_trials)
            if rung is None:
                return "the race was over" + ("" if left_s is None else " within the time that was left")
            self._console.note(
                f"rung {rung.number}: {count(len(rung.settings), 'setting')} x "
                f"{count(rung.blocks, 'block')} of {rung.budget_s:g} s"
            )
            steps = self._policy(rung.budget_s)
            chosen = [self._space.by_id[one].cell for one in rung.settings]
            plan = rebuilt_plan(TRIALS, [msgspec.structs.replace(one, steps=steps) for one in chosen], ())
            asked = self._request
            request = msgspec.structs.replace(
                plan.request,
                repeats=rung.blocks,
                gpus_per_node=asked.gpus_per_node,
                node_size=asked.node_size,
                source_folder=asked.source_folder,
            )
            plan = msgspec.structs.replace(
                plan, created_at=utc_now(), request=request, command=self._arguments
            )
            self._trials.add_plan(plan)
            self._run_rung(plan, lock)
            if self._is_whole and not any(one.rung == rung.number for one in self._tuning.trials):
                status = bench_call("status", self._trials.root)
                raise MachineError(f"no run of the last rung counts as a trial: {status} says why")

    def _run_rung(self, plan: Plan, lock: int) -> None:
        left_s = self._search_left_s
        if left_s is not None and left_s <= 0:
            return
        self._is_whole = False
        self._require_same_device()
        call, code = self._limited(left_s), planned_code([plan])
        call.check(self._trials, plan, code)
        if call.run(self._trials, plan, code, lock):
            raise KeyboardInterrupt
        left_s = self._search_left_s
        self._is_whole = left_s is None or left_s > 0
        self._update()

    @property
    def _search_left_s(self) -> float | None:
        """Seconds that are left before the final must begin; None without a limit."""
        left_s = self._deadline.left_s
        return None if left_s is None else left_s - self._final_s

    def _device_s_left(self, trials: Sequence[Trial]) -> float | None:
        """Device-seconds that the race may still take; None without a limit."""
        limits, left_s, hours = [], self._search_left_s, self._asked.max_gpu_hours
        if left_s is not None:
            limits.append(self._ranks * left_s)
        if hours is not None:
            spent = sum(trial.device_s for trial in trials) + self._ranks * self._final_s
            limits.append(3600 * hours - spent)
        return min(limits, default=None)

    def _next_rung(self, trials: Sequence[Trial]) -> Rung | None:
        space, left_s = self._space, self._device_s_left(trials)
        return next_rung(space.settings, trials, default=space.default.setting.id, device_s_left=left_s)

    def _require_same_device(self) -> None:
        """Raise UsageError if earlier trials ran on other devices than this call's would."""
        gpus = visible_gpus() if self._request.device == "cuda" else []
        here = gpus[0].name if gpus else cpu_model()
        for result in () if self._launcher.several_hosts else self._trials.results(figures=False):
            there = result.environment.device_name if result.environment is not None else here
            if there != here:
                raise UsageError(
                    f"the trials in {self._trials.root} ran on {there}, and this machine has {here}: "
                    f"continue where they ran, or give another --name for a tune of this machine"
                )

    def _require_rates(self) -> None:
        """Raise an error if trials failed and none has a rate: what failed, and what to do."""
        failed = [trial for trial in self._tuning.trials if trial.rate is None]
        if not failed or len(failed) < len(self._tuning.trials):
            return
        by_id, last = self._space.by_id, failed[-1]
        if all(trial.outcome is Outcome.OUT_OF_MEMORY for trial in failed):
            raise UsageError(nothing_fits([by_id[trial.setting] for trial in failed], certain=False))
        raise MachineError(
            f"all {count(len(failed), 'trial')} failed, the last one as {last.outcome}: {last.reason}; "
            f"{bench_call('logs', self._trials.root)} prints what its ranks said, and "
            f"{bench_call('check', self._request.workloads[0])} tries the workload by itself; after a "
            f"change, give a new --name"
        )

    # The record

    @property
    def _race_trials(self) -> list[Trial]:
        names = Trial.__dataclass_fields__
        return [Trial(**{name: getattr(one, name) for name in names}) for one in self._tuning.trials]

    def _update(self, **changes: object) -> None:
        """Derive the record of the tune from the trials, with `changes` of other fields, and write it."""
        space = self._space
        first, by_id = space.default.setting.id, space.by_id
        self._tuning = msgspec.structs.replace(self._tuning, trials=tuple(self._read_trials()))
        trials = self._race_trials
        stand = standings(space.settings, trials, default=first) if trials else ()
        where: dict[str, dict[str, Any]] = {
            one.setting: {"state": str(one.state), "why": one.why, "rate": one.rate} for one in stand
        }
        settings = tuple(
            TunedSetting(
                id=one,
                choices=dict(by_id[one].setting.choices),
                predicted_rate=by_id[one].setting.predicted_rate,
                predicted_bytes=by_id[one].predicted_bytes,
                **where.get(one, {}),
            )
            for one in where or by_id
        )
        self._write(default=first, refused=dict(space.refused), settings=settings, **changes)

    def _write(self, **changes: object) -> None:
        self._tuning = msgspec.structs.replace(self._tuning, **changes)
        files.replace(self._root / TUNING_FILE, schemas.TUNING.encode(self._tuning), in_study=True)

    def _read_trials(self) -> list[TunedTrial]:
        """The trials so far, in the order in which they began."""
        results, plans = self._trials.results(keep=True), self._trials.plans()
        spent, found = _device_seconds(self._trials, results), list[tuple[str, TunedTrial]]()
        for rung, plan in enumerate(plans):
            whole = rung < len(plans) - 1 or self._is_whole
            so_far = tally(results, plan, Conditions.here(planned_code([plan])), rerun_failed=False)
            for run in _trial_runs(plan, filter(so_far.allows, results), whole=whole):
                cell = self._trials.cell(run.cell_id)
                ok = run.outcome is Outcome.OK and run.step_ns is not None
                trial = TunedTrial(
                    setting=msgspec.structs.replace(cell, steps=StepPolicy()).id,
                    rung=rung,
                    block=run.repeat,
                    outcome=run.outcome,
                    reason=run.reason,
                    rate=cell.global_batch / run.step_ns.value * 1e9 if ok and run.step_ns else None,
                    memory_bytes=run.device_allocated_peak_bytes or run.rss_over_idle_bytes,
                    device_s=spent[run.run_id],
                )
                found.append((run.started_at or run.run_id, trial))
            for cell in plan.cells:
                if cell.id in so_far.inferred:
                    setting = msgspec.structs.replace(cell, steps=StepPolicy()).id
                    memory, why = Outcome.OUT_OF_MEMORY, so_far.closed[cell.id]
                    found.append(
                        ("~", TunedTrial(setting=setting, rung=rung, block=1, outcome=memory, reason=why))
                    )
        known = self._space.by_id
        return [one for _, one in sorted(found, key=lambda pair: pair[0]) if one.setting in known]

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        answer = answer_of(self._tuning, self._space, plan, study.review().counted(results))
        self._write(answer=answer)
        code = super()._finish(study, plan, results, report=report)
        if answer is None:
            status = bench_call("status", self._root)
            self._console.warn(
                f"no run of the final has ended well: {status} says why; the same command continues"
            )
            return 1
        self._tell(answer)
        return code

    def _tell(self, answer: TuningAnswer) -> None:
        for line in (answer.sentence, *answer.remarks, *answer.commands):
            self._console.sentence(line)


def _trial_runs(plan: Plan, results: Iterator[RunResult], *, whole: bool) -> Iterator[RunResult]:
    """Yield the runs of a rung that are trials: those that ended well, and the last of a cell that failed.

    A run that was interrupted counts once its rung is `whole`, as it will then not be repeated.
    """
    cells = {cell.id: list[RunResult]() for cell in plan.cells}
    for run in results:
        if run.cell_id in cells:
            cells[run.cell_id].append(run)
    for runs in cells.values():
        good = [run for run in runs if run.outcome is Outcome.OK]
        yield from good
        bad = [run for run in runs if run.outcome is not Outcome.OK][-1:]
        if len(good) < plan.request.repeats:
            yield from (run for run in bad if whole or not run.outcome.runs_again)


def _device_seconds(study: Study, results: Sequence[RunResult]) -> Mapping[str, float]:
    """The device-seconds of each run: its own time, and its share of what else its launch took."""
    own = {run.run_id: sum(run.spent_ns.values()) / 1e9 for run in results}
    sizes, attempts = Counter(run.launch_id for run in results), study.attempts()
    inside: dict[str, float] = defaultdict(float)
    for run in results:
        inside[run.launch_id] += own[run.run_id]
    found = {}
    for run in results:
        attempt, rest_s = attempts.get(run.run_id), 0.0
        if attempt is not None and attempt.started_at is not None:
            rest_s = max(0.0, seconds_between(attempt.started_at, attempt.ended_at) - inside[run.launch_id])
        found[run.run_id] = run.ranks_expected * (own[run.run_id] + rest_s / sizes[run.launch_id])
    return found
