"""`bench tune`: race the settings of a space in short runs, measure the best as a study, and answer.

The trials are runs of the nested study `trials`: each rung of the race is a plan of it, so that the same
command continues after an interruption and no trial runs twice. The final is an ordinary study in the folder.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean

import msgspec

from harness.features.tune.answer import answer_of
from harness.features.tune.batches import short_plan
from harness.features.tune.race import BLOCKS, FINALISTS, GROWTH, Rung, finalists, next_rung, standings
from harness.features.tune.records import (
    TRIALS,
    TUNING,
    TUNING_FILE,
    TunedTrial,
    Tuning,
    TuningAnswer,
    read_record,
)
from harness.features.tune.space import (
    SPACE_FILE,
    Candidate,
    Space,
    differing,
    items_of,
    make_space,
    nothing_fits,
)
from harness.launch.tally import Tally
from harness.launchers.campaign_call import CampaignCall
from harness.launchers.launcher import LauncherCall
from harness.machine.code import planned_code
from harness.machine.device import cpu_model, visible_gpus
from harness.matrix import Matrix, signals_are_ctrl_c
from harness.plan.auto import AUTO
from harness.plan.estimate import STARTUP_S, StepTime, run_times
from harness.plan.options import read_duration_s
from harness.plan.request import plain_name
from harness.plan.study_file import BY_NAME, StudyFile
from reports.text import count, duration, number
from results import files
from results.cell import StepPolicy
from results.errors import MachineError, SchemaError, UsageError, bench_call
from results.files import study_lock
from results.outcome import Outcome
from results.parts import Unknown
from results.plan import Plan, Request
from results.run import RunResult
from results.store import Study
from results.value_types import seconds_between

FINAL_SHARE = 0.4
"""Share of `--max-time` that is kept for the final."""
_FINAL_BUDGETS_S = (20.0, 10.0, 5.0, 2.0, 1.0)
_BESIDE_S, _BESIDE_BLOCKS, _BESIDE_SHARE = 2.0, 2, 0.1
"""The rung that says what each choice contributes: its budget, which no rung of the race has, its blocks, and
the share of the time that is kept for it."""
EXAMPLE_S = 600.0
"""The `--max-time` for which a dry run without one says what it would try."""
_SILENCE_S = 300.0
"""Seconds without progress after which a trial counts as hung: more than compilation takes."""


class Tune(Matrix):
    """One `bench tune` call."""

    def __init__(
        self, options: StudyFile, *, space_file: Path | None = None, arguments: tuple[str, ...] = ()
    ) -> None:
        """Raises UsageError for options of several cells, or of a batch that is not known."""
        self._asked, self._space_path = options, space_file
        self._file = SPACE_FILE.read(space_file) if space_file else StudyFile()
        _check(options, self._file)
        plain = msgspec.structs.replace(options, max_time=None, max_gpu_hours=None, baseline=False)
        super().__init__(plain, study_file=None, arguments=arguments)
        if not isinstance(self._call, CampaignCall):
            raise UsageError(
                f"bench tune starts its launches itself, and --launcher {self._launcher.name} leaves them to "
                f"others: give --launcher local on a node that the cluster has given you"
            )
        [self._ranks] = self._request.gpus
        self._trials = Study(self._root / TRIALS)
        limits, hours = [math.inf], options.max_gpu_hours
        if options.max_time is not None:
            limits.append(read_duration_s(options.max_time, "--max-time"))
        if hours is not None:
            studies = [one for one in (self._trials, Study(self._root)) if one.is_there]
            spent_s = sum(sum(_device_seconds(one, one.results()).values()) for one in studies)
            limits.append(max(0.0, 3600 * hours - spent_s) / self._ranks)
        self._began, self._most_s = time.monotonic(), min(limits)
        """When this call began, and the seconds that it may take with its final."""
        self._call = self._limited(math.inf)
        self._tuning = Tuning(command=bench_call(*arguments), default="")
        self._is_whole = False
        """Whether all runs of the last rung have ended: one that was interrupted is not done again."""

    def _folder_name(self) -> str:
        if self._name is not None:
            return super()._folder_name()
        space = "" if self._space_path is None else f"-{plain_name(self._space_path.stem)}"
        return f"tune-{super()._folder_name()}{space}"

    def _of(self, options: StudyFile) -> tuple[Request, ...]:
        return self._requested(options, Path.cwd())

    @cached_property
    def _space(self) -> Space:
        self._count_own_models()
        return make_space(self._asked, self._file, self._of, self._limit(Study(self._root)))

    def _limited(self, most_s: float, **changes: float) -> LauncherCall:
        """A call of the launcher that ends its launches after `most_s` seconds.

        On CPU each run is a separate process, so that the kernel ends no other run with it for its memory.
        """
        options = msgspec.structs.replace(
            self._run_options,
            isolation="fork" if self._request.device == "cpu" else "launch",
            max_time_s=None if most_s == math.inf else max(0.0, most_s),
            **changes,
        )
        return self._accepted(options, self._console)

    def _left_s(self, share: float = 1.0) -> float:
        """Seconds of a share of the time that are left before the final must begin."""
        return share * self._most_s - (time.monotonic() - self._began) - self._final[1]

    # Before the search

    def show(self) -> None:
        """`--dry-run`: print the size of the space and the most that the search may take."""
        space, say = self._space, self._console.result
        say(f"tune in {self._root}: {count(len(space.candidates), 'setting')} that may fit")
        doubtful = sum(not one.fits_by_prediction for one in space.candidates)
        refused, large = count(sum(space.refused.values()), "point"), count(space.too_large, "setting")
        say(f"{refused} refused; {large} certainly too large, {doubtful:,} more predicted not to fit")
        for reason, times in space.refused.items():
            say(f"  refused {times} x, such as: {reason}")
        worst_s = self._worst_device_s()
        took = duration(worst_s / self._ranks * 1e9)
        say(f"at worst {worst_s / 3600:.2f} device-hours with the final, {took} on {self._ranks}")
        say(f"default: {space.default.words}")
        say(self._tried_in(EXAMPLE_S if self._most_s == math.inf else self._most_s))
        if space.free:
            say("the global batch is searched, and training changes with it: --global-batch-size keeps it")

    def _tried_in(self, most_s: float) -> str:
        """Say what a search of `most_s` seconds would try in short runs."""
        first = next_rung(self._space.settings, ())
        assert first is not None
        race_s = (1 - FINAL_SHARE) * (1 - _BESIDE_SHARE) * most_s
        starts = [self._space.by_id[one] for one in first.settings]
        # A rung is one launch.
        each_s = STARTUP_S[starts[0].cell.device] / len(starts)
        each_s += fmean(self._run_s(one, self._policy(first.budget_s)) for one in starts)
        tried = min(int(race_s / each_s), len(self._space.candidates))
        named = "; ".join(one.words for one in starts[:3])
        return (
            f"a --max-time of {duration(most_s * 1e9)} tries about {tried:,} of "
            f"{count(len(self._space.candidates), 'setting')}, first of all: {named}"
        )

    def _worst_device_s(self) -> float:
        """The device-seconds of a search in which each setting runs at each budget, started by itself."""
        worst_s = self._final[1]
        for one in self._space.candidates:
            worst_s += STARTUP_S[one.cell.device]
            worst_s += sum(n * self._run_s(one, self._policy(GROWTH**at)) for at, n in enumerate(BLOCKS))
        return self._ranks * min(worst_s, self._most_s)

    def _run_s(self, candidate: Candidate, steps: StepPolicy, *, proves: bool = True) -> float:
        cell, rate = msgspec.structs.replace(candidate.cell, steps=steps), candidate.setting.predicted_rate
        seconds = cell.global_batch / rate if rate else Unknown("it is not predicted")
        step = StepTime(basis="assumed", seconds=seconds)
        return sum(run_times(cell, step, proves=proves, known_s={}).values())

    def _policy(self, budget_s: float) -> StepPolicy:
        """The steps of a trial, which end by `budget_s`. On a GPU, which the trials before have warmed up, it
        has no warm-up."""
        block_steps, warm_up = (5, 0) if self._request.device == "cuda" else (2, 5)
        return StepPolicy(
            block_steps=block_steps,
            min_blocks=2,
            max_blocks=100_000,
            warmup_max_steps=warm_up,
            target=0,
            budget_s=budget_s,
            quads=0,
        )

    @cached_property
    def _final(self) -> tuple[StepPolicy, float]:
        """The steps of the final, and the seconds that are kept for it.

        The steps are those that were asked for, or the most that its share of the time has room for, last
        without a warm-up. Then its exchange is not switched off, which no answer needs.
        """
        asked, share_s = self._request.steps, FINAL_SHARE * self._most_s
        choices = [asked]
        if self._asked.budget is None:
            kept = 0 if self._asked.quads is None else asked.quads
            choices += [msgspec.structs.replace(asked, budget_s=one, quads=kept) for one in _FINAL_BUDGETS_S]
            choices.append(msgspec.structs.replace(choices[-1], warmup_max_steps=0))
        steps = next((one for one in choices if self._final_s(one) <= share_s), choices[-1])
        return steps, min(self._final_s(steps), share_s)

    def _final_s(self, steps: StepPolicy) -> float:
        """Estimate the seconds of a final with these steps, of which the first run of a setting is proven."""
        repeats, some = self._request.repeats, self._space.candidates[: 1 + FINALISTS]
        runs = (self._run_s(one, steps, proves=number == 0) for one in some for number in range(repeats))
        return repeats * STARTUP_S[some[0].cell.device] + sum(runs)

    # The search

    def run(self, *, report: bool) -> int:
        """Search, measure the final, and answer. Returns the exit code, as of `bench matrix`.

        Raises UsageError where nothing fits or the folder holds another tune, and MachineError where no trial
        could be measured.
        """
        study = Study.for_planning(self._root)
        kept = read_record(study.root)
        if kept is None and study.plans() and not self._trials.is_there:
            raise UsageError(f"{self._root} holds a study that no tune has made: give another --name")
        ids = set(self._space.by_id)
        if kept is not None and kept.settings and {one.id for one in kept.settings} != ids:
            raise UsageError(
                f"{self._root} holds a tune of another space, or of a workload that has changed since "
                f"({kept.command}): give another --name"
            )
        named = () if kept is None else (*kept.final, *(trial.setting for trial in kept.trials))
        if lost := sorted(set(named) - ids):
            raise SchemaError(
                f"{self._root / TUNING_FILE} names the setting {lost[0]!r}, which the space lacks: it was "
                f"damaged or edited; move it away, and the same command writes it again from the trials"
            )
        if kept is not None and kept.final:
            self._tuning = kept
            self._console.note(
                f"the search was over before, because {kept.ended}: this call measures what is left of the "
                f"final; another --name searches again"
            )
        else:
            self._search()
        self._require_one_device()
        steps = next((plan.request.steps for plan in study.plans()), self._final[0])
        best = [self._space.options_of(self._space.by_id[one]) for one in self._tuning.final]
        requests = [request for options in best for request in self._of(options)]
        self._requests = tuple(msgspec.structs.replace(one, steps=steps) for one in requests)
        self._request = self._requests[0]
        self._call = self._limited(self._left_s() + self._final[1])
        try:
            return super().run(report=report)
        except MachineError as error:
            raise self._cut_short(error) from error

    def _search(self) -> None:
        """Run rungs until the race or the time is over; then choose who goes to the final."""
        space = self._space
        with study_lock(self._trials.root) as lock, signals_are_ctrl_c():
            self._update()
            ended = self._race(lock) if len(space.candidates) > 1 else "the space has one setting"
        self._require_rates()
        best = finalists(self._tuning.settings)
        if not best:
            # The time was over before a trial had ended: the predicted ones are left.
            likely = [one.setting for one in space.candidates if one.fits_by_prediction]
            likely.sort(key=lambda one: -(one.predicted_rate or 0.0))
            best = tuple(one.id for one in likely if one.id not in self._failed)[:FINALISTS]
        first = space.default.setting.id
        final = dict.fromkeys((*best, *({first} - self._failed)))
        self._update(ended=ended, final=tuple(final))

    def _race(self, lock: int) -> str:
        """Run the rungs that are left. Returns why the search ended, a clause."""
        space, left_s = self._space, partial(self._left_s, 1 - _BESIDE_SHARE)
        for plan in self._trials.plans()[-1:]:
            # A call that was interrupted may have left it.
            self._run_rung(plan, lock)
        while rung := next_rung(space.settings, self._race_trials, device_s_left=self._ranks * left_s()):
            self._console.note(
                f"rung {rung.number}: {count(len(rung.settings), 'setting')} x "
                f"{count(rung.blocks, 'block')} of {rung.budget_s:g} s"
            )
            self._run_rung(self._added(rung), lock)
            last = len(self._trials.plans()) - 1
            if self._is_whole and not any(one.rung == last for one in self._tuning.trials):
                status = bench_call("status", self._trials.root)
                raise MachineError(f"no run of the last rung counts as a trial: {status} says why")
        in_time = left_s() > 0
        if len(chosen := self._around_the_first()) > 1 and self._left_s() > 0:
            self._console.note(f"what each choice contributes: {count(len(chosen), 'setting')}")
            beside = Rung(number=0, settings=chosen, blocks=_BESIDE_BLOCKS, budget_s=_BESIDE_S)
            self._run_rung(self._added(beside), lock)
        if not in_time:
            return "the rest of --max-time or --max-gpu-hours was for the final"
        return "the race was over" + ("" if self._most_s == math.inf else " within the time that was left")

    @property
    def _failed(self) -> set[str]:
        return {one.id for one in self._tuning.settings if one.state == "failed"}

    def _around_the_first(self) -> tuple[str, ...]:
        """The fastest setting, and for each choice one that differs in it alone and is simpler."""
        first = self._space.by_id[self._tuning.settings[0].id]
        failed, found = self._failed, dict[str, str]()
        for one in self._space.candidates:
            differ = differing(first.setting.choices, one.setting.choices)
            if len(differ) == 1 and one.complexity < first.complexity and one.setting.id not in failed:
                found.setdefault(min(differ), one.setting.id)
        return (first.setting.id, *found.values())

    def _added(self, rung: Rung) -> Plan:
        """Add the plan of a rung to the trials, or return the last one if it is the same."""
        steps = self._policy(rung.budget_s)
        cells = [msgspec.structs.replace(self._space.by_id[one].cell, steps=steps) for one in rung.settings]
        for plan in self._trials.plans()[-1:]:
            if list(plan.cells) == cells:
                return plan
        # Each rung has another order, so that a drift of the machine does not always favour one setting.
        changes = {"repeats": rung.blocks, "seed": cells[0].seed + len(self._trials.plans())}
        return short_plan(self._trials, cells, self._request, changes, command=self._arguments)

    def _run_rung(self, plan: Plan, lock: int) -> None:
        if self._left_s() <= 0:
            return
        self._is_whole = False
        self._require_one_device()
        # Nodes that start by themselves may wait for each other for longer.
        waits = self._asked.hang_after or self._launcher.several_hosts
        silence_s = self._run_options.silence_s if waits else _SILENCE_S
        call, code = self._limited(self._left_s(), silence_s=silence_s), planned_code([plan])
        call.check(self._trials, plan, code)
        try:
            interrupted = call.run(self._trials, plan, code, lock)
        except MachineError as error:
            self._update()
            raise self._cut_short(error) from error
        if interrupted:
            raise KeyboardInterrupt
        self._is_whole = self._left_s() > 0
        self._update()

    def _cut_short(self, error: MachineError) -> MachineError:
        """Return the error with what the trials have measured so far."""
        rated = [one for one in self._tuning.settings if one.rate is not None]
        if not rated:
            return error
        best, settings = rated[0], count(len(self._tuning.settings), "setting")
        return MachineError(
            f"{error}. The tune has no answer yet; its trials measured {len(rated)} of {settings}, the best "
            f"with {number(best.rate or 0.0)} samples/s: {self._space.by_id[best.id].words}; the same "
            f"command continues"
        )

    def _require_one_device(self) -> None:
        """Raise UsageError if runs of this tune were on several devices, or on others than this call's."""
        studies = [one for one in (self._trials, Study(self._root)) if one.is_there]
        ran = (run.environment for study in studies for run in study.results(keep=True))
        names = {environment.device_name for environment in ran if environment is not None}
        gpus = visible_gpus() if self._request.device == "cuda" else []
        names.add(gpus[0].name if gpus else cpu_model())
        if len(names) > 1:
            raise UsageError(
                f"the runs in {self._root} cannot be compared, as they would be on "
                f"{' and '.join(sorted(names))}: continue where they began, or give another --name"
            )

    def _require_rates(self) -> None:
        """Raise an error if trials failed and none has a rate: what failed, and what to do."""
        failed = [trial for trial in self._tuning.trials if trial.rate is None]
        if not failed or len(failed) < len(self._tuning.trials):
            return
        by_id, last = self._space.by_id, failed[-1]
        if all(trial.outcome is Outcome.OUT_OF_MEMORY for trial in failed):
            tried = [by_id[trial.setting] for trial in failed]
            needs = [(one.setting.predicted_bytes, one.words) for one in tried]
            how = "ran out of memory, and is predicted to need"
            raise UsageError(nothing_fits(needs, self._space.memory, how))
        raise MachineError(
            f"all {count(len(failed), 'trial')} failed, the last one as {last.outcome}: {last.reason}; "
            f"{bench_call('logs', self._trials.root)} prints what its ranks said, and "
            f"{bench_call('check', self._request.workloads[0])} tries the workload by itself; after a "
            f"change, give a new --name"
        )

    # The record

    @property
    def _race_trials(self) -> list[TunedTrial]:
        """The trials of the race: those that compare single choices come after it."""
        plans = enumerate(self._trials.plans())
        beside = {rung for rung, plan in plans if plan.cells[0].steps.budget_s == _BESIDE_S}
        return [one for one in self._tuning.trials if one.rung not in beside]

    def _update(self, **changes: object) -> None:
        """Derive the record of the tune from the trials, with `changes` of other fields, and write it."""
        space = self._space
        self._tuning = msgspec.structs.replace(self._tuning, trials=tuple(self._read_trials()))
        self._write(
            default=space.default.setting.id,
            refused=dict(space.refused),
            settings=standings(space.settings, self._race_trials),
            **changes,
        )

    def _write(self, **changes: object) -> None:
        self._tuning = msgspec.structs.replace(self._tuning, **changes)
        files.replace(self._root / TUNING_FILE, TUNING.encode(self._tuning), in_study=True)

    def _read_trials(self) -> list[TunedTrial]:
        """The trials so far, as they began. A run counts for the newest plan of its cell.

        Of a cell all runs count that ended well, and the last one if it failed. An interrupted run counts
        when its rung has ended, since it will not be repeated.
        """
        results, plans = self._trials.results(keep=True), self._trials.plans()
        spent, known = _device_seconds(self._trials, results), self._space.by_id
        by_cell: dict[str, list[RunResult]] = defaultdict(list)
        for run in results:
            by_cell[run.cell_id].append(run)
        found: dict[str, tuple[str, TunedTrial]] = {}
        for rung, plan in reversed(list(enumerate(plans))):
            whole = rung < len(plans) - 1 or self._is_whole
            so_far = Tally(plan=plan, conditions=self._call.conditions(planned_code([plan])).after(results))
            for cell in plan.cells:
                setting = msgspec.structs.replace(cell, steps=StepPolicy()).id
                if setting not in known:
                    continue
                runs = [run for run in by_cell[cell.id] if run.run_id not in found and so_far.allows(run)]
                good = [run for run in runs if run.outcome is Outcome.OK]
                bad = [run for run in runs if run.outcome is not Outcome.OK]
                bad = [run for run in bad if whole or not run.outcome.runs_again][-1:]
                for run in good if len(good) >= plan.request.repeats else good + bad:
                    ok = run.outcome is Outcome.OK and run.step_ns is not None
                    trial = TunedTrial(
                        setting=setting,
                        rung=rung,
                        block=run.repeat,
                        outcome=run.outcome,
                        reason=run.reason,
                        rate=cell.global_batch / run.step_ns.value * 1e9 if ok and run.step_ns else None,
                        memory_bytes=run.device_allocated_peak_bytes or run.rss_over_idle_bytes,
                        device_s=spent[run.run_id],
                    )
                    found[run.run_id] = run.started_at or run.run_id, trial
        return [one for _, one in sorted(found.values(), key=lambda pair: pair[0])]

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        counted = study.review().counted(results)
        runs = [*self._trials.results(keep=True), *results]
        lost = [run for run in runs if run.outcome is Outcome.NODE_FAILED]
        trains = self._launcher.trains
        answer = answer_of(self._tuning, self._space, plan, counted, trains=trains, lost=lost)
        self._write(answer=answer)
        code = super()._finish(study, plan, results, report=report)
        if answer is None:
            status = bench_call("status", self._root)
            self._console.warn(
                f"no run of the final has ended well: {status} says why; the same command continues"
            )
            return 1
        return max(code, self._tell(answer))

    def _tell(self, answer: TuningAnswer) -> int:
        """Print the answer. Returns 1 if the cluster kept settings from being measured, or else 0."""
        for line in (answer.sentence, *answer.remarks, *answer.commands):
            self._console.sentence(line)
        return int(answer.taken > 0)


