"""A study's launches, one after another, until every cell has its runs or its reason."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from harness.console import Console
from harness.device import nccl_settings
from harness.launch.follow import LaunchState
from harness.launch.machine import Machine
from harness.launch.pace import Pace
from harness.launch.preflight import require_room, warnings
from harness.launch.supervise import SILENCE_S, Supervisor, Watch
from harness.plan.estimate import estimate
from harness.plan.schedule import Isolation, PlannedLaunch, Progress, schedule
from results.cell import Cell
from results.environment import CodeVersion
from results.errors import MachineError
from results.launch import Attempt, Launch, Slot
from results.outcome import Evidence, Outcome
from results.plan import Plan
from results.run import RunResult
from results.store import Study, new_id

LOG_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run; none of it changes what work a cell is."""

    isolation: Isolation = "launch"
    oversubscribe: bool = False
    max_time_s: float | None = None
    rerun_failed: bool = False
    silence_s: float = SILENCE_S


@dataclass
class _Tally:
    """What is known of the study's runs while it goes on."""

    ok_runs: dict[str, int] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    """Cells that are not run (again) by this call."""
    virtual: Set[str] = frozenset()
    """Cells that are emulated wherever they run."""
    proofs: dict[str, str] = field(default_factory=dict)
    """The run that proved a cell under the present code."""
    step_ns: dict[str, float] = field(default_factory=dict)

    def take(self, result: RunResult, code: CodeVersion, machine: Machine) -> None:
        """Learn from one run; one that could not be pooled with new ones counts for nothing."""
        virtual = result.cell_id in self.virtual
        if result.outcome is not Outcome.OK or not comparable(result, code, machine, virtual=virtual):
            return
        cell = result.cell_id
        self.ok_runs[cell] = self.ok_runs.get(cell, 0) + 1
        if result.step_ns is not None:
            self.step_ns[cell] = result.step_ns.value
        if result.proof is not None and result.proof.method != "earlier-run":
            self.proofs.setdefault(cell, result.run_id)


def tally(
    results: Sequence[RunResult], code: CodeVersion, *, virtual: Set[str], rerun_failed: bool
) -> _Tally:
    """What the study's runs so far mean for the next ones; `virtual` names the cells with virtual nodes.

    A cell whose last run failed by its own fault stays closed unless `rerun_failed`; what was interrupted,
    or failed under other code, is open again.
    """
    so_far, machine = _Tally(virtual=virtual), Machine.here()
    last: dict[str, Outcome] = {}
    for result in results:
        so_far.take(result, code, machine)
        if comparable(result, code, machine, virtual=result.cell_id in virtual):
            last[result.cell_id] = result.outcome
    if not rerun_failed:
        so_far.closed = {
            cell
            for cell, outcome in last.items()
            if outcome is not Outcome.OK and not outcome.runs_again and not so_far.ok_runs.get(cell)
        }
    return so_far


