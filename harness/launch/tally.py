"""Count a study's runs: which of them count toward a cell, which failed, and which must still be done."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.launch.conduct import conduct_of
from harness.machine.device import nccl_settings, other_settings
from harness.machine.torch_devices import torch_version
from harness.plan.estimate import Earlier, Estimate, estimate
from harness.plan.schedule import PlannedLaunch, Progress, schedule
from harness.plan.surroundings import Machine, Measured
from reports.analysis.pooling import differing, fact_text
from reports.text import count
from results.cell import inferred_out_of_memory, pruning_reason
from results.environment import CodeVersion, Environment, Program
from results.job import Isolation, RunOptions
from results.outcome import Evidence, Outcome
from results.plan import Plan
from results.run import RunResult
from results.store import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that a run must share with one that would start now; None: not known here."""

    code_hash: str
    python: str | None = None
    torch: str | None = None
    nccl_settings: Mapping[str, str] | None = None
    settings: Mapping[str, str] | None = None
    cores: int | None = None
    """Cores of this machine, if runs would be on it."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Code of other packages, in the form of `CodeVersion.packages`."""
    programs: Mapping[str, Program] = field(default_factory=dict)
    """The program that the newest good run of a cell built, by cell id: only runs of it are pooled."""

    @classmethod
    def here(cls, code: CodeVersion) -> Conditions:
        """The conditions of runs on this machine."""
        return cls(
            code_hash=code.code_hash,
            python=platform.python_version(),
            torch=torch_version(),
            nccl_settings=nccl_settings(),
            settings=other_settings(),
            cores=Machine.here().cores,
            packages=code.packages,
        )

    @classmethod
    def elsewhere(cls, code: CodeVersion) -> Conditions:
        """The conditions of runs on other machines; only their code is known."""
        return cls(code_hash=code.code_hash, packages=code.packages)

    def after(self, results: Sequence[RunResult]) -> Conditions:
        """The same conditions for runs that would come after these: they build the same programs."""
        good = [run for run in results if run.outcome is Outcome.OK and run.environment is not None]
        newest = sorted(good, key=lambda run: (run.started_at or "", run.run_id))
        found = {run.cell_id: run.environment.program for run in newest if run.environment is not None}
        return replace(self, programs={cell: built for cell, built in found.items() if built is not None})

    def _has_room(self, environment: Environment) -> bool:
        """Whether the ranks of one host that share cores would now have a core each."""
        # Ranks with a GPU share that, not cores.
        shares_cores = environment.nodes == 1 and environment.device_uuid is None
        needed = environment.gpus_per_node * environment.threads
        return self.cores is not None and shares_cores and needed <= self.cores

    def changes(self, result: RunResult, *, virtual: bool) -> list[str]:
        """The conditions in which a run differs: `torch 2.12.0 then, 2.13.0 now`.

        The report does not pool runs of other code or versions, or emulated runs with measured ones, so such
        runs do not count as done; on `virtual` nodes all runs are emulated. No conditions
        differ for a run without a record, because they are unknown.
        """
        environment = result.environment
        if environment is None:
            return []
        pairs: dict[str, tuple[object, object]] = {
            "code of bench": (environment.code.code_hash, self.code_hash),
            "Python": (environment.python, self.python),
            "torch": (environment.torch, self.torch),
            "NCCL settings": (environment.nccl_settings, self.nccl_settings),
            "other settings": (environment.settings, self.settings),
        }
        for name, code in environment.code.packages.items():
            pairs[f"code of {name}"] = code, self.packages.get(name, "not installed")
        if not virtual and result.evidence is Evidence.EMULATED and self._has_room(environment):
            pairs["ranks"] = "on shared cores", "on cores of their own"
        built, now = environment.program, self.programs.get(result.cell_id)
        if built is not None and now is not None:
            pairs["program:"] = differing({"program": built.facts()}, {"program": now.facts()}).get(
                "program", (None, None)
            )
        return [
            f"{name} {fact_text(then)} then, {fact_text(now)} now"
            for name, (then, now) in pairs.items()
            if None not in (then, now) and now != then
        ]


