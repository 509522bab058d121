"""A plan's launches, one after another, until every cell has its runs or its reason."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.launch.conduct import Deadline, Progress, conduct_of
from harness.launch.ending import Seen
from harness.launch.preflight import require_devices, require_room, warnings
from harness.launch.starter import Starter
from harness.launch.supervise import POLL_S, Supervisor, Watch
from harness.launch.tally import Conditions, Tally, study_tally
from harness.plan.auto import lighter
from harness.plan.launchers import job_variables
from harness.plan.schedule import PlannedLaunch
from harness.plan.surroundings import Machine, Measured, Surroundings, devices_of
from harness.terminal.console import Console, ProgressLine
from results.cell import Cell, point
from results.environment import CodeVersion
from results.errors import MachineError
from results.job import RunOptions
from results.launch import Attempt, Launch, Slot
from results.outcome import Evidence, Outcome
from results.plan import Plan
from results.run import NOT_PROVEN, RunResult
from results.store import Study, new_id

NEVER_READY = 3
"""Launches in a row in which no cell began, after which no more are started."""
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 60.0
"""Pauses before a launch that the scheduler did not answer is tried again: each is twice the one before."""
_NOT_STARTED = "the launches that are left were not started: fix that, then run the same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignContext:
    """The surroundings of a campaign: what starts its launches, and the allocation they are in."""

    starter: Starter
    checkout: Path
    code: CodeVersion
    lock: int | None = None
    """Descriptor of the study's lock, for the workers to inherit."""
    job_id: str | None = None
    conditions: Conditions | None = None
    """The conditions that earlier runs must share with new ones; None: the conditions of this process."""
    tally: Tally | None = None
    """The runs of the study so far; None: they are counted under `conditions`."""
    machine: Machine | None = None
    """The devices of each host of the ranks; None: this process is on one of them, and sees them."""
    only: frozenset[str] | None = None
    """Ids of the cells that are run; None: all of the plan."""
    first: tuple[PlannedLaunch, ...] = ()
    """Launches that precede the launches of the plan; they run only if the plan has launches left."""