def _device_seconds(study: Study, results: Sequence[RunResult]) -> Mapping[str, float]:
    """The device-seconds of each run: an equal share of what its launch took, or else its own time."""
    sizes, attempts = Counter(run.launch_id for run in results), study.attempts()
    found = {}
    for run in results:
        attempt, spent_s = attempts.get(run.run_id), sum(run.spent_ns.values()) / 1e9
        if attempt is not None and attempt.started_at is not None:
            spent_s = seconds_between(attempt.started_at, attempt.ended_at) / sizes[run.launch_id]
        found[run.run_id] = run.ranks_expected * spent_s
    return found


def _check(options: StudyFile, file: StudyFile) -> None:
    """Raise UsageError for options that a tune cannot have."""
    if options.workload is None:
        raise UsageError("bench tune takes one workload: give --workload, such as --workload gpt-nano")
    for name in ("workload", "gpus", "dataset", "seed", "global_batch_size"):
        given, flag = getattr(options, name), BY_NAME[name].flag
        if len(items_of(options, name)) != 1:
            raise UsageError(f"bench tune takes one value of {flag}, not {given}")
    batches = [one for one in (options.batch_size, file.batch_size) if one is not None]
    if any(AUTO in str(one).lower() for one in batches):
        raise UsageError(
            "bench tune finds by its trials which batches fit, so that it does not take --batch-size auto: "
            "leave it out, or give --global-batch-size N, which is tried in all parts that fit"
        )
    if batches and options.global_batch_size is not None:
        raise UsageError("give --batch-size or --global-batch-size: each follows from the other")