@dataclass
class Tally:
    """The study's runs so far, updated while new ones end."""

    plan: Plan
    conditions: Conditions
    prune: bool = True
    """Whether a larger batch is left out when a smaller one ran out of memory."""
    ok_runs: dict[str, int] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    """Cells that this call does not run (again), each with the reason."""
    inferred: set[str] = field(default_factory=set)
    """The cells of `closed` that did not fail themselves: a smaller batch ran out of memory."""
    proofs: dict[str, str] = field(default_factory=dict)
    """The run that proved a cell under the present code."""
    earlier: dict[str, Earlier] = field(default_factory=dict)
    """The time that the runs of a cell took."""
    measured: Measured = field(default_factory=Measured)
    """Measurements by which steps of other cells are predicted."""
    by_conduct: bool = False
    """Whether the conduct of the plan knows which cells are done, under whatever conditions."""

    def __post_init__(self) -> None:
        self._virtual = self.plan.virtual_cells

    def estimate(self, launches: Sequence[PlannedLaunch], hosts: Machine) -> Estimate:
        """Estimate launches on such hosts by what was measured so far."""
        hardware = replace(hosts.hardware, measured=self.measured)
        return estimate(launches, earlier=self.earlier, hardware=hardware)

    def planned(self, isolation: Isolation) -> list[PlannedLaunch]:
        """The launches that are left of the plan, in order."""
        return schedule(
            self.plan.cells,
            repeats=self.plan.last_repeat,
            progress=Progress(
                ok_runs=self.ok_runs,
                closed=frozenset(self.closed),
                wanted={cell.id: self.plan.wanted(cell.id) for cell in self.plan.cells},
            ),
            seed=self.plan.request.seed,
            gpus_per_node=self.plan.request.gpus_per_node,
            isolation="cell" if conduct_of(self.plan).one_cell else isolation,
        )

    def allows(self, result: RunResult) -> bool:
        """Whether the run is comparable with the next ones."""
        return not self.conditions.changes(result, virtual=result.cell_id in self._virtual)

    def changes(self, result: RunResult) -> str:
        """The conditions in which a run that does not count differs; empty if it counts."""
        if self.by_conduct:
            return ""
        return "; ".join(self.conditions.changes(result, virtual=result.cell_id in self._virtual))

    def take(self, result: RunResult) -> None:
        """Count one run; a run that could not be pooled with new ones counts for nothing."""
        if result.outcome is not Outcome.OK or not self.allows(result):
            return
        cell = result.cell_id
        self.ok_runs[cell] = self.ok_runs.get(cell, 0) + 1
        if result.step_ns is not None:
            took = Earlier(
                step_ns=result.step_ns.value,
                spent_s={part: spent / 1e9 for part, spent in result.spent_ns.items()},
            )
            self.earlier[cell] = self.earlier[cell].and_then(took) if cell in self.earlier else took
        if result.proof is not None and result.proof.passed and result.proof.method != "earlier-run":
            self.proofs.setdefault(cell, result.run_id)

    def close(self, cell_id: str, outcome: Outcome) -> list[str]:
        """Do not run a cell again. Returns the cells that are left out with it."""
        self.closed[cell_id] = str(outcome)
        self.inferred.discard(cell_id)
        if outcome is not Outcome.OUT_OF_MEMORY or not self.prune:
            return []
        found = inferred_out_of_memory(self.plan.cells, {cell_id})
        new = [cell for cell in found if cell not in self.closed and not self.ok_runs.get(cell)]
        self.closed |= {cell: pruning_reason(cell_id) for cell in new}
        self.inferred |= set(new)
        return new

    def close_failed(self, results: Sequence[RunResult]) -> None:
        """Close the cells whose last run failed by its own fault."""
        last = {result.cell_id: result.outcome for result in results if self.allows(result)}
        for cell, outcome in last.items():
            if outcome is not Outcome.OK and not outcome.runs_again and not self.ok_runs.get(cell):
                self.close(cell, outcome)


def study_tally(
    study: Study, plan: Plan, results: Sequence[RunResult], conditions: Conditions, options: RunOptions
) -> Tally:
    """Tally the study's runs so far for the next ones of `plan`, in a call with these options.

    A run that a reviewer excluded does not count as done. A cell whose last run failed by its own fault stays
    closed unless `rerun_failed`; what was interrupted, or failed under other code, is open again. If the
    conduct of the plan knows the cells that are done, all others are open.
    """
    counted = study.review().counted(results)
    if options.rerun_failed:
        counted = [run for run in counted if run.unproven is None]
    so_far = Tally(plan=plan, conditions=conditions.after(counted), prune=options.prune)
    so_far.measured = Measured.of_study(study, filter(so_far.allows, results))
    if (done := conduct_of(plan).done(study)) is not None:
        so_far.ok_runs, so_far.by_conduct = {cell: plan.wanted(cell) for cell in done}, True
        return so_far
    for result in counted:
        so_far.take(result)
    if not options.rerun_failed:
        so_far.close_failed(counted)
    return so_far


def uncounted(results: Sequence[RunResult], plan: Plan, conditions: Conditions) -> list[str]:
    """Lines about good runs of the plan's cells that do not count: how many, and what has changed since."""
    so_far, cells = Tally(plan=plan, conditions=conditions.after(results)), {cell.id for cell in plan.cells}
    found = Counter(
        changes
        for result in results
        if result.cell_id in cells and result.outcome is Outcome.OK and (changes := so_far.changes(result))
    )
    return [
        f"{count(number, 'run')} of these cells do not count: {changes}" for changes, number in found.items()
    ]