class Campaign:
    """Runs the launches of one plan that are not done."""

    def __init__(
        self,
        study: Study,
        plan: Plan,
        options: RunOptions,
        console: Console,
        *,
        deadline: Deadline | None = None,
    ) -> None:
        self._study = study
        self._plan = plan
        self._options = options
        self._console = console
        self._machine = Machine.here()
        self._deadline = deadline or Deadline(options.max_time_s, "--max-time was over")
        self._never_ready = 0
        """Launches in a row, up to now, in which no cell began."""
        self._unanswered = 0
        """Launches in a row, up to now, that the scheduler did not answer."""
        self._conduct = conduct_of(plan)

    def run(self, context: CampaignContext) -> None:
        """Run all launches that are left.

        Raises Interrupted when this process is asked to end, and MachineError if workers do not start.
        """
        tally = context.tally or self._tally(context.conditions or Conditions.here(context.code))
        launches = self._left(tally, context.only)
        if not launches:
            return
        launches = [*context.first, *launches]
        # The state of this host says nothing about other hosts.
        found = self._preflight() if context.machine is None else ()
        machine = context.machine or self._machine
        with self._console.progress(sum(len(launch.cells) for launch in launches)) as line:
            pace = self._pace(line, launches, tally, machine)
            maker = LaunchMaker(self._plan, self._options, machine, context, found)
            for planned in launches:
                self._run_launch(planned, maker, tally, pace)
                if self._deadline.is_over:
                    break

    def _tally(self, conditions: Conditions) -> Tally:
        results = self._study.results(keep=True, cells={cell.id for cell in self._plan.cells})
        return study_tally(self._study, self._plan, results, conditions, self._options)

    def _left(self, tally: Tally, only: frozenset[str] | None) -> list[PlannedLaunch]:
        """The launches that are left of the plan, or of `only` these cells; says which cells are left out."""
        every = frozenset(cell.id for cell in self._plan.cells)
        cells = every if only is None else every & only
        for cell_id, reason in tally.closed.items():
            if cell_id in cells:
                self._console.note(f"{cell_id} is left out: {reason}")
        launches = tally.planned(self._options.isolation)
        kept = (tuple(cell for cell in launch.cells if cell.id in cells) for launch in launches)
        return [replace(launch, cells=own) for launch, own in zip(launches, kept, strict=True) if own]

    def _preflight(self) -> tuple[str, ...]:
        require_devices(self._plan.request.device)
        found = warnings(self._plan.request.device)
        for warning in found:
            self._console.warn(warning)
        return found

    def _pace(
        self, line: ProgressLine, launches: Sequence[PlannedLaunch], tally: Tally, machine: Machine
    ) -> Progress:
        names = {cell.id: f"{cell.workload}, {point(cell)}" for cell in self._plan.cells}
        times = tally.estimate(launches, machine).launches
        return self._conduct.progress(
            line, self._study, launches, times=times, names=names, deadline=self._deadline
        )

    def _run_launch(self, planned: PlannedLaunch, maker: LaunchMaker, tally: Tally, pace: Progress) -> None:
        pending = [cell for cell in planned.cells if cell.id not in tally.closed]
        retries = self._options.retries
        while pending and not self._deadline.is_over:
            require_room(self._study.root)
            launch = maker.launch(self._conduct.adapted(planned, self._console), pending, tally)
            watch = Watch(report=pace.report, deadline=self._deadline, lock=maker.context.lock)
            self._console.detail(f"{self._study.launch_folder(launch.launch_id)} is started")
            attempt, seen = Supervisor(
                self._study, launch, maker.context.checkout, maker.context.starter, watch
            ).run()
            self._console.detail(
                f"it ended with exit code {attempt.exit_code}: {shlex.join(attempt.command)}"
            )
            if seen.started:
                self._never_ready = self._unanswered = 0
            elif self._waited_for_scheduler(attempt, seen):
                continue
            elif self._starts_again(attempt, seen, retries):
                retries -= 1
                continue
            # If no cell of the launch began, the first slot gets the outcome.
            ended = seen.started or (launch.slots[0].run_id,)
            results = self._take(launch, attempt, ended, tally)
            if self._continues(results, tally):
                continue
            pace.done(results, tally.closed)
            pending = [cell for cell in pending[len(ended) :] if cell.id not in tally.closed]
        pace.launch_over()

    def _continues(self, results: Sequence[RunResult], tally: Tally) -> bool:
        """Pause if another launch continues the cell of one that failed. Returns whether one does."""
        result = results[0]
        if result.outcome is Outcome.OK or self._deadline.is_over:
            return False
        seconds = self._conduct.continues_s(self._study, result, self._console)
        if seconds is None:
            return False
        tally.closed.pop(result.cell_id, None)
        self._pause(seconds)
        return True

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._deadline.is_over:
            time.sleep(POLL_S)

    def _waited_for_scheduler(self, attempt: Attempt, seen: Seen) -> bool:
        """Whether the scheduler did not answer a launch: it is started again after a while, without limit.

        A controller that is restarted does not touch its jobs, and their time runs.
        """
        if seen.away is None or attempt.stopped_by is not None:
            return False
        away_s = min(FIRST_PAUSE_S * 2**self._unanswered, LAST_PAUSE_S)
        self._unanswered += 1
        self._console.warn(
            f"the scheduler does not answer ({seen.away}); the launch is tried again in {away_s:.0f} s"
        )
        self._pause(away_s)
        return True

    def _starts_again(self, attempt: Attempt, seen: Seen, retries: int) -> bool:
        """Whether a launch in which no cell began is started again: what prevented it may have passed.

        Raises MachineError if no other launch would fare better.
        """
        self._never_ready += 1
        why = _passing_cause(attempt, seen)
        if why is not None and retries > 0:
            self._console.warn(f"{why}; the launch is started again")
            return True
        if self._never_ready >= NEVER_READY and not self._deadline.is_over:
            how = "without a word" if seen.last_line is None else f"with {seen.last_line}"
            if attempt.stopped_by is not None:
                # The last line of its log is then what its processes printed because they were ended.
                how = f"because {attempt.stopped_by}"
            raise MachineError(
                f"{self._never_ready} launches in a row ended before their first cell began, the last one "
                f"{how}; {_NOT_STARTED}"
            )
        return False

    def _take(self, launch: Launch, attempt: Attempt, ended: Sequence[str], tally: Tally) -> list[RunResult]:
        results: list[RunResult] = []
        cells = {slot.run_id: slot.cell_id for slot in launch.slots}
        for run_id in ended:
            result = self._study.result(cells[run_id], run_id, attempt)
            results.append(result)
            tally.take(result)
            if result.unproven is not None:
                self._console.warn(f"{result.cell_id}: {NOT_PROVEN}: {result.unproven}")
            if result.outcome is Outcome.OK:
                continue
            self._console.warn(f"{result.cell_id}: {result.outcome}: {result.reason}")
            if result.outcome is Outcome.OUT_OF_MEMORY and (words := self._lighter(result.cell_id)):
                self._console.note(f"  instead: {words}")
            for cell_id in tally.close(result.cell_id, result.outcome):
                self._console.warn(f"{cell_id} is left out: {tally.closed[cell_id]}")
        return results

    def _lighter(self, cell_id: str) -> str | None:
        """Name what may make a cell fit, by prediction; None if that or the memory of the cell is not
        predicted."""
        request = self._plan.request
        if cell_id not in self._plan.predicted_bytes:
            return None
        measured = Measured.of_study(self._study, self._study.results())
        devices = replace(devices_of(request), measured=measured)
        cell = self._study.cell(cell_id)
        return lighter(cell, Surroundings.of(cell, devices, request.gpus_per_node))