def comparable(result: RunResult, code: CodeVersion, machine: Machine, *, virtual: bool) -> bool:
    """Whether a run that would start now on `machine` could be pooled with this one.

    Runs of other code or versions are not pooled by the report, nor emulated ones with measured ones, and
    so do not count as done; on `virtual` nodes all are emulated. Of a run that left no record nothing is
    known, and it counts.
    """
    environment = result.environment
    if environment is None:
        return True
    shared_cores = result.evidence is Evidence.EMULATED and environment.nodes == 1
    if shared_cores and not virtual and environment.gpus_per_node * environment.threads <= machine.cores:
        return False
    now = (code.code_hash, platform.python_version(), nccl_settings(), _installed("torch"))
    then = (environment.code.code_hash, environment.python, environment.nccl_settings, environment.torch)
    return now == then


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class Campaign:
    """Runs what is left of one plan on this machine."""

    def __init__(self, study: Study, plan: Plan, options: RunOptions, console: Console) -> None:
        self._study = study
        self._plan = plan
        self._options = options
        self._console = console
        self._machine = Machine.here()

    def tally(self, results: Sequence[RunResult], code: CodeVersion) -> _Tally:
        """What the study's runs so far mean for the next ones of this plan."""
        return tally(results, code, virtual=self._plan.virtual_cells, rerun_failed=self._options.rerun_failed)

    def planned(self, so_far: _Tally) -> list[PlannedLaunch]:
        """The launches that are left, in order."""
        return schedule(
            self._plan.cells,
            repeats=self._plan.request.repeats,
            progress=Progress(ok_runs=so_far.ok_runs, closed=so_far.closed),
            seed=self._plan.request.seed,
            gpus_per_node=self._plan.request.gpus_per_node,
            isolation=self._options.isolation,
        )

    def run(self, code: CodeVersion, checkout: Path, lock: int) -> list[RunResult]:
        """Run all launches; returns every result of the study.

        Raises Interrupted after Ctrl-C, and MachineError if workers do not start.
        """
        results = self._study.collect()
        so_far = self.tally(results, code)
        launches = self.planned(so_far)
        if not launches:
            return results
        found = warnings(self._plan.request.device)
        for warning in found:
            self._console.warn(warning)
        costs = estimate(
            launches,
            known_step_ns=so_far.step_ns,
            hardware=self._machine.hardware(self._plan.request.device),
        )
        runs = [len(launch.cells) for launch in launches]
        with self._console.progress(sum(runs)) as line:
            pace = Pace(line, costs.launches, runs, max_time_s=self._options.max_time_s)
            crew = _Crew(self._plan, self._machine, code, checkout, found)
            for planned in launches:
                self._run_launch(planned, crew, so_far, pace, lock)
                if pace.is_over:
                    break
        return self._study.collect()

    def _run_launch(self, planned: PlannedLaunch, crew: _Crew, so_far: _Tally, pace: Pace, lock: int) -> None:
        pending = [cell for cell in planned.cells if cell.id not in so_far.closed]
        pace.done(len(planned.cells) - len(pending))
        while pending and not pace.is_over:
            require_room(self._study.root)
            launch = crew.launch(planned, pending, so_far)
            watch = Watch(
                report=pace.report,
                deadline=pace.deadline,
                silence_s=self._options.silence_s,
                lock=lock,
            )
            attempt, state = Supervisor(self._study, launch, crew.checkout, watch).run()
            if not state.started and attempt.stopped_by is not None:
                break
            if not state.started:
                raise MachineError(_did_not_start(self._study.launch_folder(launch.launch_id)))
            self._take(launch, attempt, state, so_far, crew.code)
            pending = pending[len(state.started) :]
            pace.done(len(state.started))
        pace.launch_over()

    def _take(
        self, launch: Launch, attempt: Attempt, state: LaunchState, so_far: _Tally, code: CodeVersion
    ) -> None:
        cells = {slot.run_id: slot.cell_id for slot in launch.slots}
        for run_id in state.started:
            result = self._study.result(cells[run_id], run_id, attempt)
            so_far.take(result, code, self._machine)
            if result.outcome is not Outcome.OK:
                so_far.closed.add(result.cell_id)
                self._console.warn(f"{result.cell_id}: {result.outcome}: {result.reason}")


@dataclass(frozen=True, slots=True)
class _Crew:
    """What all launches of a campaign have in common."""

    plan: Plan
    machine: Machine
    code: CodeVersion
    checkout: Path
    warnings: tuple[str, ...]

    def launch(self, planned: PlannedLaunch, cells: Sequence[Cell], so_far: _Tally) -> Launch:
        slots = tuple(
            Slot(
                cell_id=cell.id,
                run_id=new_id(),
                repeat=planned.repeat,
                proved_by=so_far.proofs.get(cell.id),
            )
            for cell in cells
        )
        return build_launch(
            planned,
            slots,
            self.machine,
            code=self.code,
            warnings=self.warnings,
            source_folder=self.plan.request.source_folder,
        )


def build_launch(
    planned: PlannedLaunch,
    slots: tuple[Slot, ...],
    machine: Machine,
    *,
    code: CodeVersion,
    warnings: tuple[str, ...] = (),
    source_folder: str | None = None,
) -> Launch:
    """The worker's input for a launch on this machine, watched by this process."""
    by_room = machine.evidence(planned.placement, planned.device)
    return Launch(
        launch_id=new_id(),
        placement=planned.placement,
        device=planned.device,
        backend=planned.backend,
        evidence=Evidence.EMULATED if planned.virtual else by_room,
        slots=slots,
        code=code,
        threads=machine.threads(planned.device),
        pin=by_room is Evidence.MEASURED,
        link_mbit_per_s=planned.link_mbit_per_s,
        source_folder=source_folder,
        supervisor_pid=os.getpid(),
        warnings=warnings,
    )


def _did_not_start(folder: Path) -> str:
    """Why no worker came as far as its first cell, with the end of what they printed."""
    logs = [*sorted(folder.glob("torchrun/*/attempt_0/0/stderr.log")), folder / "torchrun.log"]
    for log in logs:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"the workers did not start; the end of {log}: {' | '.join(lines[-LOG_LINES:])}"
    return f"the workers did not start, and left no word in {folder}"
