"""What a plan will take before anything runs: seconds and device-hours, and what the estimate rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.plan.run_parts import longest_unknown_step_s, run_parts
from harness.plan.schedule import PlannedLaunch
from results.catalogue.gpus import peak_flops_per_s
from results.cell import Cell, Device
from results.unknown import Unknown
from strategies.catalog import STRATEGIES
from workloads.catalog import WORKLOADS, facts

Basis = Literal["known", "assumed", "budget"]

STARTUP_S: Mapping[Device, float] = {"cpu": 8.0, "cuda": 15.0}
"""From the start of torchrun to the first cell. CPU: a trivial torchrun of 2 ranks took 7.9 to 9.5 s on a
2-core machine, of which `import torch` was 2.6 to 3.0 s (torch 2.13). CUDA: the same, with some seconds for
the CUDA context and NCCL's first communicator; assumed, not measured."""
CPU_CORE_FLOPS_PER_S = 50e9
"""One core in fp32 on large matrix products: measured on a 2-core x86 machine with torch 2.13."""
PEAK_SHARE = 0.4
"""Share of a GPU's dense peak that a training step reaches: assumed."""
BACKWARD_AND_FORWARD = 3
"""FLOPs of forward and backward over those of forward: backward has two products for each of forward's
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""
_BUDGETED = ("warm-up", "measure")
"""Parts of a run that may take longer than in an earlier one, up to their limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What step times are assumed from where none are known."""

    cores: int | None = None
    """CPU cores of a node; ranks beyond them share. None: each rank has a core."""
    gpu_name: str | None = None
    """As its driver gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier runs of a cell took."""

    step_ns: float
    spent_s: Mapping[str, float] = field(default_factory=dict)
    """The longest time of each part of a run, by the names of `RankRecord.spent_ns`; empty: not recorded."""

    def and_then(self, later: Earlier) -> Earlier:
        """Both, with the step time of the later one."""
        longest = {part: max(seconds, self.spent_s.get(part, 0.0)) for part, seconds in later.spent_s.items()}
        return Earlier(step_ns=later.step_ns, spent_s={**self.spent_s, **longest})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one step of a cell, and where it comes from."""

    basis: Basis
    seconds: float | Unknown
    """Unknown where the basis is the budget alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEstimate:
    """One launch: its start and its runs."""

    seconds: float
    gpus: int

    @property
    def device_hours(self) -> float:
        return self.seconds * self.gpus / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All launches of a plan, one after another."""

    launches: tuple[LaunchEstimate, ...]
    """In the order they were given."""
    bases: Mapping[str, StepTime]
    """By cell id."""

    @property
    def seconds(self) -> float:
        return sum(launch.seconds for launch in self.launches)

    @property
    def device_hours(self) -> float:
        return sum(launch.device_hours for launch in self.launches)

    @property
    def notes(self) -> tuple[str, ...]:
        """How many cells rest on what, as sentences; nothing where all is known from earlier runs."""
        bases = [step.basis for step in self.bases.values()]
        total, assumed, budget = len(bases), bases.count("assumed"), bases.count("budget")
        unknown = (step.seconds for step in self.bases.values() if isinstance(step.seconds, Unknown))
        notes = []
        if assumed:
            notes.append(
                f"assumed: step times of {assumed} of {total} cells follow from their FLOPs, unmeasured"
            )
        if budget:
            reasons = "; ".join(dict.fromkeys(step.reason for step in unknown))
            notes.append(f"assumed: {budget} of {total} cells take their measuring budget: {reasons}")
        return tuple(notes)


def estimate(
    launches: Sequence[PlannedLaunch],
    *,
    earlier: Mapping[str, Earlier],
    hardware: Hardware | None = None,
) -> Estimate:
    """Time and device-hours of `launches`.

    `earlier` holds what earlier runs took, by cell id; what they did not record is modelled (`run_parts`).
    A run is taken to use its whole budget, so that runs that reach their target sooner end earlier than said
    here.
    """
    machine = hardware or Hardware()
    cells = {cell.id: cell for launch in launches for cell in launch.cells}
    steps = {
        cell_id: estimated_step_time(
            cell, known_ns=earlier[cell_id].step_ns if cell_id in earlier else None, hardware=machine
        )
        for cell_id, cell in cells.items()
    }
    proven = set(earlier)
    estimates = []
    for launch in launches:
        seconds = STARTUP_S[launch.device]
        for cell in launch.cells:
            known = earlier[cell.id].spent_s if cell.id in earlier else {}
            seconds += run_seconds(cell, steps[cell.id], proves=cell.id not in proven, known_s=known)
            proven.add(cell.id)
        estimates.append(LaunchEstimate(seconds=seconds, gpus=launch.placement.gpus))
    return Estimate(launches=tuple(estimates), bases=steps)


def estimated_step_time(cell: Cell, *, known_ns: float | None, hardware: Hardware) -> StepTime:
    """The step time of a cell: known, or its FLOPs over an assumed rate of its devices, or not to be told.

    The ranks of a replica are taken to have equal parts of its work; a pipeline's wait for its bubble.
    """
    if known_ns is not None:
        return StepTime(basis="known", seconds=known_ns / 1e9)
    alone = replica_seconds(cell, hardware)
    if isinstance(alone, Unknown):
        return StepTime(basis="budget", seconds=alone)
    idle = STRATEGIES.facts(cell.strategy).bubble(cell.gpus)
    return StepTime(basis="assumed", seconds=alone / cell.model_parallel * (1 + idle))


def replica_seconds(cell: Cell, hardware: Hardware) -> float | Unknown:
    """What a replica computes in one step, as if one device did all of it."""
    forward = facts(WORKLOADS.parse(cell.workload)).forward_flops
    if isinstance(forward, Unknown):
        return Unknown(f"the FLOPs of {cell.workload} are {forward}")
    rate = _rate(cell, hardware)
    if isinstance(rate, Unknown):
        return rate
    return BACKWARD_AND_FORWARD * forward * cell.batch_per_replica / rate


def _rate(cell: Cell, hardware: Hardware) -> float | Unknown:
    """FLOP/s of one worker's share of the machine."""
    if cell.device == "cpu":
        crowd = max(1.0, cell.gpus / (hardware.cores or cell.gpus))
        return CPU_CORE_FLOPS_PER_S / crowd
    if hardware.gpu_name is None:
        return Unknown("the kind of GPU is unknown")
    peak = peak_flops_per_s(hardware.gpu_name, cell.precision)
    if peak is None:
        return Unknown(f"the GPU catalogue has no peak of {hardware.gpu_name} in {cell.precision}")
    return PEAK_SHARE * peak


def run_seconds(cell: Cell, step: StepTime, *, proves: bool, known_s: Mapping[str, float]) -> float:
    """One run: the sum of its parts, by `run_parts` or as long as earlier runs took (`known_s`).

    A step of which nothing is known counts as the longest that the measuring budget has room for; a model of
    an unknown number of parameters as a small one.
    """
    step_s = longest_unknown_step_s(cell) if isinstance(step.seconds, Unknown) else step.seconds
    counted = facts(WORKLOADS.parse(cell.workload)).parameters
    parameters = 0 if isinstance(counted, Unknown) else counted
    parts = run_parts(cell, step_s, parameters=parameters, proves=proves)
    known = {part: known_s[part] for part in parts if part in known_s and part not in _BUDGETED}
    return sum((parts | known).values())