def _passing_cause(attempt: Attempt, seen: Seen) -> str | None:
    """The cause, which may have passed, that kept the first cell of a launch from its start; None if unknown.

    Raises MachineError if no launch can start on this machine.
    """
    (outcome,) = attempt.outcomes.values()
    if outcome is Outcome.NODE_FAILED or attempt.stopped_by is not None:
        return attempt.stopped_by if outcome is Outcome.NODE_FAILED else None
    if outcome is Outcome.CANCELLED and seen.fault is not None:
        raise MachineError(f"workers cannot start on this machine: {seen.fault}; {_NOT_STARTED}")
    if outcome is Outcome.MISSING_RANKS and seen.unmet is not None:
        return f"the workers did not meet ({seen.unmet})"
    return None


def _slots(planned: PlannedLaunch, cells: Sequence[Cell], tally: Tally) -> tuple[Slot, ...]:
    """One slot for each of the cells.

    A launch with forks runs all repeats of a cell. The first one proves it; the next ones find out whether it
    did.
    """
    done, proofs = Counter(tally.ok_runs), dict(tally.proofs)
    slots: list[Slot] = []
    for cell in cells:
        done[cell.id] += 1
        by_rounds = tally.plan.round is not None
        run, repeat = new_id(), done[cell.id] if planned.forks and not by_rounds else planned.repeat
        slots.append(Slot(cell_id=cell.id, run_id=run, repeat=repeat, proved_by=proofs.get(cell.id)))
        if planned.forks:
            proofs.setdefault(cell.id, run)
    return tuple(slots)


@dataclass(frozen=True, slots=True)
class LaunchMaker:
    """Makes the launches of one campaign: the workers' input, from what all of them have in common."""

    plan: Plan
    options: RunOptions
    machine: Machine
    context: CampaignContext
    warnings: tuple[str, ...] = ()

    def launch(self, planned: PlannedLaunch, cells: Sequence[Cell], tally: Tally) -> Launch:
        """The workers' input for a new launch of these cells."""
        starter, placement = self.context.starter, planned.placement
        here = placement.gpus_per_node if starter.hosts else placement.gpus
        threads = starter.threads if planned.device == "cuda" else None
        room = here <= self.machine.devices(planned.device)
        return Launch(
            launch_id=new_id(),
            placement=placement,
            device=planned.device,
            backend=planned.backend,
            evidence=Evidence.MEASURED if room and not planned.virtual else Evidence.EMULATED,
            slots=_slots(planned, cells, tally),
            forks=planned.forks,
            code=self.context.code,
            threads=self.machine.threads(planned.device) if threads is None else threads,
            pin=room and starter.pins,
            link_mbit_per_s=planned.link_mbit_per_s,
            env=planned.env,
            python=planned.python,
            source_folder=self.plan.request.source_folder,
            supervisor_pid=starter.supervisor_pid,
            warnings=self.warnings,
            job_id=self.context.job_id,
            silence_s=self.options.silence_s,
            trace=self.options.trace,
            tensorboard=self.options.tensorboard,
            proof=self.options.proof,
            job_variables=job_variables(),
            order=self.plan.order,
        )
